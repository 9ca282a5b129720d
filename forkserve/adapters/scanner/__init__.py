"""Tool calls found in text while it is written.

`Scanner` knows the notations that models are trained on; `TextScanner` knows Thought / Action /
Observation.  Both report a call once, as soon as its last character is there, however the text is
cut into pieces, and read no character more than a fixed number of times.
"""

from __future__ import annotations

from forkserve.adapters.scanner.calls import ParsedToolCall, ScanError, ScanFault
from forkserve.adapters.scanner.stream import Scanner
from forkserve.adapters.scanner.thought import TextScanner

__all__ = ["ParsedToolCall", "ScanError", "ScanFault", "Scanner", "TextScanner"]
