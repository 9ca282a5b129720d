"""Every error a user can meet, raised; and the engine as good as before afterwards."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forkserve
from forkserve import Engine, ForkServeConfig
from forkserve.config import _ELSEWHERE
from forkserve.engine import MockBackend
from forkserve.errors import (
    ConfigError,
    ContextOverflow,
    ForkServeError,
    NodeError,
    OutOfPages,
    SessionError,
)
from forkserve.types import SamplingParams

from .harness import (
    assert_nothing_left,
    assert_same_as_cold,
    cold,
    engine,
    refs,
    snapshot,
)
from .scenarios import OTHER, PROMPT, WRAP

Verb = Callable[[Engine, str], Any]


@pytest.fixture
def eng() -> Engine:
    """A session 's' with a guess (2), an attempt (3), a dead node (4) and an idle old line."""
    eng = engine({"max_context": 40})
    s = eng.open(PROMPT, session="s").id
    eng.fork(s, 1, "guess", WRAP)
    eng.attempt(s, eng.fork(s, 1, "attempt", OTHER))
    eng.abort(s, eng.fork(s, 1, "dead"))
    return eng


def refused(eng: Engine, error: type[ForkServeError], match: str, verb: Verb) -> None:
    """The verb raises, changes nothing, and the session goes on."""
    before, pages = snapshot(eng, "s"), refs(eng)
    with pytest.raises(error, match=match):
        verb(eng, "s")
    assert snapshot(eng, "s") == before
    assert refs(eng) == pages
    eng.check()
    assert_same_as_cold(eng, "s")


@pytest.mark.parametrize(
    ("backend", "match"),
    [
        ("smollm2", r"LocalBackend\(ForkServeConfig\(\), 'smollm2'\); str has no config, info"),
        (ForkServeConfig(), "ForkServeConfig has no config"),
        (None, "NoneType has no config"),
        (MockBackend, r"not a class: Engine\(MockBackend\(\.\.\.\)\)"),
    ],
)
def test_what_is_no_backend(backend: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Engine(backend)


def test_a_backend_with_something_else_for_its_config() -> None:
    for wrong in ("smollm2", "", 5, {}):
        with pytest.raises(ConfigError, match=r"first: MockBackend\(ForkServeConfig\(\)"):
            MockBackend(wrong)  # type: ignore[arg-type]


BAD_IDS = [
    ([], "at least one token"),
    ([1, -1], "-1 is not in the vocabulary of 1024"),
    ([1, 1024], "1024 is not in the vocabulary"),
    ([1.5], "text or integers"),
    (["a"], "text or integers"),
    ([None], "text or integers"),
    (7, "text or integers"),
    ("", "at least one token"),
]


@pytest.mark.parametrize(("tokens", "match"), BAD_IDS)
def test_bad_prompt(tokens: Any, match: str) -> None:
    eng = engine()
    with pytest.raises(ConfigError, match=match):
        eng.open(tokens)
    assert eng.sessions() == []
    assert_nothing_left(eng)


@pytest.mark.parametrize(("tokens", "match"), BAD_IDS[1:6])
def test_bad_ids_in_every_verb(eng: Engine, tokens: Any, match: str) -> None:
    for verb in (
        lambda e, s: e.fork(s, 1, "x", tokens),
        lambda e, s: e.append(s, 2, tokens),
        lambda e, s: e.commit(s, 1, tokens),
        lambda e, s: e.speculate(s, 2, guess=tokens, q=0.9),
        lambda e, s: e.join(s, [2], scaffold=tokens),
        lambda e, s: e.join(s, [2], "summary", blend=tokens),
    ):
        refused(eng, ConfigError, match, verb)


@pytest.mark.parametrize(
    "verb",
    [
        lambda e, s: e.open([1] * 41),
        lambda e, s: e.fork(s, 1, "x", [1] * 31),
        lambda e, s: e.append(s, 1, [1] * 31),
        lambda e, s: e.append(s, 2, [1] * 31),
        lambda e, s: e.commit(s, 1, [1] * 31),
        lambda e, s: e.commit(s, 1, [*PROMPT, *[1] * 31], full=True),
        lambda e, s: e.speculate(s, 2, guess=[1] * 31, q=0.9),
        lambda e, s: e.join(s, [2], scaffold=[1] * 31),
    ],
)
def test_context_overflow(eng: Engine, verb: Verb) -> None:
    refused(eng, ContextOverflow, "context of 40", verb)


def test_generation_stops_at_the_context() -> None:
    eng = engine({"max_context": 12})
    s = eng.open(PROMPT).id
    generation = eng.start(s, 100)
    assert len(generation.result()) == 2
    assert generation.finish_reason == "context"
    with pytest.raises(ContextOverflow, match=r"13 tokens .* context of 12"):
        eng.generate(s, 1)
    assert eng.generate(s, 0) == []
    assert_nothing_left(eng)


@pytest.mark.parametrize("length", [11, 12, 13])
def test_prompt_at_the_context(length: int) -> None:
    eng = engine({"max_context": 12})
    if length == 13:
        with pytest.raises(ContextOverflow) as caught:
            eng.open([1] * length)
        assert (caught.value.wanted, caught.value.limit) == (13, 12)
    else:
        s = eng.open([1] * length).id
        if length == 11:
            assert len(eng.generate(s, 5)) == 1


@pytest.mark.parametrize("max_tokens", [0, 1, 10_000])
def test_max_tokens(max_tokens: int) -> None:
    eng = engine({"max_context": 40})
    s = eng.open(PROMPT).id
    assert len(eng.generate(s, max_tokens)) == min(max_tokens, 30)
    with pytest.raises(ConfigError, match="must be >= 0"):
        eng.start(s, -1)


def test_pool_too_small_for_one_prompt() -> None:
    eng = engine(capacity_pages=4)
    keep = eng.open([5]).id
    with pytest.raises(OutOfPages, match="more KV pages are needed") as caught:
        eng.open(range(100, 120))
    assert (caught.value.capacity, eng.sessions()) == (4, [keep])
    assert isinstance(caught.value, MemoryError)
    assert_same_as_cold(eng, keep)
    assert len(eng.open(range(200, 215)).id) > 0
    assert_nothing_left(eng)


def test_running_out_while_generating_keeps_the_rest_right() -> None:
    eng = engine(capacity_pages=4)
    s = eng.open(PROMPT).id
    generation = eng.start(s, 50)
    with pytest.raises(OutOfPages):
        generation.result()
    assert generation.finish_reason == "error"
    got = eng.tokens(s)[len(PROMPT) :]
    assert got == generation.tokens == cold(PROMPT, len(got))
    eng.check()
    other = eng.open([9, 8, 7]).id
    assert_same_as_cold(eng, other)
    assert_nothing_left(eng)


# ---------------------------------------------------------------- sessions


def test_duplicate_session(eng: Engine) -> None:
    refused(eng, SessionError, "open already", lambda e, s: e.open([1], session=s))


SESSION_VERBS: list[Verb] = [
    lambda e, s: e.fork(s, 1),
    lambda e, s: e.append(s, 1, [1]),
    lambda e, s: e.speculate(s, 2),
    lambda e, s: e.speculate_set(s, {2: 1.0}),
    lambda e, s: e.speculate_from_grammar(s, 1, {"a": 1.0}, {"a": [1]}, [2]),
    lambda e, s: e.commit(s, 1, [1]),
    lambda e, s: e.join(s, [2]),
    lambda e, s: e.attempt(s, 2),
    lambda e, s: e.promote(s, 2),
    lambda e, s: e.abort(s, 2),
    lambda e, s: e.mark_idle(s, 1, 1.0),
    lambda e, s: e.generate(s, 1),
    lambda e, s: e.generate_many([s], 1),
    lambda e, s: e.start(s, 1),
    lambda e, s: e.tip(s),
    lambda e, s: e.tokens(s),
    lambda e, s: e.text(s),
    lambda e, s: e.tree(s),
]


@pytest.mark.parametrize("verb", SESSION_VERBS)
def test_unknown_and_closed_sessions(verb: Verb) -> None:
    eng = engine()
    handle = eng.open(PROMPT, session="s")
    eng.fork("s", 1)
    with pytest.raises(SessionError, match="no open session 'nobody'"):
        verb(eng, "nobody")
    eng.close("s")
    eng.close("s")
    with pytest.raises(SessionError, match="no open session 's'"):
        verb(eng, "s")
    with pytest.raises(SessionError, match="'s'"):
        _ = handle.tip
    assert_nothing_left(eng)


# ---------------------------------------------------------------- nodes

NODE_VERBS: list[Callable[[Engine, str, Any], Any]] = [
    lambda e, s, n: e.fork(s, n),
    lambda e, s, n: e.append(s, n, [1]),
    lambda e, s, n: e.speculate(s, n),
    lambda e, s, n: e.speculate_set(s, {n: 1.0}),
    lambda e, s, n: e.commit(s, n, [1]),
    lambda e, s, n: e.join(s, [n]),
    lambda e, s, n: e.join(s, [2], parent=n),
    lambda e, s, n: e.attempt(s, n),
    lambda e, s, n: e.promote(s, n),
    lambda e, s, n: e.mark_idle(s, n, 1.0),
    lambda e, s, n: e.generate(s, 1, node=n),
    lambda e, s, n: e.tokens(s, n),
]


@pytest.mark.parametrize("verb", NODE_VERBS)
def test_dead_and_unknown_nodes(eng: Engine, verb: Callable[[Engine, str, Any], Any]) -> None:
    refused(eng, NodeError, "is dead", lambda e, s: verb(e, s, 4))
    for unknown in (0, -1, 99, "x"):
        refused(eng, NodeError, "has no node", lambda e, s, n=unknown: verb(e, s, n))


def test_a_node_of_another_session_is_foreign(eng: Engine) -> None:
    other = eng.open([9, 9], session="other").id
    foreign = [eng.fork(other, 1, "x") for _ in range(9)][-1]
    refused(eng, NodeError, f"session 's' has no node {foreign}", lambda e, s: e.fork(s, foreign))
    refused(eng, NodeError, "has no node", lambda e, s: e.abort(s, foreign))


@pytest.mark.parametrize(
    ("verb", "match"),
    [
        (lambda e, s: e.speculate(s, 1), "only a speculative fork"),
        (lambda e, s: e.speculate(s, 3), "only a speculative fork"),
        (lambda e, s: e.generate(s, 1, node=2), "speculative"),
        (lambda e, s: e.commit(s, 2, [1]), "speculative"),
        (lambda e, s: e.mark_idle(s, 2, 1.0), "speculative"),
        (lambda e, s: e.join(s, [2, 3], parent=2), "below node|is not below"),
        (lambda e, s: e.join(s, [1]), "no common parent"),
        (lambda e, s: e.commit(s, 1, [1, 2], full=True), "does not extend"),
        (lambda e, s: e.abort(s, 1), "carries the committed main line"),
    ],
)
def test_wrong_mode(eng: Engine, verb: Verb, match: str) -> None:
    refused(eng, NodeError, match, verb)


def test_not_the_tip() -> None:
    eng = engine()
    s = eng.open(PROMPT, session="s").id
    tip = eng.commit(s, 1, WRAP).winner
    for verb in (
        lambda e, s: e.commit(s, 1, [1]),
        lambda e, s: e.generate(s, 1, node=1),
        lambda e, s: e.append(s, 1, [1]),
        lambda e, s: e.mark_idle(s, 1, 1.0),
    ):
        refused(eng, NodeError, f"not the tip of its line; the tip of its line is node {tip}", verb)
    refused(eng, NodeError, "main line", lambda e, s: e.abort(s, tip))


def test_idle_tip_is_not_sampled() -> None:
    eng = engine()
    s = eng.open(PROMPT).id
    eng.mark_idle(s, 1, 1.0)
    with pytest.raises(NodeError, match="is idle"):
        eng.generate(s, 1)
    eng.commit(s, 1, [1])
    assert_same_as_cold(eng, s)


def test_guesses_are_never_taken_for_truth() -> None:
    eng = engine()
    s = eng.open(PROMPT).id
    kid = eng.fork(s, 1, "k", WRAP)
    eng.speculate(s, kid, guess=OTHER, q=0.9)
    for verb in (
        lambda: eng.attempt(s, kid),
        lambda: eng.promote(s, kid),
        lambda: eng.append(s, kid, [1]),
    ):
        with pytest.raises(NodeError, match="are a guess"):
            verb()
    with pytest.raises(NodeError, match="guess already"):
        eng.speculate(s, kid, guess=OTHER, q=0.9)


@pytest.mark.parametrize(
    ("children", "options", "error", "match"),
    [
        ([], {}, ConfigError, "at least one child"),
        ([2, 2], {}, ConfigError, "twice"),
        ([2], {"policy": "best"}, ConfigError, "unknown join policy 'best'"),
        ([2], {"policy": "kofn"}, ConfigError, "needs k"),
        ([2], {"policy": "kofn", "k": 2}, ConfigError, "k=2 of 1"),
        ([2], {"policy": "winner", "k": -1}, ConfigError, "is not one of"),
        ([2], {"policy": "summary"}, ConfigError, "needs the summary"),
        ([2], {"policy": "first", "blend": [1]}, ConfigError, "not a blend"),
        ([2, 5], {}, NodeError, "no common parent"),
        ([6], {}, ConfigError, "would add no token"),
    ],
)
def test_join_errors(
    eng: Engine,
    children: list[int],
    options: dict[str, Any],
    error: type[ForkServeError],
    match: str,
) -> None:
    eng.fork("s", 2, "below")  # node 5
    eng.fork("s", 1, "empty")  # node 6
    refused(eng, error, match, lambda e, s: e.join(s, children, **options))


@pytest.mark.parametrize(
    "verb",
    [
        lambda e, s: e.speculate(s, 2, priority=1.5),
        lambda e, s: e.speculate(s, 2, q=-0.1),
        lambda e, s: e.speculate(s, 2, t_idle_ms=-1),
        lambda e, s: e.speculate(s, 2, t_idle_ms=float("nan")),
        lambda e, s: e.commit(s, 1, []),
        lambda e, s: e.commit(s, 1, PROMPT, full=True),
    ],
)
def test_arguments_out_of_range(eng: Engine, verb: Verb) -> None:
    refused(eng, ConfigError, "must lie in|must be >= 0|at least one observed", verb)


# ---------------------------------------------------------------- configuration


def test_unknown_setting_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'page_sise'; did you mean 'page_size'"):
        ForkServeConfig(page_sise=4)


@pytest.mark.parametrize("owner", _ELSEWHERE)
def test_an_argument_of_something_else_is_said_to_be(owner: str) -> None:
    # By the source: LocalBackend must not need torch to be spoken of.
    where = {"Engine": "api.py", "Store": "store/store.py", "MockBackend": "engine/mock.py"}
    path = Path(forkserve.__file__).parent / where.get(owner, "engine/local/backend.py")
    (cls,) = (
        node
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == owner
    )
    init = next(n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    taken = {arg.arg for arg in [*init.args.args, *init.args.kwonlyargs]}
    for name in _ELSEWHERE[owner]:
        assert name in taken
        with pytest.raises(
            ConfigError, match=f"unknown setting '{name}'; {name} belongs to {owner}"
        ):
            ForkServeConfig(**{name: 1})


def test_bad_values_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="page_size=0"):
        ForkServeConfig(page_size=0)
    monkeypatch.setenv("FORKSERVE_PAGE_SIZE", "8")
    assert ForkServeConfig().page_size == 8
    assert ForkServeConfig(page_size=4).page_size == 4
    monkeypatch.setenv("FORKSERVE_PAGE_SIZE", "many")
    with pytest.raises(ConfigError, match="page_size='many'"):
        ForkServeConfig()


def test_settings_do_not_change() -> None:
    with pytest.raises(Exception, match="frozen"):
        ForkServeConfig().page_size = 4  # type: ignore[misc]


def test_two_configs_are_refused() -> None:
    with pytest.raises(ConfigError, match="different configs"):
        Engine(MockBackend(ForkServeConfig()), ForkServeConfig(page_size=4))


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"min_p": 1},
        {"top_k": -1},
        {"stop": ("",)},
        {"stop": "x"},
        {"temperature": float("inf")},
    ],
)
def test_sampling_params_are_checked(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"out of range|tuple of strings"):
        SamplingParams(**values)
