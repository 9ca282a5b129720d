"""A real run: SmolLM2 under its own template, with and without speculation; and the example."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples import react_agent
from forkserve import Engine, ForkServeConfig, SamplingParams
from forkserve.adapters.react import Event, Final, ReactAgent, Speculated
from forkserve.engine.constraints import ChoiceConstraint

from .conftest import LIVE, rest_until_quiet, spoken


def test_example_on_the_mock(capsys: pytest.CaptureFixture[str]) -> None:
    assert react_agent.main() == react_agent.ANSWER
    shown = capsys.readouterr().out
    assert "'shelf'" not in shown
    assert '{"title": "The Lighthouse Keeper", "shelf": 12, "on_loan": false}' in shown


@pytest.mark.model
def test_example_on_the_model() -> None:
    assert react_agent.main("smollm2")


def height(mountain: str) -> str:
    """The height of a mountain.

    mountain: its name
    """
    rest_until_quiet(0.5)
    return f"{mountain} is 4478 metres high."


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Any]:
    from forkserve.engine import LocalBackend

    backend = LocalBackend(ForkServeConfig(capacity_pages=1024, background=True))
    yield backend
    backend.close()


CALLS = {
    "tools": [spoken({"height": {"mountain": name}}) for name in ("Matterhorn", "Eiger")],
    "text": [
        f'Thought: I need it.\nAction: height\nAction Input: {{"mountain": "{name}"}}'
        for name in ("Matterhorn", "Eiger")
    ],
}
# In the text form a model this small would go on calling.
ANSWERS = [f"Final Answer: it is {n} metres high" for n in (4478, 3967, 8849)]


def observe(backend: Any, mode: Any, speculate: bool) -> tuple[list[list[int]], list[Event]]:
    """The prompts of all turns, and the events of a run."""
    eng = Engine(backend)
    prompts: list[list[int]] = []
    start = eng.start

    def spy(session: str, *args: Any, **options: Any) -> Any:
        prompts.append(eng.tokens(session))
        return start(session, *args, **options)

    def params(turn: int) -> SamplingParams:
        choices = CALLS[mode] if turn == 0 else ANSWERS
        free = turn > 0 and mode == "tools"
        eos = backend.info.eos_ids
        return SamplingParams(
            constraint=None if free else ChoiceConstraint(backend.tokenizer, choices, eos)
        )

    eng.start = spy  # type: ignore[method-assign]
    agent = ReactAgent(
        eng,
        [height],
        mode=mode,
        system="You know mountains. Answer in one short sentence.",
        params=params,
        max_tokens=60,
        speculate=speculate,
    )
    LIVE.append(eng)
    events = list(agent.stream("How high is the Matterhorn?"))
    LIVE.remove(eng)
    eng.check()
    assert eng.sessions() == []
    eng._loop.shutdown()  # the backend goes on
    return prompts, events


@pytest.mark.model
@pytest.mark.parametrize("mode", ["tools", "text"])
def test_the_real_model(smollm2: Any, mode: Any) -> None:
    prompts, events = observe(smollm2, mode, True)
    plain, others = observe(smollm2, mode, False)
    final, other = events[-1], others[-1]
    assert isinstance(final, Final)
    assert isinstance(other, Final)
    assert final.result.messages == other.result.messages
    assert prompts == plain
    shown, tokenizer = final.result.messages, smollm2.tokenizer
    for prompt, count in zip(prompts, (2, 4), strict=True):
        assert prompt == tokenizer.encode(tokenizer.render(shown[:count]))
    assert "4478" in final.result.text
    assert any(isinstance(e, Speculated) and e.admitted for e in events)
    stats, without = final.result.turns[1].stats, other.result.turns[1].stats
    assert stats.used >= stats.known > 0
    assert stats.prefilled < without.prefilled
    assert stats.prompt == without.prompt


def test_programs_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[3] / "docs" / "adapters" / "react.md"
    names: dict[str, Any] = {"__name__": "page"}
    for number, source in enumerate(
        re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    ):
        exec(compile(source, f"{page.name}, program {number}", "exec"), names)
    shown = capsys.readouterr().out
    assert "Yes, it rains." in shown
    assert "KNOWN_SUFFIX" in shown
