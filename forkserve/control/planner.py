"""What to speculate on: gain against cost, both in ms, under hard limits.

::

    G(w) = p * min(T_pre, T_idle) * eta                                   ms of waiting saved
    C(w) = price * pages * hold_s
         + chunks * lambda * share * max(0, T_chunk - gamma)              ms of harm done

share is the chance that somebody decodes meanwhile, 1 while a generation runs: on a machine so slow
that one page takes longer than gamma, a lone agent's speculation still harms nobody.

An item w is the known suffix of a branch, or the guess behind it.  Known items are chosen first;
guesses get what is left.  An item too long for the pause or for the pool is admitted up to its last
whole chunk, and every token that is not admitted has a `Refusal` with a reason and its numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from forkserve.config import ForkServeConfig
from forkserve.control import knapsack
from forkserve.control.candidates import Candidate
from forkserve.control.costs import Load, PoolView, least_chunk, page_price, pages_for, usefulness
from forkserve.control.ledger import Ledger
from forkserve.errors import ConfigError
from forkserve.types import WorkKind

__all__ = ["Admission", "Load", "Plan", "Planner", "PoolView", "Refusal"]

_QUIET = Load()


@dataclass(frozen=True, slots=True)
class Admission:
    """The first `tokens` tokens of an item may be prefilled, at most `chunk` at a time.

    gain_ms, cost_ms: G and C of those tokens.  pages: pages they add, held in the ledger.
    """

    candidate: Candidate
    kind: WorkKind
    tokens: int
    pages: int
    gain_ms: float
    cost_ms: float
    chunk: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """`tokens` tokens of an item are not admitted: the whole item, or what follows its admission.

    reason is one of idle_horizon, pages, branch_cap, tbt_margin, low_probability, free_form,
    empty, not_worth.  A guess behind a known suffix that was not admitted in full has its reason.
    """

    candidate: Candidate
    kind: WorkKind
    reason: str
    message: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Admissions in the order they should run, and why the rest was refused."""

    admitted: tuple[Admission, ...]
    refused: tuple[Refusal, ...]


class Planner:
    """Admits speculation.  The ledger lasts from call to call, everything else is per call.

    predict_ms(tokens, context): predicted ms of prefilling `tokens` behind `context` rows; must
    not fall when either grows.
    """

    def __init__(self, config: ForkServeConfig, predict_ms: Callable[[int, int], float]) -> None:
        self.config = config
        self.ledger = Ledger()
        self._predict_ms = predict_ms

    def plan(
        self,
        candidates: Sequence[Candidate],
        pool: PoolView,
        *,
        speculating: Mapping[tuple[str, int], int],
        load: Load = _QUIET,
    ) -> Plan:
        """Choose among the candidates, and reserve the pages of what was admitted.

        speculating: per (session, parent), children that have speculative work already, other
        than the candidates.  Raises ConfigError for a candidate named twice or a predictor that
        gives no time; nothing is reserved then.
        """
        nodes = [(c.session, c.node) for c in candidates]
        if len(set(nodes)) < len(nodes):
            twice = next(n for n in nodes if nodes.count(n) > 1)
            raise ConfigError(f"node {twice[1]} of session {twice[0]!r} is a candidate twice")
        call = _Call(self.config, self.predict_ms, pool, self.ledger.total, speculating, load)
        known = [_Item(c, WorkKind.KNOWN, c.context, c.known) for c in candidates if c.known]
        call.admit(known)
        call.admit([item for c in candidates if (item := call.guess(c)) is not None])
        for admission in call.admitted:
            owner = admission.candidate
            self.ledger.reserve(owner.session, owner.node, admission.pages)
        return Plan(tuple(call.admitted), tuple(call.refused))

    def predict_ms(self, tokens: int, context: int) -> float:
        """The predictor's time, checked."""
        ms = self._predict_ms(tokens, context)
        if not isfinite(ms) or ms < 0:
            raise ConfigError(f"predict_ms({tokens}, {context}) gave {ms}: not a time in ms")
        return ms


@dataclass(frozen=True, slots=True)
class _Item:
    """A known suffix or a guess; start: tokens before its first one."""

    candidate: Candidate
    kind: WorkKind
    start: int
    tokens: int


@dataclass(frozen=True, slots=True)
class _Offer:
    """The part of an item that could be admitted as things stand, with its price.

    stop: reason and numbers of the limit that its next chunk would break; None for the whole item.
    """

    item: _Item
    tokens: int
    chunk: int
    value: knapsack.Item
    stop: tuple[str, str] | None


