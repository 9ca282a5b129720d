"""How long a pass will take, learnt from the passes that ran."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

__all__ = ["CostModel"]

_WEIGHT = 0.2  # of a new sample, once there are some
_OUTLIER = 3.0  # a sample counts as at most this multiple of what was expected, or its inverse
_TRUST = 16  # samples of a size after which more of them do not make it count for more
# A first guess: attending to 1,000 rows costs a fifth of a row's other work.
_ATTENTION = 0.2 / 1000
_PLACES = 21  # sizes 1, 2, 4, ... 2^20; larger ones in proportion


class CostModel:
    """ms(n, c) = base(n) + slope * n * c for n rows that attend to c rows each.

    base starts from two timed passes, and is corrected by a ratio for every power of two that was
    seen, because a pass is bound by memory for few rows and by arithmetic for many.  A size that
    was never seen has its neighbours' ratio, by their distance; one beyond all that were seen has
    the median of all.  base never falls: where it would, sizes are levelled by how often each was
    seen, so that one bad sample does not lift all larger sizes.
    """

    def __init__(self, one_row_ms: float, many_rows: int, many_rows_ms: float) -> None:
        """Start from a pass over one row and one over `many_rows`, both without context."""
        many_ms = max(many_rows_ms, one_row_ms)
        self._prior = [
            _line(1 << place, one_row_ms, max(many_rows, 1), many_ms) for place in range(_PLACES)
        ]
        self._seen: dict[int, int] = {}
        self._ratio: dict[int, float] = {}
        self._slope = _ATTENTION * many_ms / max(many_rows, 1)
        self._base = self._level()

    def predict_ms(self, new_tokens: int, context_tokens: float = 0.0) -> float:
        """Predicted time; never falls as new_tokens grows."""
        if new_tokens <= 0:
            return 0.0
        return self._base_ms(new_tokens) + self._slope * new_tokens * max(context_tokens, 0.0)

    def observe(self, new_tokens: int, context_tokens: float, ms: float) -> None:
        """Learn from a pass of `new_tokens` rows, `context_tokens` on average, that took `ms`."""
        if new_tokens <= 0:
            return
        place = min(_place(new_tokens), _PLACES - 1)
        count = self._seen[place] = self._seen.get(place, 0) + 1
        expected = self.predict_ms(new_tokens, context_tokens)
        off = min(max(ms / expected, 1 / _OUTLIER), _OUTLIER)
        # The error is shared out by how much of the pass each part was thought to be.
        share = self._slope * new_tokens * context_tokens / expected
        now = self._ratio.get(place, self._base[place] / self._prior[place])
        target = now * max(expected * off * (1 - share), 1e-3) / self._base_ms(new_tokens)
        weight = max(_WEIGHT, 1 / (count + 1))  # what was thought before counts as one sample
        self._ratio[place] = now + weight * (target - now)
        self._slope *= 1 + _WEIGHT * share * (off - 1)
        self._base = self._level()

    def _base_ms(self, n: int) -> float:
        """Between two powers of two in a line, beyond the last in proportion."""
        place = _place(n)
        if place >= _PLACES - 1:
            return self._base[-1] * n / (1 << (_PLACES - 1))
        low, high = self._base[place], self._base[place + 1]
        return low + (high - low) * (n / (1 << place) - 1)

    def _level(self) -> list[float]:
        """base at every power of two: prior times ratio, made monotone.

        By pooling adjacent violators: neighbours that fall are replaced by their weighted mean
        (isotonic regression; Barlow et al., 1972).
        """
        blocks: list[tuple[float, float, int]] = []  # mean, weight, places
        for place, (prior, ratio) in enumerate(zip(self._prior, self._ratios(), strict=True)):
            seen = min(self._seen.get(place, 0), _TRUST)
            blocks.append((prior * ratio, seen + 1e-3, 1))
            while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
                (a, u, m), (b, v, n) = blocks[-2:]
                blocks[-2:] = [((a * u + b * v) / (u + v), u + v, m + n)]
        return [mean for mean, _, places in blocks for _ in range(places)]

    def _ratios(self) -> list[float]:
        """What to multiply the prior of each size by."""
        known = sorted(self._ratio)
        out = [median(self._ratio.values()) if known else 1.0] * _PLACES
        for low, high in pairwise(known):
            first, last = self._ratio[low], self._ratio[high]
            for place in range(low, high):
                out[place] = first + (place - low) / (high - low) * (last - first)
        if known:
            out[known[-1]] = self._ratio[known[-1]]
        return out


def _line(n: int, one_ms: float, many: int, many_ms: float) -> float:
    """The first guess: a line between the two timed passes, beyond them in proportion."""
    if n >= many:
        return many_ms * n / many
    return one_ms + (many_ms - one_ms) * (n - 1) / (many - 1)


def _place(n: int) -> int:
    """The power of two at or below n."""
    return n.bit_length() - 1
