"""Errors of the engine as the SDK expects them, and addresses that are wrong."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.adapters.openhands.conftest import REASON, SDK

if not SDK:
    pytest.skip(REASON, allow_module_level=True)

import litellm
from openhands.sdk import LLM
from openhands.sdk.llm import Message, TextContent
from openhands.sdk.llm.exceptions import (
    LLMBadRequestError,
    LLMContextWindowExceedError,
    LLMRateLimitError,
    LLMServiceUnavailableError,
    LLMTimeoutError,
)

from forkserve import Engine, ForkServeConfig
from forkserve.adapters.openhands import OpenHandsAdapter
from forkserve.adapters.openhands.provider import PROVIDER
from forkserve.engine import MockBackend
from forkserve.errors import AdmissionRefused, ConfigError, OutOfPages
from tests.adapters.openhands.rigs import Rig

HI = [Message(role="user", content=[TextContent(text="Hi. " * 40)])]


def llm(rig: Rig, **options: Any) -> LLM:
    return rig.adapter.llm(num_retries=0, **options)


def test_a_prompt_that_is_too_long(tmp_path: Any) -> None:
    rig = Rig(tmp_path, max_context=100)
    with pytest.raises(LLMContextWindowExceedError, match="longer than the model's context of 100"):
        rig.adapter.llm(num_retries=0, max_input_tokens=10**6).completion(HI)
    rig.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OutOfPages(3, 0, 8), LLMServiceUnavailableError),
        (AdmissionRefused("queue_full", "the queue is full"), LLMRateLimitError),
        (TimeoutError("slow"), LLMTimeoutError),
        (ConfigError("wrong"), LLMBadRequestError),
        (None, LLMServiceUnavailableError),
    ],
)
def test_kinds_of_errors(rig: Rig, error: Any, kind: Any, stream: bool) -> None:
    if error is None:
        rig.backend.fail_next()
    else:

        def fail(*_: Any) -> Any:
            raise error

        rig.adapter.bridge.forest._take = fail  # type: ignore[method-assign]
    if stream and kind is LLMRateLimitError:
        kind = LLMServiceUnavailableError  # litellm makes it one; it is tried again all the same
    with pytest.raises(kind):
        llm(rig, stream=stream).completion(HI, on_token=(lambda _: None) if stream else None)


async def test_kinds_of_errors_in_a_coroutine(rig: Rig) -> None:
    rig.backend.fail_next()
    with pytest.raises(LLMServiceUnavailableError):
        await llm(rig).acompletion(HI)


def test_an_error_that_passes_is_tried_again(rig: Rig) -> None:
    """A retry sends the same prompt: it goes on where the first attempt stopped."""
    taken = rig.adapter.bridge.forest._take
    left = [OutOfPages(3, 0, 8)]

    def once(*given: Any) -> Any:
        if left:
            raise left.pop()
        return taken(*given)

    rig.adapter.bridge.forest._take = once  # type: ignore[method-assign]
    rig.backend.script("Hello.")
    patient = rig.adapter.llm(num_retries=2, retry_min_wait=0, retry_max_wait=0)
    assert patient.completion(HI).message.content[0].text == "Hello."


def test_time_is_limited(rig: Rig) -> None:
    rig.backend.script("so " * 2000)
    with pytest.raises(LLMTimeoutError, match=r"timeout=0\.01"):
        llm(rig).completion(HI, timeout=0.01)
    assert rig.engine.stats().decode_steps < 6000
    assert len(rig.adapter.bridge.forest) == 0


def test_a_name_is_given_once(rig: Rig) -> None:
    with pytest.raises(ConfigError, match="'forkserve/mock' is there already"):
        OpenHandsAdapter(rig.engine)
    with OpenHandsAdapter(rig.engine, name="second") as other:
        assert other.model == "forkserve/second"
        rig.backend.script("Hello.")
        assert other.llm().completion(HI).message.content[0].text == "Hello."
    assert "forkserve/second" not in litellm.model_cost


def test_an_engine_that_is_not_there(rig: Rig) -> None:
    stray = LLM(model=f"{PROVIDER}/elsewhere", api_key="none", num_retries=0, usage_id="x")
    with pytest.raises(litellm.NotFoundError, match=r"is called 'elsewhere' \(there: mock\)"):
        stray.completion(HI)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"litellm_extra_body": {"forkserve": {"sesion": "a"}}}, "it takes conversation, parent"),
        ({"litellm_extra_body": {"forkserve": "a"}}, "it takes conversation, parent"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_bad_requests(rig: Rig, options: dict[str, Any], words: str) -> None:
    try:
        model = llm(rig, **options)
    except ValueError:
        return  # the SDK refused it by itself
    with pytest.raises(LLMBadRequestError, match=words):
        model.completion(HI)


def test_bad_settings() -> None:
    engine = Engine(MockBackend(ForkServeConfig()))
    for wrong in ({"p_error": 2.0}, {"keep": 0}, {"max_tokens": 0}):
        with pytest.raises(ConfigError):
            OpenHandsAdapter(engine, **wrong)  # type: ignore[arg-type]
    engine.shutdown()


def test_the_reply_is_as_long_as_was_asked_for(rig: Rig) -> None:
    rig.backend.script("so " * 2000)
    short = llm(rig, max_output_tokens=7).completion(HI)
    assert short.raw_response.choices[0].finish_reason == "length"
    assert short.raw_response.usage.completion_tokens == 7


def test_a_conversation_without_a_thread_beside_it(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is speculated on then; it says so, and the conversation goes on."""
    start = threading.Thread.start

    def limited(self: threading.Thread) -> None:
        if self.name == "forkserve-openhands":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    rig = Rig(tmp_path)
    assert llm(rig).completion(HI)
    assert rig.adapter._worker.run(lambda: pytest.fail("it has no thread")).result() is None
    rig.adapter._worker.settle()
    assert "no thread for 'forkserve-openhands'" in caplog.text
    rig.close()
