#!/usr/bin/env bash
# Build the native kernels for 64-bit ARM, run them in an emulator, and compare what they give with
# this machine's, bit for bit (tests/kernels/bits.cpp).  Without a cross compiler or the emulator it
# says so and is content.  On Debian: apt-get install g++-aarch64-linux-gnu qemu-user
# Usage: scripts/arm_leg.sh
# FORKSERVE_ARM_CXX and FORKSERVE_ARM_RUN name the compiler and the emulator with its libraries,
# FORKSERVE_PYTHON an interpreter, if they are not found by themselves.
set -euo pipefail
cd "$(dirname "$0")/.."

cxx=${FORKSERVE_ARM_CXX:-aarch64-linux-gnu-g++}
run=${FORKSERVE_ARM_RUN:-qemu-aarch64 -L /usr/aarch64-linux-gnu}
python=${FORKSERVE_PYTHON:-python3}
if [[ $(uname -m) != x86_64 ]]; then
    echo "This is no x86-64 machine: the kernels for ARM were NOT compared with another's."
    exit 0
fi
for tool in "${cxx%% *}" "${run%% *}"; do
    if ! command -v "$tool" >/dev/null; then
        echo "No $tool here: the kernels for ARM were NOT built and compared."
        echo "On Debian: apt-get install g++-aarch64-linux-gnu qemu-user"
        exit 0
    fi
done

out=build/arm
mkdir -p $out
build='import sys, hatch_build as b; b.build(b.Path(sys.argv[1]), sys.argv[2])'
CXX=$cxx "$python" -c "$build" $out aarch64
host=forkserve/kernels/native/libforkserve-avx2.so # of `make setup`
[[ -e $host ]] || "$python" hatch_build.py
driver=(-std=c++17 -O1 -Iforkserve/kernels/native tests/kernels/bits.cpp -ldl)
$cxx -march=armv8-a "${driver[@]}" -o $out/bits-aarch64
"${CXX:-c++}" -march=x86-64-v3 "${driver[@]}" -o $out/bits-x86_64

$out/bits-x86_64 $host >$out/x86_64.txt
# A processor of the first generation; libraries that need more stop there.
QEMU_CPU=${QEMU_CPU:-cortex-a72} $run $out/bits-aarch64 $out/libforkserve-neon.so >$out/aarch64.txt
if ! diff $out/x86_64.txt $out/aarch64.txt >$out/diff.txt; then
    echo "ARM and x86-64 differ in $(grep -c '^>' $out/diff.txt) of $(wc -l <$out/x86_64.txt) results:"
    head -20 $out/diff.txt
    exit 1
fi
echo "ARM and x86-64 agree in every bit of $(wc -l <$out/x86_64.txt) results."
