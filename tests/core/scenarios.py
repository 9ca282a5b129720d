"""Small fixed checks, as plain functions: the verb tests run them, and so do the planted faults.

Each builds an engine of its own, does something, and asserts what must come out.
"""

from __future__ import annotations

from collections.abc import Callable

from forkserve import Engine
from forkserve.types import GREEDY, JobClass, SamplingParams

from .harness import (
    assert_nothing_left,
    assert_same_as_cold,
    cold,
    core,
    engine,
    mock,
    node,
    tick,
)

PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]  # two full pages of 4 and a half one
WRAP = [21, 22, 23, 24, 25, 26]
OTHER = [31, 32, 33]
SEEDED = SamplingParams(temperature=1.0, seed=7, ignore_eos=True)


def done(eng: Engine) -> None:
    eng.check()
    assert_nothing_left(eng)


def plain() -> None:
    """Prefill in chunks, decode across page ends, greedy and seeded."""
    eng = engine(prefill_chunk=3)
    s = eng.open(PROMPT).id
    for params in (GREEDY, SEEDED):
        history = eng.tokens(s)
        assert eng.generate(s, 7, params=params) == cold(history, 7, params)
        eng.check()
    done(eng)


def siblings() -> None:
    """Branches of different lengths over one unaligned trunk, each generating for itself."""
    for tail in ("auto", "pack", "freeze"):
        eng = engine(tail=tail)
        s = eng.open(PROMPT).id
        kids = [eng.fork(s, 1, f"b{i}", [40 + i] * (i + 1)) for i in range(4)]
        eng.speculate_set(s, dict.fromkeys(kids, 1.0))
        while eng.drain_slack():
            eng.check()
        for kid in kids:
            eng.attempt(s, kid)
        got = eng.generate_many([(s, kid) for kid in kids], 5)
        for i, out in enumerate(got):
            assert out == cold(PROMPT + [40 + i] * (i + 1), 5)
        eng.check()
        assert_same_as_cold(eng, s)
        done(eng)


def parent_grows() -> None:
    """A child keeps the view it forked from while its parent decodes on."""
    for tail in ("auto", "pack", "freeze"):
        eng = engine(tail=tail)
        s = eng.open(PROMPT).id
        early = eng.fork(s, 1, "early", OTHER)
        assert eng.generate(s, 6) == cold(PROMPT, 6)
        late = eng.fork(s, 1, "late", OTHER)
        eng.generate(s, 3)
        eng.check()
        for kid in (early, late):
            eng.attempt(s, kid)
            history = eng.tokens(s, kid)
            assert eng.generate(s, 4, node=kid) == cold(history, 4)
            eng.check()
        assert eng.tokens(s, early)[: len(PROMPT) + 3] == PROMPT + OTHER
        assert_same_as_cold(eng, s)
        done(eng)


def commits() -> None:
    """Every length of agreement between the guess and what is observed."""
    for tail in ("pack", "freeze"):
        for hit in range(len(WRAP) + 1):
            eng = engine(tail=tail)
            s = eng.open(PROMPT).id
            kid = eng.fork(s, 1, "w", WRAP)
            loser = eng.fork(s, 1, "l", OTHER)
            eng.speculate_set(s, {kid: 1.0, loser: 0.5})
            while eng.drain_slack():
                eng.check()
            observed = [*WRAP[:hit], 90, 91]
            result = eng.commit(s, 1, observed)
            assert result.lcp == len(PROMPT) + hit
            assert result.tail == len(observed) - hit
            assert result.skipped_prefill == hit
            assert result.generation == node(eng, s, 1).generation == 1
            assert eng.tokens(s) == PROMPT + observed
            before = eng.stats().prefilled_tokens.committed
            assert_same_as_cold(eng, s, 5)
            ran = eng.stats().prefilled_tokens.committed - before
            assert ran <= len(observed) - hit + 1
            done(eng)


def full_hit() -> None:
    """Everything was guessed: no row is missing, and the logits come from the last token again."""
    eng = engine()
    s = eng.open(PROMPT).id
    kid = eng.fork(s, 1, "w", WRAP)
    eng.speculate(s, kid)
    while eng.drain_slack():
        pass
    result = eng.commit(s, 1, WRAP)
    assert (result.winner, result.tail, result.skipped_prefill) == (kid, 0, len(WRAP))
    assert eng.generate(s, 4) == cold(PROMPT + WRAP, 4)
    done(eng)


def stale_work() -> None:
    """Speculation that a commit made stale never runs, in this session only."""
    eng = engine(c_spec=4)
    names = [eng.open(PROMPT, session=name, salt=name).id for name in ("one", "two")]
    kids = [eng.fork(s, 1, "w", list(range(100, 140))) for s in names]
    for s, kid in zip(names, kids, strict=True):
        eng.speculate(s, kid)
    eng.drain_slack()
    eng.commit("one", 1, [1, 2, 3])
    assert [job.session for job in core(eng).scheduler.jobs(JobClass.SPEC)] == ["two"]
    before = eng.stats().prefilled_tokens.wasted
    while eng.drain_slack():
        eng.check()
    assert node(eng, "two", kids[1]).speculated == 40
    assert eng.stats().prefilled_tokens.wasted == before
    assert_same_as_cold(eng, "one")
    eng.commit("two", 1, list(range(100, 140)))
    assert_same_as_cold(eng, "two")
    done(eng)


