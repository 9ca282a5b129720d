"""How long tools take: the pause that speculation may fill."""

from __future__ import annotations

from collections import OrderedDict, deque
from math import isfinite

from forkserve.errors import ConfigError

__all__ = ["IdleTimes"]

_TOOLS = 256  # tools remembered, least recently used out first


class IdleTimes:
    """A quantile of each tool's recent times (ms).

    A low quantile is the safe side: a pause taken for longer than it is leaves speculation
    unfinished when the observation arrives.  window: times kept per tool.
    """

    def __init__(self, quantile: float, window: int = 64) -> None:
        if not 0 <= quantile <= 1 or window < 1:
            raise ConfigError(f"quantile={quantile} must be in [0, 1] and window={window} >= 1")
        self._quantile = quantile
        self._window = window
        self._times: OrderedDict[str, deque[float]] = OrderedDict()

    def observe(self, tool: str, ms: float) -> None:
        """A call of `tool` took `ms`."""
        if not isfinite(ms) or ms < 0:
            raise ConfigError(f"tool {tool!r} cannot have taken {ms} ms")
        self._times.setdefault(tool, deque(maxlen=self._window)).append(ms)
        self._times.move_to_end(tool)
        if len(self._times) > _TOOLS:
            self._times.popitem(last=False)

    def expect(self, tool: str, default: float) -> float:
        """Quantile of the tool's times, interpolated linearly; `default` if none was seen."""
        times = self._times.get(tool)
        if not times:
            return default
        ordered = sorted(times)
        place = self._quantile * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])
