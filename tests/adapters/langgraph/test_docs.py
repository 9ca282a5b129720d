"""The page's first program runs as it is pasted."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "adapters" / "langgraph.md"
PROGRAM = re.compile(r"<!-- run: mock -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_programs_marked_so_run_as_pasted(tmp_path: Path) -> None:
    programs = PROGRAM.findall(PAGE.read_text(encoding="utf-8"))
    assert len(programs) >= 2
    for program in programs:
        command = [sys.executable, "-W", "error", "-c", program]
        done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()


def test_the_install_line_brings_what_the_program_imports() -> None:
    assert "'.[langgraph,engine]'" in PAGE.read_text(encoding="utf-8")
