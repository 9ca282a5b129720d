"""What may be given for one call of the chat model."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from forkserve.adapters.sampling import SAMPLING
from forkserve.errors import ConfigError

__all__ = ["check_names"]

_NAMES = frozenset(
    (
        *SAMPLING,
        *("max_tokens", "model", "n", "stop", "stream", "timeout"),
        *("tools", "tool_choice", "parallel_tool_calls", "response_format"),
    )
)


def check_names(given: Iterable[str]) -> None:
    """Raise ConfigError for a name that nobody reads, with the nearest one that is read."""
    for name in given:
        if name not in _NAMES:
            near = difflib.get_close_matches(name, _NAMES, n=1, cutoff=0.5)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise ConfigError(
                f"unknown parameter '{name}' of a call{hint} Known are {', '.join(sorted(_NAMES))}"
            )
