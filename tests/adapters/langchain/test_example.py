"""The example of the chat model runs, and reuses what a conversation has said before."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("langchain_core")

from examples import langchain_chat


@pytest.mark.parametrize(
    "backend",
    [
        "mock",
        pytest.param("smollm2", marks=[pytest.mark.model, pytest.mark.xdist_group("smollm2")]),
    ],
)
def test_chat_model_drop_in(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llguidance")  # the last reply is kept by a grammar
    job = langchain_chat.main(backend)
    out = capsys.readouterr().out
    shares = [(int(a), int(b)) for a, b in re.findall(r"\[(\d+) of (\d+) prompt tokens", out)]
    assert len(shares) == len(langchain_chat.QUESTIONS)
    assert all(cached > 0.6 * prompt for cached, prompt in shares[1:])
    if backend == "mock":
        assert (job.part, job.days) == ("wheel", 2)
