"""What a search computes, in how many passes, what it holds, and that it says the same tokens."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from examples.game24 import Game24
from forkserve import Engine, ForkServeConfig, SamplingParams
from forkserve.adapters.tot import (
    State,
    Task,
    Trunks,
    Usage,
    atot_bfs,
    beam,
    best_of_n,
    mcts,
    tot_bfs,
    tot_dfs,
)
from forkserve.adapters.tot.usage import PrefixCache
from forkserve.engine import MockBackend
from forkserve.types import Batch

from .conftest import Letters, Make, bare, empty, speller

MODES = ["template", "append"]


@pytest.mark.parametrize("mode", MODES)
def test_requests_of_a_step_share_their_passes(make: Make, mode: Any) -> None:
    """Four evaluations of four thoughts: sixteen replies of two tokens and an end."""
    eng = make(speller("abcd", lambda word: 10 + len(word)))
    sampled: list[int] = []
    run = eng.backend.execute

    def spy(batch: Batch) -> Any:
        sampled.append(sum(work.sample is not None for work in batch.works))
        return run(batch)

    eng.backend.execute = spy  # type: ignore[method-assign]
    found = tot_bfs(eng, Letters(), "x", mode=mode, depth=1, n_evaluate=4)
    assert found.usage.requests == 1 + 16
    # The first of four that share a prompt may draw a pass earlier than those that wait for it.
    assert sampled.count(16) >= 2
    assert len(sampled) <= 8 + 2 + 5  # "a\nb\nc\nd" and its end; trunk, prompts; "11" and its end
    sampled.clear()
    narrow = tot_bfs(eng, Letters(), "y", mode=mode, depth=1, n_evaluate=4, max_parallel=3)
    assert max(sampled) == 3
    assert [t.value for t in narrow.tree.children] == [t.value for t in found.tree.children]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("search", [tot_bfs, tot_dfs, beam, mcts, best_of_n])
def test_usage_is_what_the_engine_counts(make: Make, search: Any, mode: Any) -> None:
    words = iter("abcdefgh")
    spell = speller("abc", lambda word: 10 + word.count("b"))

    def reply(prompt: str) -> str:
        return next(words) if prompt.rpartition("[")[2].startswith("sample") else spell(prompt)

    eng = make(reply, prefix_index=False)
    lengths: list[int] = []
    start, execute, rows = eng.start, eng.backend.execute, []

    def count(batch: Batch) -> Any:
        rows.extend(len(work.tokens) for work in batch.works if work.write is not None)
        return execute(batch)

    def spy(session: str, *args: Any, **options: Any) -> Any:
        lengths.append(len(eng.tokens(session, options["node"])))  # before it grows
        return start(session, *args, **options)

    eng.start = spy  # type: ignore[method-assign]
    eng.backend.execute = count  # type: ignore[method-assign]
    own: dict[str, Any] = {"iterations": 4} if search is mcts else {}
    usage = search(eng, Letters(), "x", mode=mode, **own).usage
    stats = eng.stats()
    assert usage.requests == len(lengths)
    assert usage.prompt == sum(lengths)
    assert usage.decoded == stats.decode_steps
    # The row of a reply's last token is computed only if something is built on it.
    assert usage.prefilled + usage.decoded - usage.requests == sum(rows)
    assert usage.prompt == usage.prefilled + usage.reused
    assert usage.prefilled <= usage.prefix_cache < usage.prompt


def test_trunks_are_computed_once_and_kept(make: Make) -> None:
    eng = make(prefix_index=False)
    task = Game24()
    with Trunks(eng, task) as trunks:
        options: dict[str, Any] = {"mode": "template", "trunks": trunks, "max_tokens": 300}
        first = tot_bfs(eng, task, "2 3 5 12", **options)
        again = tot_bfs(eng, task, "2 3 5 12", **options)
        assert again.text == first.text
        trunk = sum(len(eng.backend.tokenizer.encode(task.trunk(r))) for r in ("propose", "value"))
        assert first.usage.prefilled - again.usage.prefilled >= trunk
        assert (
            first.usage.requests - again.usage.requests == again.usage.cached - first.usage.cached
        )
        assert again.usage.prefilled <= again.usage.prefix_cache
        assert len(eng.sessions()) == 2
        for session in eng.sessions():
            bare(eng, session)
    empty(eng)


def test_trunks_are_shared_by_searches_at_the_same_time(make: Make) -> None:
    eng, task = make(prefix_index=False), Game24()

    async def main() -> list[str]:
        async with Trunks(eng, task) as trunks:
            found = await asyncio.gather(
                *(
                    atot_bfs(eng, task, puzzle, mode="template", trunks=trunks, max_tokens=300)
                    for puzzle in ("2 3 5 12", "1 6 6 8", "2 3 5 12", "2 7 8 9")
                )
            )
            for session in eng.sessions():
                bare(eng, session)
        assert all(one.solved for one in found)
        return [one.text for one in found]

    texts = asyncio.run(main())
    assert texts[0] == texts[2] == tot_bfs(eng, task, "2 3 5 12", max_tokens=300).text


def test_equal_prompts_are_evaluated_once(make: Make) -> None:
    asked: list[str] = []
    spell = speller("ab", lambda word: 1)

    def reply(prompt: str) -> str:
        asked.append(prompt.rpartition("[")[2])
        return spell(prompt)

    class Sorted(Letters):
        def prompt(self, role: str, state: State) -> str:
            word = "".join(sorted(state.thoughts))
            return f"[{role} {state.problem} {word}]"

    eng = make(reply)
    options: dict[str, Any] = {"mode": "template", "depth": 2, "n_evaluate": 2}
    found = tot_bfs(eng, Sorted(), "x", **options)
    values = [prompt for prompt in asked if prompt.startswith("value")]
    assert sorted(values) == sorted(2 * [f"value x {w}]" for w in ("a", "b", "aa", "ab", "bb")])
    assert found.usage.cached == 2
    asked.clear()
    tot_bfs(eng, Sorted(), "x", cache=False, **options)
    assert len([prompt for prompt in asked if prompt.startswith("value")]) == 2 * 6


def test_equal_thoughts_are_kept_once(make: Make) -> None:
    class Bag(Letters):
        def key(self, state: State) -> Any:
            return "".join(sorted(state.thoughts))

    eng = make(speller("ab", lambda word: 1))
    found = tot_bfs(eng, Bag(), "x", depth=2)
    last = found.trace[-1]
    assert [t.status for t in last.candidates] == ["selected", "selected", "duplicate", "selected"]
    assert [t.score for t in last.candidates] == [1, 1, None, 1]
    everything = tot_bfs(eng, Bag(), "x", depth=2, dedupe=False)
    assert [t.status for t in everything.trace[-1].candidates] == 4 * ["selected"]


def test_greedy_evaluations_are_asked_once(make: Make) -> None:
    eng = make(speller("ab"))
    found = tot_bfs(eng, Letters(), "x", depth=1, params=SamplingParams())
    assert found.usage.requests == 1 + 2


# --- losers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [False], indirect=True)
@pytest.mark.parametrize("generate", ["propose", "sample"])
def test_losers_are_gone_right_after_selection(make: Make, generate: Any) -> None:
    """When a step is noted the tree holds the kept thoughts, what they stand on, and no more."""
    spell = speller("abcd", lambda word: word.count("b"))
    words = iter("abcd" * 20)

    def reply(prompt: str) -> str:
        return next(words) if prompt.rpartition("[")[2].startswith("sample") else spell(prompt)

    eng = make(reply)
    live: list[set[str]] = []

    def look(step: Any) -> None:
        (session,) = eng.sessions()
        tree = eng.tree(session)
        leaves = [n for n in tree.nodes.values() if not n.children]
        live.append({eng.text(session, n.id) for n in leaves})
        assert len(leaves) == len(step.selected)
        assert step.live_pages == eng.stats().live_pages

    options: dict[str, Any] = {"n_generate": 6} if generate == "sample" else {}
    found = tot_bfs(eng, Letters(), "x", beam=2, generate=generate, on_step=look, **options)
    for step, texts in zip(found.trace, live, strict=True):
        assert len(texts) == len(step.selected)
        assert len(step.candidates) == len(step.selected) + len(step.aborted) + sum(
            t.status == "duplicate" for t in step.candidates
        )
    assert found.text == "b\nb\nb"


# --- output identity -----------------------------------------------------------------------------


class Free(Task):
    """Whatever the model says is a thought."""

    def trunk(self, role: str) -> str:
        return f"the {role} trunk: " + "words " * 9

    def prompt(self, role: str, state: State) -> str:
        return f"<{role} after {len(state.thoughts)}>"

    def thoughts(self, role: Any, state: State, reply: str) -> list[str]:
        return [reply or "nothing"]

    def value(self, state: State, reply: str) -> float:
        return float(len(reply))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("search", [tot_bfs, tot_dfs, mcts])
def test_replies_are_those_of_a_cold_engine(search: Any, mode: Any) -> None:
    """Each request again on an engine of its own that knows nothing but the prompt."""
    config = ForkServeConfig(capacity_pages=400, shuffle_pages=True)
    with Engine(MockBackend(config)) as eng:
        asked: list[tuple[list[int], Any]] = []
        start = eng.start

        def spy(session: str, limit: int, *, node: int, params: SamplingParams) -> Any:
            running = start(session, limit, node=node, params=params)
            asked.append((eng.tokens(session, node), running))
            return running

        eng.start = spy  # type: ignore[method-assign]
        options = {"iterations": 4} if search is mcts else {}
        search(
            eng,
            Free(),
            "A problem. ",
            mode=mode,
            generate="sample",
            n_generate=3,
            max_tokens=5,
            params=SamplingParams(temperature=0.8, ignore_eos=True),
            **options,
        )
        assert len(asked) >= 18
        assert len({running.params.seed for _, running in asked}) == len(asked)
    for prompt, running in asked:
        with Engine(MockBackend(config)) as cold:
            handle = cold.open(prompt)
            got = cold.generate(handle.id, 5, params=replace(running.params))
        assert got == running.tokens


def test_a_search_is_repeatable(make: Make) -> None:
    with Engine(MockBackend()) as eng:
        options: dict[str, Any] = {"generate": "sample", "max_tokens": 6, "n_generate": 3}
        one = tot_bfs(eng, Free(), "A problem. ", seed=1, **options)
        with eng.session("something else"):
            two = tot_bfs(eng, Free(), "A problem. ", seed=1, **options)
        other = tot_bfs(eng, Free(), "A problem. ", seed=2, **options)
        assert one.tree.draw() == two.tree.draw() != other.tree.draw()


@pytest.mark.parametrize("generate", ["propose", "sample"])
def test_the_winner_is_committed_to_a_session(generate: Any) -> None:
    """What stands there is opening, prompts and replies; it goes on like a cold engine."""
    with Engine(MockBackend()) as eng:
        with eng.session("The talk so far. ") as s:
            before = s.text
            found = tot_bfs(
                eng, Free(), "x", session=s, generate=generate, n_generate=2, max_tokens=6, depth=2
            )
            assert not s.closed
            assert found.best is not None
            bare(eng, s.id)
            eng.check()
            assert s.text.startswith(before)
            for thought in found.best.state.thoughts:
                assert thought.encode() in s.text.encode() or generate == "sample"
            if generate == "propose":
                assert s.text == before + "".join(f"{t}\n" for t in found.best.state.thoughts)
            tokens = s.tokens
            said = s.generate(8, temperature=0.9, seed=3).tokens
        assert eng.stats().live_pages == eng.stats().index_pages
    with Engine(MockBackend()) as cold, cold.session(tokens) as s:
        assert s.generate(8, temperature=0.9, seed=3).tokens == said


# --- the peer ------------------------------------------------------------------------------------


def test_prefix_cache_knows_full_pages_only() -> None:
    cache = PrefixCache(4)
    assert cache.lookup(range(10)) == 0
    cache.add(range(10))
    assert cache.lookup(range(10)) == 8
    assert cache.lookup(range(8)) == 4  # the last token is always computed
    assert cache.lookup([0, 1, 2, 3, 9, 9, 9, 9, 9]) == 4
    assert cache.lookup([1, 1, 2, 3, 4]) == 0
    assert cache.lookup(list(range(4, 9))) == 0  # the same page after another beginning


def test_usage_counts_what_was_reused() -> None:
    assert Usage(prompt=10, prefilled=4).reused == 6
