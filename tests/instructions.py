"""What a piece of Python costs, as a number that is the same on every run: no clock is asked."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import forkserve

__all__ = ["instructions", "own_calls"]


def instructions(work: Callable[[], object]) -> int:
    """Bytecode instructions that `work` runs in this thread, those of what it calls included."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def own_calls(run: Callable[[], object]) -> Counter[str]:
    """Calls of functions of the package in this thread, by name."""
    found: Counter[str] = Counter()
    package = str(Path(forkserve.__file__).parent)

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            found[frame.f_code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return found
