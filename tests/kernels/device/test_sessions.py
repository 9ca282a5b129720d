"""Whole sessions on Triton kernels: forks, attempts, speculation, commits, every kind of draw."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

for _needed in ("pydantic", "tokenizers", "transformers", "safetensors", "llguidance", "gguf"):
    pytest.importorskip(_needed)

from forkserve import Engine, SamplingParams  # noqa: E402
from forkserve.engine.constraints import ChoiceConstraint, GrammarConstraint  # noqa: E402
from forkserve.engine.local import LocalBackend  # noqa: E402
from forkserve.engine.local import backend as backends  # noqa: E402
from forkserve.engine.local.gpu.runner import GpuRunner  # noqa: E402
from forkserve.kernels.jit import INTERPRETED  # noqa: E402
from tests.engine.conftest import tiny_config, tiny_model, tiny_tokenizer  # noqa: E402

DEVICE = "interpreter" if INTERPRETED else "cuda"
GO_ON = {"ignore_eos": True}
Make = Callable[..., Engine]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """make(family, **backend): engines over one tiny model, checked at the end."""
    if INTERPRETED:  # times are of no use there, and take some
        monkeypatch.setattr(backends, "_WARM_UP_SAMPLES", 1)
        monkeypatch.setattr(backends, "_WARM_UP_ROWS", 2)
    made: list[Engine] = []

    def build(family: str, **options: Any) -> Engine:
        if not any(tmp_path.iterdir()):
            tiny_model(family, num_hidden_layers=1).save_pretrained(tmp_path)
            tiny_tokenizer(tmp_path)
        backend = LocalBackend(tiny_config(prefix_index=False), tmp_path, **options)
        monkeypatch.setattr(backend, "predict_ms", lambda *_: 1.0)  # the same admissions everywhere
        made.append(Engine(backend))
        return made[-1]

    yield build
    for eng in made:
        eng.check()
        eng.shutdown()


def ids(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(256) for _ in range(count)]


def tell(eng: Engine) -> dict[str, Any]:
    """Everything that a session says, by what was asked."""
    tokenizer, info = eng.backend.tokenizer, eng.backend.info
    ends = {"vocab_size": info.vocab_size, "eos_ids": info.eos_ids}
    said: dict[str, Any] = {}
    with eng.session(ids(40, 1), session="a") as s:
        said["greedy"] = s.generate(2, **GO_ON).tokens
        right = ids(5, 2)
        branches = [s.fork("wrong", ids(4, 3)), s.fork("right", [*right[:3], 7, 8])]
        for branch in branches:
            branch.speculate()
        attempts = s.attempts(2, "attempt", ids(3, 4))
        penalties = {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.5}
        replies = s.generate_many(
            attempts,
            2,
            temperature=1.2,
            top_p=0.9,
            seed=5,
            logit_bias={9: 1.0},
            **penalties,
            **GO_ON,
        )
        said["many"] = [reply.tokens for reply in replies]
        said["spoken of"] = eng.choice_mass(
            "a", s.tip.tip, {"yes": "yes", "yet": "yet", "no": "no"}
        )
        eng.drain_slack()
        found = s.commit(right)
        said["taken"] = found.skipped_prefill
        said["sampled"] = s.generate(
            2, temperature=1.0, top_k=9, min_p=0.01, seed=3, **GO_ON
        ).tokens
        choice = ChoiceConstraint(tokenizer, ["ab", "cd"], info.eos_ids)
        said["choice"] = s.fork("choice").generate(4, constraint=choice).text
        grammar = GrammarConstraint.from_regex(tokenizer, "[0-9]{2}", **ends)
        said["grammar"] = (
            s.fork("grammar").generate(4, constraint=grammar, temperature=1.0, seed=1).text
        )
        best = s.generate(2, logprobs=True, top_logprobs=3, **GO_ON)
        said["likeliest"] = [[token for token, _ in step] for step in best.top_logprobs]
        said["text"] = s.tokens
    return said


@pytest.mark.parametrize(("family", "kv"), [("qwen2", "none"), ("llama", "fp8")])
def test_a_session_with_everything(make: Make, family: str, kv: str) -> None:
    """It says what it says on the CPU, and what one that never forked says.

    Rows in 8 bits are other rows than the CPU's: they are held against the cold session alone.
    """
    eng = make(family, device=DEVICE, kv=kv, debug=kv != "none")
    got = tell(eng)
    with eng.session(got["text"][:-2], session="cold") as cold:
        assert list(cold.generate(2, **GO_ON).tokens) == got["text"][-2:]
    assert (got["taken"], got["choice"] in ("ab", "cd"), got["grammar"].isdigit()) == (
        3,
        True,
        True,
    )
    if kv == "none":
        want = tell(make(family, kernels="torch"))
        assert got.pop("spoken of") == pytest.approx(want.pop("spoken of"), abs=1e-4)
        assert got == want


def test_plans_grow_while_branches_decode(make: Make) -> None:
    """What the planner gives from pass to pass is the one plan, made when a branch begins."""
    eng = make("llama", device=DEVICE)
    runner = eng.backend._runner  # type: ignore[attr-defined]
    assert isinstance(runner, GpuRunner)
    s = eng.open(ids(6, 1)).id
    kids = [eng.fork(s, eng.tip(s), "b", [i]) for i in range(2)]
    targets = [(s, eng.attempt(s, kid)) for kid in kids]
    made = runner._planner.made
    eng.generate_many(targets, 4, params=SamplingParams(**GO_ON))
    assert runner._planner.made - made <= 2
    assert runner._planner.grown >= 2
