"""Arguments that make no sense, to every verb: a typed error, and all is as it was before."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from forkserve import Engine, ForkServeConfig, SamplingParams
from forkserve.errors import ConfigError, ForkServeError, SessionError

from .harness import assert_nothing_left, assert_same_as_cold, cold, core, engine, refs, snapshot
from .scenarios import OTHER, PROMPT, WRAP

NAN, INF, HUGE = float("nan"), float("inf"), 10**30
NUMBERS: list[Any] = [0, -1, 2, HUGE, -HUGE, 1.5, INF, -INF, NAN, True, np.int64(2), np.int32(-5)]
FRACTIONS: list[Any] = [np.float32(0.5), np.float64("nan"), Fraction(1, 2), Decimal("NaN"), 1j]
TEXTS: list[Any] = ["", "x", "\ud800", "\0", b"ab", bytearray(b"a"), memoryview(b"ab")]
LISTS: list[Any] = [[], [1], [[1]], [None], [1.5], ["a"], [-1], [HUGE], (1,), range(3), {1}]
MAPPINGS: list[Any] = [{}, {1: 2}, {"a": 1}, {"a": [1]}, {"a": "b"}, {2: 1.0}, {2: NAN}]
ARRAYS: list[Any] = [np.array([1, 2]), np.array([]), np.array([[1]]), np.array([1.5]), np.array(3)]
THINGS: list[Any] = [None, object(), Ellipsis, SamplingParams, SamplingParams(), Exception("x")]
VALUES = [*NUMBERS, *FRACTIONS, *TEXTS, *LISTS, *MAPPINGS, *ARRAYS, *THINGS]

# Of each verb: what is right by position, and the names of the rest.
VERBS: dict[str, tuple[tuple[Any, ...], tuple[str, ...]]] = {
    "open": ((OTHER,), ("session", "tenant", "salt", "seed", "prefill")),
    "session": ((OTHER,), ("session", "tenant", "salt", "seed", "prefill")),
    "fork": (("s", 1, "b", [1]), ("at",)),
    "append": (("s", 2, [1]), ()),
    "attempt": (("s", 2), ()),
    "promote": (("s", 2), ()),
    "abort": (("s", 2), ("lazy", "cascade")),
    "mark_idle": (("s", 1, 1.0), ()),
    "commit": (("s", 1, WRAP), ("full", "branch", "at")),
    "join": (("s", [2], "kofn"), ("scaffold", "blend", "k", "parent")),
    "generate": (("s", 2), ("node", "params")),
    "generate_many": ((["s", ("s", 3)], 2), ("params",)),
    "start": (("s", 2), ("node", "params")),
    "speculate": (
        ("s", 2),
        ("priority", "t_idle_ms", "tool", "guess", "q", "schema_stable", "strict"),
    ),
    "speculate_set": (("s", {2: 1.0}), ("t_idle_ms",)),
    "observe": (("s", "t"), ("ms", "output", "schema_stable")),
    "choice_mass": (("s", 1, {"a": [1], "b": [2]}), ()),
    "speculate_from_grammar": (("s", 1, {"a": 1.0}, {"a": [1]}, [2]), ("t_idle_ms",)),
    "close": (("s",), ()),
    "tip": (("s",), ()),
    "tokens": (("s", 1), ()),
    "text": (("s", 1), ()),
    "tree": (("s",), ()),
}


def made() -> Engine:
    """A session 's' with a guess (2) and an attempt (3)."""
    eng = engine({"max_context": 60})
    eng.open(PROMPT, session="s")
    eng.fork("s", 1, "guess", WRAP)
    eng.attempt("s", eng.fork("s", 1, "attempt", OTHER))
    return eng


def state(eng: Engine) -> tuple[Any, ...]:
    """All that a refused verb must leave alone."""
    tasks = dict(core(eng).tasks)
    return snapshot(eng, "s"), refs(eng), eng.sessions(), tasks, core(eng).planner.ledger.total


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb(verb: str) -> None:
    right, names = VERBS[verb]
    eng = made()
    for place in [*range(len(right)), *names]:
        for value in VALUES:
            args, options = list(right), {}
            if isinstance(place, int):
                args[place] = value
            else:
                options[place] = value
            before = state(eng)
            try:
                getattr(eng, verb)(*args, **options)
            except ForkServeError:
                assert state(eng) == before, (verb, place, value)
                eng.check()
            else:
                eng.check()
                eng.stats()
                eng.shutdown()
                eng = made()
    eng.shutdown()


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda e: e.abort("s", 2, lazy=1), r"lazy=1 must be True or False"),
        (lambda e: e.commit("s", 1, [1], full="no"), r"full='no' must be True or False"),
        (lambda e: e.open(OTHER, prefill=np.array([1, 2])), r"prefill=array.* True or False"),
        (lambda e: e.open(b"text"), "text or integers in order, not a bytes"),
        (lambda e: e.open({3, 1, 2}), "text or integers in order, not a set"),
        (lambda e: e.fork("s", 1, 5), r"branch=5 must be a string, not int"),
        (lambda e: e.commit("s", 1, [1], branch=[1]), r"branch=\[1\] must be a string"),
        (lambda e: e.mark_idle("s", 1, "soon"), r"tool_s='soon' must lie in \[0, inf\]"),
        (lambda e: e.join("s", 2), "children=2 must be a sequence, not int"),
        (lambda e: e.join("s", [2], "kofn", k="1"), "k='1' must be an integer"),
        (lambda e: e.generate_many(5), "targets=5 must be a sequence"),
        (lambda e: e.generate_many("s"), r"write \['s'\]"),
        (lambda e: e.generate_many([("s", 1, 2)]), r"a pair \(session, node\)"),
        (lambda e: e.generate_many(["s"], params=5), "must be SamplingParams, not int"),
        (lambda e: e.speculate("s", 2, tool=[]), r"tool=\[\] must be a string"),
        (lambda e: e.choice_mass("s", 1, [1]), r"texts=\[1\] must be a mapping, not list"),
        (
            lambda e: e.speculate_from_grammar("s", 1, {"a": "x"}, {"a": [1]}, [2]),
            "the mass of 'a'='x' must lie in",
        ),
        (
            lambda e: e.speculate_from_grammar("s", 1, {1: 1.0}, {1: [1]}, [2]),
            "the name of a tool=1 must be a string",
        ),
        (lambda e: e.close(5), "session=5 must be a string"),
    ],
)
def test_the_error_says_what_was_wrong(call: Callable[[Engine], Any], match: str) -> None:
    eng = made()
    before = state(eng)
    with pytest.raises(ConfigError, match=match):
        call(eng)
    assert state(eng) == before
    assert_same_as_cold(eng, "s")
    assert_nothing_left(eng)


def test_a_name_of_a_session_that_is_no_name() -> None:
    eng = made()
    for wrong in ([], {}, None, 5, np.array([1, 2])):
        with pytest.raises(SessionError, match="no open session"):
            eng.generate(wrong, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["ignore_eos", "logprobs"])
def test_flags_of_sampling(name: str) -> None:
    for wrong in (1, None, "yes", [], NAN, np.array([1])):
        with pytest.raises(ConfigError, match=f"{name}=.* is of the wrong type"):
            SamplingParams(**{name: wrong})
    right = SamplingParams(**{name: np.bool_(True)})  # type: ignore[arg-type]
    eng = engine()
    want = cold(PROMPT, 3, SamplingParams(**{name: True}))
    assert eng.generate(eng.open(PROMPT).id, 3, params=right) == want


def test_a_decimal_is_a_number() -> None:
    eng = made()
    assert eng.speculate("s", 2, t_idle_ms=Decimal("1e6"), priority=Fraction(1, 1))  # type: ignore[arg-type]
    assert not core(eng).count.refusals["planner_failed"]


def test_the_size_of_the_prior_is_bounded() -> None:
    with pytest.raises(ConfigError, match="prior_depth"):
        ForkServeConfig(prior_depth=10**9)
    with pytest.raises(ConfigError, match="prior_width"):
        ForkServeConfig(prior_width=HUGE)
