"""The programs of docs/sessions.md run as they are printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "sessions.md"


def test_programs_of_the_guide_run(tmp_path: Path) -> None:
    text = GUIDE.read_text(encoding="utf-8")
    programs = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(programs) > 5
    script = tmp_path / "guide.py"
    script.write_text("\n".join(programs), encoding="utf-8")
    command = [sys.executable, "-W", "error", str(script)]
    root = {"PYTHONPATH": str(GUIDE.parents[1])}
    done = subprocess.run(
        command, check=False, cwd=tmp_path, capture_output=True, text=True, env=root
    )
    assert done.returncode == 0, done.stderr
