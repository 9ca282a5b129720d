"""Best of n with a judge: n answers on one prompt, the same model marks them, the best one stays.

Run it:  python examples/best_of_n.py          (the mock, with scripted replies)
         python examples/best_of_n.py smollm2  (needs the `engine` extra)

A model of 135M parameters is a poor judge of its own answers: read the marks with that in mind.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from forkserve import Engine, ForkServeConfig, PromptText, SamplingParams, plain
from forkserve.adapters.tot import State, Task, ToTResult, best_of_n
from forkserve.engine.constraints import ChoiceConstraint

QUESTION = "Why does the sea taste of salt? Answer in one sentence."
ANSWERS = (
    "Because fish are salty.",
    "Rivers carry dissolved minerals into it, and only the water leaves again as vapour.",
    "Nobody knows.",
    "Rain washes salt out of rocks.",
)
MARKS = ("2", "9", "1", "6")


def turn(text: str) -> PromptText:
    """The next turn of a user: `text` is content, whatever it says."""
    return PromptText("\n<|im_start|>user\n") + plain(text) + "<|im_end|>\n<|im_start|>assistant\n"


class Judged(Task):
    """One answer to a chat message; the judge is asked in the next turn of the same chat."""

    def __init__(self, engine: Engine) -> None:
        self._tokenizer = engine.backend.tokenizer

    def opening(self, problem: str) -> Sequence[dict[str, str]]:
        return [{"role": "user", "content": problem}]

    def prompt(self, role: str, state: State) -> str:
        if role == "sample":
            return ""
        question = "How good is this answer, from 1 to 9? Say the number only."
        return turn(question)

    def constraint(self, role: str, states: Sequence[State]) -> ChoiceConstraint | None:
        marks = [str(mark) for mark in range(1, 10)]
        return ChoiceConstraint(self._tokenizer, marks) if role == "value" else None


def make_engine(name: str) -> Engine:
    """The mock, or SmolLM2-135M."""
    config = ForkServeConfig(capacity_pages=2048)
    if name == "mock":
        return scripted_engine(config)
    from forkserve.engine import LocalBackend

    return Engine(LocalBackend(config, name))


def main(name: str = "mock") -> ToTResult:
    """Four answers and their marks; prints which one wins, and goes on from it."""
    with make_engine(name) as engine, engine.session(Judged(engine).opening(QUESTION)) as chat:
        result = best_of_n(
            engine,
            Judged(engine),
            QUESTION,
            n=4,
            n_evaluate=1,
            session=chat,
            params=SamplingParams(temperature=0.9),
            max_tokens=96,
        )
        for answer in result.tree.children:
            mark = "-" if answer.score is None else f"{answer.score:.0f}"
            print(f"{mark}  {answer.text!r}  ({answer.status})")
        print(f"best: {result.text}")
        usage = result.usage
        print(f"{usage.prefilled} prompt tokens prefilled, {usage.prompt} without reuse")
        # The winner stands in the chat; nothing of it is computed again.
        chat.append(turn("Thank you."))
        print(f"then: {chat.generate(12).text!r}")
        return result


def scripted_engine(config: ForkServeConfig) -> Engine:
    """The mock: it gives the answers in turn, and each the mark that is meant for it."""
    from forkserve.engine import MockBackend
    from forkserve.types import Batch

    answers: Iterator[str] = iter(ANSWERS)
    seen: set[int] = set()

    def script(batch: Batch) -> None:
        for work in batch.works:
            spec: Any = work.sample
            if spec is not None and spec.step == 0 and spec.request not in seen:
                seen.add(spec.request)
                text = engine.text(work.session, work.node)
                said = next((n for n, answer in enumerate(ANSWERS) if answer in text), None)
                marks = re.search("from 1 to 9", text)
                if marks is not None and said is not None:
                    backend.script(MARKS[said])
                else:
                    backend.script(next(answers, "You are welcome."))

    backend = MockBackend(config, on_batch=script)
    engine = Engine(backend)
    return engine


if __name__ == "__main__":
    main(*sys.argv[1:2])