def prefix_sharing() -> None:
    """A published prefix serves other sessions, who then write beside it."""
    eng = engine()
    first = eng.open(PROMPT)
    second = eng.open([*PROMPT[:9], 77, 78])
    assert (first.cached_tokens, second.cached_tokens) == (0, 8)
    apart = eng.open(PROMPT, salt="other")
    assert apart.cached_tokens == 0
    shares_eight = eng.open(PROMPT[:8])
    assert shares_eight.cached_tokens == 4  # one token at least is left to compute
    for handle in (first, second, apart, shares_eight):
        assert_same_as_cold(eng, handle.id, 6)
    again = eng.open(PROMPT)
    assert again.cached_tokens == 8
    assert_same_as_cold(eng, again.id)
    pages = core(eng).index.pages()
    assert len(pages) == len(set(pages)) > 0
    assert all(core(eng).pool.read_only[page] for page in pages)
    done(eng)


def deduped() -> None:
    """Two sessions that computed the same text at the same time end with one frame of it."""
    eng = engine()
    names = [eng.open(PROMPT[:2], session=s).id for s in ("one", "two")]
    for s in names:
        eng.commit(s, 1, PROMPT[2:])
    assert eng.generate_many(names, 1) == [cold(PROMPT, 1)] * 2
    eng.check()
    pages = [node(eng, s, 2).segments[0].pages for s in names]
    assert pages[0][:2] == pages[1][:2]
    assert pages[0][2] != pages[1][2]
    assert eng.stats().live_pages == 4
    for s in names:
        assert_same_as_cold(eng, s)
    done(eng)


def pinned() -> None:
    """Nobody writes to a page that is pinned: the writer takes its rows elsewhere."""
    eng = engine()
    s = eng.open(PROMPT).id
    pool, rows = core(eng).pool, mock(eng)._rows
    page = node(eng, s, 1).segments[-1].pages[-1]
    with core(eng).lock:
        pool.pin([page])
    before = rows[page].copy()
    assert eng.generate(s, 5) == cold(PROMPT, 5)
    eng.check()
    assert (rows[page] == before).all()
    with core(eng).lock:
        assert pool.unpin([page]) == 1
    assert_same_as_cold(eng, s)
    done(eng)


def entries_leave() -> None:
    """An index entry goes in the same step as its page, which may be somebody else's at once."""
    eng = engine(capacity_pages=8)
    for first in range(0, 60, 10):
        s = eng.open(range(first, first + 17)).id
        eng.check()
        assert_same_as_cold(eng, s, 2)
        eng.close(s)
        eng.check()
    assert eng.open(range(50, 67)).cached_tokens == 16
    done(eng)


def forged_entry() -> None:
    """Even when a digest collides, tokens are compared before a page is served."""
    eng = engine()
    eng.open(PROMPT)
    victim = eng.open([*range(200, 210)])
    assert victim.cached_tokens == 0
    assert_same_as_cold(eng, victim.id)
    done(eng)


def pressure() -> None:
    """More sessions than the pool holds: rows go and come back, text stays right."""
    eng = engine({"force_preempt_every": 3}, capacity_pages=12)
    names = [eng.open([10 * i + 1] * (5 + i)).id for i in range(5)]
    histories = [eng.tokens(s) for s in names]
    got = [eng.generate(s, 6) for s in names]
    assert got == [cold(h, 6) for h in histories]
    longer = [h + g for h, g in zip(histories, got, strict=True)]
    assert eng.generate_many(names, 3) == [cold(h, 3) for h in longer]
    assert eng.stats().evicted_nodes > 0
    done(eng)


def half_gone() -> None:
    """The end of a trunk goes, and what a branch stands on stays."""
    eng = engine(capacity_pages=12, prefix_index=False)
    s = eng.open(range(24)).id
    kid = eng.fork(s, 1, "k", WRAP, at=14)
    eng.speculate_set(s, {kid: 1.0})
    while eng.drain_slack():
        eng.check()
    eng.attempt(s, kid)
    eng.start(s, 9, node=kid)  # keeps the branch
    other = eng.open(range(100, 128), prefill=False).id
    running = eng.start(other, 3)
    while not running.done:
        tick(eng)
        eng.check()
    for name in (s, other):
        assert_same_as_cold(eng, name)
    done(eng)


def joins() -> None:
    """A join reuses what it shares with an input and computes the rest."""
    for policy, tokens in (("concat", [*WRAP, *OTHER]), ("first", WRAP), ("all", [*WRAP, *OTHER])):
        eng = engine()
        s = eng.open(PROMPT).id
        kids = [eng.fork(s, 1, "a", WRAP), eng.fork(s, 1, "b", OTHER)]
        eng.speculate_set(s, dict.fromkeys(kids, 1.0))
        while eng.drain_slack():
            eng.check()
        result = eng.join(s, kids, policy)
        eng.check()
        assert eng.tokens(s) == PROMPT + tokens
        assert result.reused_prefix - len(PROMPT) == len(WRAP)
        assert_same_as_cold(eng, s, 5)
        done(eng)


