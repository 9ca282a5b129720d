#!/usr/bin/env bash
# Run the tests of the GPU kernels with the oldest torch and Triton that ForkServe takes, in an
# environment of their own: compiled for GPUs that need not be there, and in Triton's interpreter.
# Their wheels are gigabytes and the interpreter takes its time, so nobody but `make triton` comes
# here.  Usage: scripts/triton_pair.sh [PYTEST ARGUMENTS]
# FORKSERVE_TRITON_VENV names an environment with the pair; then nothing is installed.
set -euo pipefail
cd "$(dirname "$0")/.."
# numpy: the interpreter of Triton 3.6 fails on later ones.
pair=(torch==2.11.0 triton==3.6.0 'numpy<2.4')

venv=${FORKSERVE_TRITON_VENV:-.venv-triton}
stamp=$venv/.installed
if [[ -z ${FORKSERVE_TRITON_VENV:-} ]] &&
    ! [[ $stamp -nt pyproject.toml && $stamp -nt constraints.txt && $stamp -nt $0 ]]; then
    begin=$SECONDS
    [[ -x $venv/bin/python ]] || "${PYTHON:-python3}" -m venv --clear "$venv"
    mapfile -t needs < <("$venv/bin/python" - <<'PY'
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*project["dependencies"], *project["optional-dependencies"]["engine"], sep="\n")
PY
    )
    grep -viE '^(torch|triton|numpy)==' constraints.txt >"$venv/constraints.txt"
    "$venv/bin/python" -m pip --quiet --quiet --disable-pip-version-check install --no-compile \
        -c "$venv/constraints.txt" "${pair[@]}" "${needs[@]}" transformers pytest pytest-timeout
    touch "$stamp"
    echo "Installed into $venv in $((SECONDS - begin)) s"
fi

python=$venv/bin/python
"$python" - "${pair[@]:0:2}" <<'PY'
import sys
from importlib.metadata import version
found = [f"{name}=={version(name)}" for name in ("torch", "triton")]
print(*found, "numpy", version("numpy"))
sys.exit(f"wanted: {' '.join(sys.argv[1:])}" if found != sys.argv[1:] else 0)
PY
export PYTHONPATH=$PWD OMP_NUM_THREADS=1
tests=("$python" -m pytest -q -c benchmarks/gpu/pytest.ini --rootdir . --confcutdir tests/kernels
    -m "not long")
failed=0
none=5  # pytest's status when arguments leave no test
run() {
    local rc=0
    env TRITON_INTERPRET="$1" "${tests[@]}" "${@:2}" || rc=$?
    ((rc == 0 || rc == none)) || failed=1
}
run 0 tests/kernels/test_compile.py tests/kernels/test_launches.py "$@"
run 1 tests/kernels/device "$@"
exit $failed
