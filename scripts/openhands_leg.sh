#!/usr/bin/env bash
# Run the tests of the OpenHands adapter against the real SDK, in an environment of its own: the SDK
# wants Python 3.12 or newer, the rest of ForkServe 3.11.  Without such a Python it says so and is
# content.  Usage: scripts/openhands_leg.sh [--packages | PYTEST ARGUMENTS]
# --packages: only install what the leg needs besides ForkServe, which takes most of its time and can
# be done beside `make setup`: it compiles nothing.
# FORKSERVE_PY312 names the interpreter, if it is not found by itself.
set -euo pipefail
cd "$(dirname "$0")/.."

find_python() {
    local python
    for python in "${FORKSERVE_PY312:-}" python3.12 "$HOME"/.pyenv/versions/3.12*/bin/python; do
        if [[ -n $python ]] && command -v "$python" >/dev/null &&
            "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
            command -v "$python"
            return
        fi
    done
    return 1
}

if ! python=$(find_python); then
    echo "No Python 3.12 here: the tests of the OpenHands adapter were NOT run."
    echo "Give one by FORKSERVE_PY312=/path/to/python3.12, or put python3.12 on the PATH."
    exit 0
fi

venv=.venv-openhands
stamp=$venv/.installed
packages=$venv/.packages
needs=(pyproject.toml constraints.txt constraints-openhands.txt scripts/openhands_leg.sh)
newer() { # than all that it was made from
    local file
    for file in "${needs[@]}"; do
        [[ $1 -nt $file ]] || return 1
    done
}
pip="$venv/bin/python -m pip --quiet --quiet --disable-pip-version-check install --no-compile"
begin=$SECONDS
if ! newer $packages; then
    [[ -x $venv/bin/python ]] || "$python" -m venv --clear $venv
    listed=$($venv/bin/python - <<'PY'
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*project["dependencies"], *project["optional-dependencies"]["openhands"], sep="\n")
PY
)
    mapfile -t wanted <<<"$listed" # by a variable, so that a failure ends the script
    $pip -c constraints.txt -c constraints-openhands.txt "${wanted[@]}" \
        editables hatchling hypothesis pytest pytest-asyncio pytest-timeout
    touch $packages
    echo "Packages installed into $venv in $((SECONDS - begin)) s"
fi
[[ ${1:-} != --packages ]] || exit 0
if ! newer $stamp; then
    $pip --no-deps --no-build-isolation -e .
    touch $stamp
    echo "Installed into $venv in $((SECONDS - begin)) s"
fi
$venv/bin/python - <<'PY'
import platform
from importlib.metadata import version
print("Python", platform.python_version(), *(f"{n} {version(n)}" for n in ("openhands-sdk", "litellm")))
PY
exec $venv/bin/python -m pytest -q tests/adapters/openhands "$@"
