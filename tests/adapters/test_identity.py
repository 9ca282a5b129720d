"""Output identity of the adapters on a real model: what they say is what a cold engine says.

Every generation that an adapter starts is noted with its whole prompt, and asked again of an engine
that has never forked, speculated or cached anything.  With native and with torch kernels.  What the
cold engine has said once it need not compute again: most prompts come several times.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

from forkserve import Engine, ForkServeConfig, SamplingParams
from forkserve.adapters.react import Committed, ReactAgent, Speculated
from forkserve.adapters.tools import Tool
from forkserve.adapters.tot import State, Task, mcts, tot_bfs
from forkserve.engine.constraints import ChoiceConstraint
from forkserve.engine.local import LocalBackend
from forkserve.kernels.native import library

from .react.conftest import LIVE, rest_until_quiet, spoken

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.timeout(900),  # a minute, the cold engine's share included
    pytest.mark.xdist_group("smollm2"),
]

_absent = library.available()
KERNELS = [
    pytest.param("native", marks=pytest.mark.skipif(_absent is not None, reason=str(_absent))),
    "torch",
]


class Noting(Engine):
    """Remembers every generation with its prompt and parameters."""

    def __init__(self, backend: Any) -> None:
        super().__init__(backend)
        self.noted: list[tuple[list[int], SamplingParams, Any]] = []

    def start(self, session: str, *args: Any, **options: Any) -> Any:
        prompt = self.tokens(session, options.get("node"))
        generation = super().start(session, *args, **options)
        self.noted.append((prompt, options.get("params") or SamplingParams(), generation))
        return generation


@pytest.fixture(scope="module", params=KERNELS)
def backend(request: pytest.FixtureRequest) -> Iterator[LocalBackend]:
    config = ForkServeConfig(capacity_pages=1024)
    made = LocalBackend(config, "smollm2", dtype="float32", kernels=request.param)
    yield made
    made.close()


@pytest.fixture(scope="module")
def cold(backend: LocalBackend) -> Iterator[LocalBackend]:
    config = ForkServeConfig(capacity_pages=256, prefix_index=False)
    kernels = str(backend.info.extra["kernels"])
    made = LocalBackend(config, "smollm2", dtype="float32", kernels=kernels)
    yield made
    made.close()


Asked = tuple[tuple[int, ...], SamplingParams]
Known = dict[Asked, list[int]]


@pytest.fixture(scope="module")
def known(cold: LocalBackend) -> Known:
    """What `cold` has said to a prompt and parameters, the constraint being the same object."""
    return {}


def ask(alone: Engine, wanted: dict[Asked, int], known: Known, together: int = 8) -> None:
    """Have the cold engine say this many tokens to each, some unrelated sessions at a time."""
    every = list(wanted)
    for group in (every[at : at + together] for at in range(0, len(every), together)):
        handles = [alone.open(list(prompt)) for prompt, _ in group]
        runs = [
            alone.start(handle.id, wanted[asked], params=asked[1])
            for handle, asked in zip(handles, group, strict=True)
        ]
        for handle, asked, run in zip(handles, group, runs, strict=True):
            known[asked] = list(run.result())
            alone.close(handle.id)


@pytest.fixture
def engine(backend: LocalBackend, cold: LocalBackend, known: Known) -> Iterator[Noting]:
    made, alone = Noting(backend), Engine(cold)
    LIVE.append(made)
    try:
        yield made
        wanted: dict[Asked, int] = {}
        for prompt, params, generation in made.noted:
            asked, count = (tuple(prompt), params), max(len(generation.tokens), 1)
            if asked not in known or len(known[asked]) < count:
                wanted[asked] = max(wanted.get(asked, 0), count)
        ask(alone, wanted, known)
        for prompt, params, generation in made.noted:
            said, asked = list(generation.tokens), (tuple(prompt), params)
            want = known[asked][: len(said)]
            if said == want:
                continue
            assert not cold.info.extra["exact"], (said, want)
            if params.temperature:
                near_tie(alone, prompt, params, said, want)
            else:  # products of torch depend on the batch, and so may a choice
                ask(alone, {asked: len(known[asked])}, known, together=1)
                assert said == known[asked][: len(said)]
        made.check()
        for name in made.sessions():
            made.close(name)
        stats = made.stats()
        assert (stats.live_pages - stats.index_pages, stats.nodes) == (0, 0)
    finally:
        LIVE.remove(made)
        made._loop.shutdown()  # the backends go on
        alone._loop.shutdown()


def near_tie(
    alone: Engine, prompt: list[int], params: SamplingParams, said: list[int], want: list[int]
) -> None:
    """Products of torch depend on the batch: a draw may fall on the other side of a bound.

    Only a draw, which takes intervals in the order of ids: next to nothing lies between the two.
    """
    assert params.temperature, (said, want)
    at = next(i for i, (a, b) in enumerate(zip(said, want, strict=True)) if a != b)
    low, high = sorted((said[at], want[at]))
    handle = alone.open([*prompt, *said[:at]])
    every = {str(i): [i] for i in range(alone.backend.info.vocab_size)}
    mass = alone.choice_mass(handle.id, handle.tip, every)
    alone.close(handle.id)
    between = sum(mass[str(i)] for i in range(low + 1, high))
    assert between < 1e-3, (said, want, between)


def height(mountain: str) -> str:
    """The height of a mountain."""
    rest_until_quiet()
    return f"{mountain} is 4478 metres high."


def fails(mountain: str) -> str:
    """The height of a mountain."""
    rest_until_quiet()
    raise LookupError("no such mountain")


@pytest.mark.parametrize("tool", [height, fails])
@pytest.mark.parametrize("how", ["sync", "async"])
def test_react(engine: Noting, tool: Any, how: str) -> None:
    """With and without speculation the prompts are equal, and so is what follows them."""
    call = spoken({"height": {"mountain": "Matterhorn"}})
    ends = engine.backend.info.eos_ids
    first = SamplingParams(constraint=ChoiceConstraint(engine.backend.tokenizer, [call], ends))

    def run(speculate: bool) -> tuple[list[Any], list[Any]]:
        agent = ReactAgent(
            engine,
            [Tool.of(tool, name="height", idle_ms=1e6)],
            params=lambda turn: SamplingParams(stop=(".",)) if turn else first,
            max_tokens=60,
            max_turns=2,
            speculate=speculate,
        )

        async def events() -> list[Any]:
            return [event async for event in agent.astream("How high is the Matterhorn?")]

        begin = len(engine.noted)
        task = "How high is the Matterhorn?"
        seen = list(agent.stream(task)) if how == "sync" else asyncio.run(events())
        return engine.noted[begin:], seen

    guessed, seen = run(True)
    plain, _ = run(False)
    assert [prompt for prompt, _, _ in guessed] == [prompt for prompt, _, _ in plain]
    assert [list(g.tokens) for _, _, g in guessed] == [list(g.tokens) for _, _, g in plain]
    assert any(isinstance(e, Speculated) and e.admitted for e in seen), [
        e for e in seen if isinstance(e, Speculated)
    ]
    (bound,) = [event for event in seen if isinstance(event, Committed)]
    assert bound.branch == ("height" if tool is height else "err")


class Words(Task):
    """Words that go together."""

    depth = 2

    def trunk(self, role: str) -> str:
        return "Words that go with the sea: salt, wave, sand, boat.\n" * 3

    def opening(self, problem: str) -> str:
        return self.trunk("") + f"Words that go with {problem}:\n"

    def prompt(self, role: str, state: State) -> str:
        said = f"Words that go with {state.problem}: {state.text}"
        return said if role in ("propose", "sample") else f"{said}\nMark from 1 to 10: "


@pytest.mark.parametrize("mode", ["append", "template"])
@pytest.mark.parametrize("generate", ["propose", "sample"])
def test_tree_of_thoughts(engine: Noting, mode: Any, generate: Any) -> None:
    options: Any = {"mode": mode, "generate": generate, "n_generate": 2, "n_evaluate": 2}
    tot_bfs(engine, Words(), "winter", beam=2, max_tokens=8, **options)
    mcts(engine, Words(), "winter", iterations=3, max_tokens=8, **options)


def test_langgraph(engine: Noting) -> None:
    pytest.importorskip("langgraph")
    from forkserve.adapters.langgraph import ForkServe

    from .langgraph.graphs import START_STATE, fan_out

    fs = ForkServe(engine)
    fs.bind(fan_out(fs, tokens=6).compile()).invoke(START_STATE)
    assert len(engine.noted) >= 4


@pytest.mark.parametrize("speculate", [False, True])
def test_chat_model(engine: Noting, speculate: bool) -> None:
    pytest.importorskip("langchain_core")
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

    from forkserve.adapters.langchain import ChatForkServe

    model = ChatForkServe(engine=engine, max_tokens=12)
    history: list[Any] = [HumanMessage("Name a colour.")]
    history.append(model.invoke(history))
    history += [HumanMessage("And the height of the Matterhorn?")]
    said = model.invoke(history)
    call = {"name": "height", "args": {"mountain": "Matterhorn"}, "id": "c1", "type": "tool_call"}
    reply = AIMessage(said.content, tool_calls=[call])
    if speculate:
        assert model.speculate_results(history, reply) > 0
        while engine.drain_slack():
            pass
    history += [reply, ToolMessage("4478 metres", tool_call_id="c1")]
    model.invoke(history)
    assert len(engine.noted) == 3
    model.close()