def aborts() -> None:
    """Losers give back what they wrote and nothing else."""
    for lazy in (False, True):
        eng = engine(lazy_abort=lazy, tail="pack")
        s = eng.open(PROMPT).id
        trunk = eng.stats().live_pages
        kids = [eng.fork(s, 1, "x", [50 + i] * 9) for i in range(3)]
        eng.speculate_set(s, dict.fromkeys(kids, 1.0))
        while eng.drain_slack():
            pass
        assert eng.stats().live_pages == trunk + 3 * 3
        freed = [eng.abort(s, kid) for kid in kids]
        assert freed == ([0, 0, 0] if lazy else [3, 3, 3])
        assert eng.drain_aborts() == (9 if lazy else 0)
        assert eng.stats().live_pages == trunk
        assert_same_as_cold(eng, s)
        done(eng)


def grandchildren() -> None:
    """A guess under a guess: the match goes on below, deeper siblings lose."""
    eng = engine()
    s = eng.open(PROMPT).id
    kid = eng.fork(s, 1, "a", [60, 61, 62])
    deep = eng.fork(s, kid, "b", [63, 64, 65])
    other = eng.fork(s, kid, "c", [70, 71])
    eng.speculate_set(s, {kid: 1.0, deep: 0.9, other: 0.8})
    while eng.drain_slack():
        eng.check()
    result = eng.commit(s, 1, [60, 61, 62, 63, 64, 80])
    assert (result.winner, result.lcp, result.aborted) == (deep, len(PROMPT) + 5, (other,))
    assert_same_as_cold(eng, s, 5)
    done(eng)


def realigned() -> None:
    """A spine forked on a frozen tail is straightened, then shared with others."""
    eng = engine(tail="freeze")
    s = eng.open(PROMPT).id
    kid = eng.fork(s, 1, "w", WRAP)
    eng.speculate(s, kid)
    while eng.drain_slack():
        pass
    eng.commit(s, 1, WRAP)
    eng.generate(s, 1)
    for _ in range(3):
        tick(eng)
        eng.check()
    again = eng.open(eng.tokens(s))
    assert again.cached_tokens == 16
    assert_same_as_cold(eng, again.id, 5)
    assert_same_as_cold(eng, s, 5)
    done(eng)


def never_prefilled() -> None:
    """Rows that nobody asked for yet are computed from the root down, one node after the other."""
    for order, chunk in (((3, 2, 1), 4), ((1, 2, 3), 64)):
        eng = engine(prefill_chunk=chunk)
        s = eng.open(PROMPT, prefill=False).id
        kid = eng.fork(s, 1, "a", WRAP)
        deep = eng.fork(s, kid, "b", OTHER)
        eng.append(s, 1, [71, 72, 73, 74, 75, 76, 77])
        eng.attempt(s, kid)
        eng.attempt(s, deep)
        for target in order:
            history = eng.tokens(s, target)
            assert eng.generate(s, 4, node=target) == cold(history, 4)
            eng.check()
        done(eng)


def idled_out() -> None:
    """An idle spine loses its rows when its time is over, and gets them back by prefill."""
    eng = engine()
    s = eng.open(PROMPT).id
    tip = eng.commit(s, 1, WRAP).winner
    eng.generate(s, 3)
    life = eng.mark_idle(s, tip, 1.0)
    mock(eng).clock.advance(life * 1e3 + 1)
    with core(eng).lock:
        assert core(eng).expire(mock(eng).clock.now_ms()) == 1
    eng.check()
    assert node(eng, s, tip).segments == []
    eng.commit(s, tip, OTHER)
    assert_same_as_cold(eng, s, 5)
    done(eng)


def exhausted() -> None:
    """A prompt that cannot fit leaves no trace."""
    eng = engine(capacity_pages=4)
    keep = eng.open(PROMPT[:5]).id
    try:
        eng.open(list(range(100, 120)))
    except MemoryError:
        pass
    else:
        raise AssertionError("20 tokens fit 4 pages of 4")
    assert eng.sessions() == [keep]
    assert_same_as_cold(eng, keep)
    done(eng)


def failing_pass() -> None:
    """A pass that fails leaves no row behind that would be trusted."""
    eng = engine()
    s = eng.open(PROMPT).id
    eng.commit(s, 1, WRAP)
    mock(eng).fail_next()
    try:
        eng.generate(s, 3)
    except RuntimeError:
        pass
    else:
        raise AssertionError("the failure was swallowed")
    eng.check()
    assert_same_as_cold(eng, s, 5)
    done(eng)


ALL: tuple[Callable[[], None], ...] = (
    plain,
    siblings,
    parent_grows,
    commits,
    full_hit,
    stale_work,
    prefix_sharing,
    deduped,
    pinned,
    entries_leave,
    forged_entry,
    pressure,
    half_gone,
    joins,
    aborts,
    grandchildren,
    realigned,
    never_prefilled,
    idled_out,
    exhausted,
    failing_pass,
)