class _Call:
    """One call of `plan`: what is left of time, pages and branches, and the answer so far."""

    def __init__(
        self,
        config: ForkServeConfig,
        predict_ms: Callable[[int, int], float],
        pool: PoolView,
        reserved: int,
        speculating: Mapping[tuple[str, int], int],
        load: Load,
    ) -> None:
        self.config = config
        self.predict_ms = predict_ms
        self.load = load
        self.speculating = speculating
        self.pool = pool
        self.pages = max(0, pool.free_pages - reserved)
        self.ms = load.backlog_ms
        self.rooms: dict[Hashable | None, int] = {}
        self.admitted: list[Admission] = []
        self.refused: list[Refusal] = []
        self._whole: set[tuple[str, int]] = set()  # nodes whose known suffix is admitted in full
        self._why: dict[tuple[str, int], Refusal] = {}  # last refusal of each node

    # -- items -----------------------------------------------------------------------------

    def guess(self, c: Candidate) -> _Item | None:
        """The guess of a candidate as an item, or None when a gate refuses it."""
        item = _Item(c, WorkKind.RESIDUAL, c.context + c.known, c.guess)
        if not c.guess:
            if not c.known:
                self._refuse(item, "empty", "the branch has no token without KV")
        elif not c.schema_stable:
            self._refuse(item, "free_form", f"{c.guess} guessed tokens of free-form text")
        elif c.q < self.config.q_min:
            self._refuse(item, "low_probability", f"q={c.q:g} is below q_min={self.config.q_min:g}")
        elif c.known and (c.session, c.node) not in self._whole:
            known = self._why[c.session, c.node]
            self._refuse(
                item,
                known.reason,
                f"{known.tokens} of the {c.known} known tokens before the guess were refused",
            )
        else:
            return item
        return None

    def admit(self, items: Sequence[_Item]) -> None:
        """Choose among items of one kind, then fill what is left with parts of the others."""
        offers = [offer for item in items if (offer := self._offer(item)) is not None]
        # About the order in which the scheduler will run them, so that is when each one ends.
        offers.sort(key=lambda offer: offer.value.density, reverse=True)
        values = [offer.value for offer in offers]
        few = len(offers) <= self.config.exact_items
        chosen = (knapsack.exact if few else knapsack.greedy)(
            values, self.pages, self.ms, self.rooms
        )
        for i in chosen:
            self._take(offers[i])
        for i in sorted(set(range(len(offers))) - set(chosen)):
            if (part := self._offer(offers[i].item)) is not None:
                self._take(part)

    # -- one item --------------------------------------------------------------------------

    def _offer(self, item: _Item) -> _Offer | None:
        """The longest part that keeps every hard limit and is worth it; else refuse the item."""
        c = item.candidate
        group = self._group(item)
        if group is not None and self.rooms[group] <= 0:
            cap = self.config.branch_cap
            self._refuse(
                item, "branch_cap", f"node {c.parent} already speculates on {cap} branches"
            )
            return None
        chunk = self._chunk(item)
        step_ms = self.predict_ms(min(chunk, item.tokens), item.start + item.tokens)
        gamma = self.config.gamma_ms
        if self.load.decoding and step_ms > gamma:
            self._refuse(
                item,
                "tbt_margin",
                f"a chunk of {min(chunk, item.tokens)} tokens takes {step_ms:.3g} ms, "
                f"but a running generation can spare {gamma:.3g} ms",
            )
            return None
        tokens, stop = self._fit(item, chunk)
        if stop is not None and not tokens:
            self._refuse(item, *stop)
            return None
        value = self._value(item, tokens, chunk, max(0.0, step_ms - gamma), group)
        if value.net <= 0:
            self._refuse(
                item,
                "not_worth",
                f"{tokens} tokens save {value.gain:.3g} ms and cost {value.cost:.3g} ms",
            )
            return None
        return _Offer(item, tokens, chunk, value, stop)

    def _take(self, offer: _Offer) -> None:
        item, value = offer.item, offer.value
        c = item.candidate
        self.pages -= value.pages
        self.ms += value.ms
        if (group := self._group(item)) is not None:
            self.rooms[group] -= 1
        if item.kind is WorkKind.KNOWN and offer.tokens == item.tokens:
            self._whole.add((c.session, c.node))
        self.admitted.append(
            Admission(c, item.kind, offer.tokens, value.pages, value.gain, value.cost, offer.chunk)
        )
        if offer.stop is not None:
            self._refuse(item, *offer.stop, admitted=offer.tokens)

    def _group(self, item: _Item) -> tuple[str, int] | None:
        """The parent, if admitting the item makes one more of its children speculate."""
        c = item.candidate
        if item.kind is WorkKind.RESIDUAL and c.known:
            return None  # the branch was counted with its known suffix
        parent = (c.session, c.parent)
        busy = self.speculating.get(parent, 0)
        self.rooms.setdefault(parent, self.config.branch_cap - busy)
        return parent

    def _chunk(self, item: _Item) -> int:
        """Tokens of one chunk: whole pages, at least one, at most c_spec.

        A chunk is what a commit may have to wait for, so its predicted time stays within the head-
        room of a running generation (or one that may start), or half of the first-token SLO.  It is
        never longer than what is left of the pause either, or nothing of it would fit.  While
        nobody decodes, and not even a page keeps the head-room, it is not so short that the fixed
        cost of its pass outweighs its rows, as far as the whole first-token SLO allows.
        """
        config = self.config
        decodes = self.load.decoding or self.load.decode_share > 0
        limit = config.gamma_ms if decodes else config.ttft_slo_ms / 2
        pause_ms = item.candidate.t_idle_ms - self.ms
        limit = min(limit, pause_ms)
        end = item.start + item.tokens
        low, high = 1, config.c_spec // config.page_size
        if not high:
            return config.c_spec
        while low < high:
            pages = (low + high + 1) // 2
            if self.predict_ms(pages * config.page_size, end) <= limit:
                low = pages
            else:
                high = pages - 1
        over = self.predict_ms(low * config.page_size, end) > limit
        if not self.load.decoding and (over or not decodes):
            most_ms = min(config.ttft_slo_ms, pause_ms)
            size, most = config.page_size, config.c_spec // config.page_size
            low = max(low, least_chunk(self.predict_ms, size, most, end, most_ms))
        return low * config.page_size

    def _fit(self, item: _Item, chunk: int) -> tuple[int, tuple[str, str] | None]:
        """Tokens of the most whole chunks that fit pause and pool, and what stops the next one."""
        fits, over = 0, -(-item.tokens // chunk) + 1
        stop = None
        while over - fits > 1:
            count = (fits + over) // 2
            broken = self._short_of(item, min(item.tokens, count * chunk), chunk)
            if broken is None:
                fits = count
            else:
                over, stop = count, broken
        return min(item.tokens, fits * chunk), stop

    def _short_of(self, item: _Item, tokens: int, chunk: int) -> tuple[str, str] | None:
        """The limit that the first `tokens` of an item break, if any: reason and numbers."""
        part = f"{tokens} of {item.tokens} tokens"
        end_ms = self.ms + self._run_ms(item, tokens, chunk)
        if end_ms > item.candidate.t_idle_ms:
            return "idle_horizon", (
                f"{part} would end {end_ms:.4g} ms from now, "
                f"but the pause is {item.candidate.t_idle_ms:.4g} ms"
            )
        pages = self._pages(item, tokens)
        if pages > self.pages:
            return "pages", (
                f"{part} need {pages} pages, but {self.pages} are free and not promised"
            )
        return None

    def _value(
        self,
        item: _Item,
        tokens: int,
        chunk: int,
        overrun_ms: float,
        group: tuple[str, int] | None,
    ) -> knapsack.Item:
        """G and C of the first `tokens` of an item."""
        config, c = self.config, item.candidate
        eta = 1.0 if item.kind is WorkKind.KNOWN else usefulness(c.q, config.eta_partial)
        gain = c.p * min(self.predict_ms(tokens, item.start), c.t_idle_ms) * eta
        pages = self._pages(item, tokens)
        price = page_price(self.pool, self.pages - pages, config.ttl_max_s)
        # Nobody waits for the pages longer than the pause, or than idle KV is kept at all.
        hold_s = min(c.t_idle_ms / 1e3, config.ttl_max_s)
        share = 1.0 if self.load.decoding else self.load.decode_share
        weight = config.tbt_weight * self.load.tbt_factor.get(c.tenant, 1.0)
        chunks = -(-tokens // chunk)
        cost = price * pages * hold_s + weight * share * overrun_ms * chunks
        run_ms = self._run_ms(item, tokens, chunk)
        return knapsack.Item(gain, cost, pages, run_ms, c.t_idle_ms, group)

    def _pages(self, item: _Item, tokens: int) -> int:
        """Pages that the first `tokens` of an item add."""
        size = self.config.page_size
        pages = pages_for(item.start, tokens, size)
        # The page under a guess's first row was counted with the known suffix that ends in it.
        shared = item.kind is WorkKind.RESIDUAL and item.candidate.known and item.start % size
        return pages - 1 if shared else pages

    def _run_ms(self, item: _Item, tokens: int, chunk: int) -> float:
        """Predicted ms of running `tokens` in chunks, each behind the mean context."""
        whole, rest = divmod(tokens, chunk)
        ms = whole * self.predict_ms(chunk, item.start + tokens // 2) if whole else 0.0
        return ms + (self.predict_ms(rest, item.start + tokens - rest) if rest else 0.0)

    def _refuse(self, item: _Item, reason: str, message: str, admitted: int = 0) -> None:
        c = item.candidate
        what = "known suffix" if item.kind is WorkKind.KNOWN else "guess"
        refusal = Refusal(
            c,
            item.kind,
            reason,
            f"{what} of branch {c.branch!r}: {message}",
            item.tokens - admitted,
        )
        self.refused.append(refusal)
        self._why[c.session, c.node] = refusal
