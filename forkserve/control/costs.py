"""The planner's formulas, and what it must know of pool and load to use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil, inf, log

from forkserve.errors import ConfigError

__all__ = ["Load", "PoolView", "least_chunk", "page_price", "pages_for", "usefulness"]

_EASY = 0.5  # share of the pool that may be in use before a page has a price


@dataclass(frozen=True, slots=True)
class PoolView:
    """The page pool as the planner sees it.

    reload_ms_per_page: what it costs to bring one evicted page back, by reload or recompute.
    """

    free_pages: int
    capacity_pages: int
    reload_ms_per_page: float

    def __post_init__(self) -> None:
        if not 0 <= self.free_pages <= self.capacity_pages or self.capacity_pages < 1:
            raise ConfigError(f"{self.free_pages} free pages of {self.capacity_pages}: impossible")
        if not 0 <= self.reload_ms_per_page < inf:
            raise ConfigError(f"reload_ms_per_page={self.reload_ms_per_page} must be >= 0")


@dataclass(frozen=True, slots=True)
class Load:
    """What else the engine does.

    decoding: a generation is running now.  decode_share: probability that another session decodes
    while this speculation runs (`Scheduler.decode_share`).  backlog_ms: speculation admitted
    before and not run yet, which goes first.  tbt_factor: what lambda is multiplied by for a
    tenant (`FairMeter.tbt_factor`); 1 if absent.
    """

    decoding: bool = False
    decode_share: float = 0.0
    backlog_ms: float = 0.0
    tbt_factor: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.decode_share <= 1 or not 0 <= self.backlog_ms < inf:
            raise ConfigError(
                f"decode_share={self.decode_share} must be in [0, 1] and "
                f"backlog_ms={self.backlog_ms} >= 0"
            )


def pages_for(context: int, tokens: int, page_size: int) -> int:
    """Pages that `tokens` rows behind `context` rows touch; a partly filled tail counts as new."""
    return -(-(context % page_size + tokens) // page_size) if tokens else 0


def least_chunk(
    predict_ms: Callable[[int, int], float], size: int, most: int, context: int, limit_ms: float
) -> int:
    """Pages of `size` rows below which the fixed cost of a pass outweighs that of its rows.

    Taken from a line through one page and `most`; at most `most`, and no more than fit `limit_ms`.
    At least 1.  A chunk that is shorter gives a commit little and costs the speculation much.
    """
    if most < 2:
        return 1
    one, all_ms = predict_ms(size, context), predict_ms(most * size, context)
    rate = (all_ms - one) / (most - 1)
    fixed = one - rate
    pages = most if rate <= 0 else min(max(ceil(fixed / rate), 1), most)
    while pages > 1 and predict_ms(pages * size, context) > limit_ms:
        pages -= 1
    return pages


def usefulness(q: float, eta_partial: float) -> float:
    """Share of a guess that is expected to survive [eta]: q^a with eta(1/2) = eta_partial.

    1 for a certain guess and 0 for a hopeless one; with eta_partial = 0.5 it is q itself.  Above
    0.5 it credits the matching beginning of a wrong guess.  Monotone, so no weak guess is raised
    over a stronger one.
    """
    return float(q ** (log(eta_partial) / log(0.5)))


def page_price(pool: PoolView, free_pages: int, ttl_max_s: float) -> float:
    """ms per page-second of holding a page, when `free_pages` of the pool are left.

    0 while half of the pool is free, as taking a page then evicts nothing.  From there it rises
    in a line to reload_ms_per_page / ttl_max_s for a full pool: an evicted page would have been
    kept ttl_max_s at most, in which time it saves one reload.
    """
    used = 1.0 - free_pages / pool.capacity_pages
    pressure = max(0.0, used - _EASY) / (1.0 - _EASY)
    return pressure * pool.reload_ms_per_page / ttl_max_s
