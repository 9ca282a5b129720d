"""How long a pass will take, learnt from the passes that ran."""

from __future__ import annotations

import bisect

__all__ = ["CostModel"]

_WEIGHT = 0.2  # of a new sample, once there are some
_OUTLIER = 3.0  # then a sample counts as at most this multiple of what was expected
_SETTLED = 3  # samples of a size after which it is settled
# A first guess: attending to 1,000 rows costs a fifth of a row's other work.
_ATTENTION = 0.2 / 1000


class CostModel:
    """ms(n, c) = base(n) + slope * n * c for n rows that attend to c rows each.

    base is kept at powers of two, because a pass is bound by memory for few rows and by
    arithmetic for many; it is interpolated between them and never falls.
    """

    def __init__(self, one_row_ms: float, many_rows: int, many_rows_ms: float) -> None:
        """Start from a pass over one row and one over `many_rows`, both without context."""
        self._base = {0: one_row_ms}
        self._seen: dict[int, int] = {}
        if many_rows > 1:
            self._base[_place(many_rows)] = max(many_rows_ms, one_row_ms)
        self._slope = _ATTENTION * max(many_rows_ms, one_row_ms) / max(many_rows, 1)

    def predict_ms(self, new_tokens: int, context_tokens: float = 0.0) -> float:
        """Predicted time; never falls as new_tokens grows."""
        if new_tokens <= 0:
            return 0.0
        return self._base_ms(new_tokens) + self._slope * new_tokens * max(context_tokens, 0.0)

    def observe(self, new_tokens: int, context_tokens: float, ms: float) -> None:
        """Learn from a pass of `new_tokens` rows, `context_tokens` on average, that took `ms`."""
        if new_tokens <= 0:
            return
        place = _place(new_tokens)
        count = self._seen[place] = self._seen.get(place, 0) + 1
        expected = self.predict_ms(new_tokens, context_tokens)
        if count > _SETTLED:
            ms = min(max(ms, expected / _OUTLIER), expected * _OUTLIER)
        weight = max(_WEIGHT, 1 / count)
        attention = self._slope * new_tokens * context_tokens
        # The error is shared out by how much of the pass each part was thought to be.
        share = attention / expected
        self._slope *= 1 + _WEIGHT * share * (min(ms / expected, _OUTLIER) - 1)
        base = self._base_ms(new_tokens)
        target = self._base_ms(1 << place) * max(ms * (1 - share), 1e-3) / base
        known = self._base.get(place, self._base_ms(1 << place))
        self._base[place] = known + weight * (target - known)

    def _base_ms(self, n: int) -> float:
        """Interpolated base, made monotone by a running maximum."""
        places = sorted(self._base)
        sizes, values, top = [1 << p for p in places], [], 0.0
        for place in places:
            top = max(top, self._base[place])
            values.append(top)
        i = bisect.bisect_right(sizes, n)
        if i == len(sizes):  # beyond what was seen: in proportion
            return values[-1] * n / sizes[-1]
        low, high = sizes[i - 1], sizes[i]
        return values[i - 1] + (values[i] - values[i - 1]) * (n - low) / (high - low)


def _place(n: int) -> int:
    """The power of two at or below n."""
    return n.bit_length() - 1
