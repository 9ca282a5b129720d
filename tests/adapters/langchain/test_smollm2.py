"""The chat model on real weights: LangChain's suite, as far as 135M parameters go."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import pytest

pytest.importorskip("langchain_tests")

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_tests.integration_tests import ChatModelIntegrationTests
from pydantic import BaseModel

from forkserve import Engine, ForkServeConfig
from forkserve.adapters.langchain import ChatForkServe

pytestmark = [pytest.mark.model, pytest.mark.xdist_group("smollm2")]


@cache
def smollm2() -> Engine:
    from forkserve.engine.local import LocalBackend

    return Engine(LocalBackend(ForkServeConfig(capacity_pages=2048)))


@pytest.fixture
def model() -> ChatForkServe:
    return ChatForkServe(engine=smollm2(), model="smollm2", max_tokens=48)


class Verdict(BaseModel):
    """Whether the claim is true."""

    verdict: Literal["true", "false"]
    certain: bool


@tool
def multiply(a: Literal[2, 3, 4], b: Literal[5, 6, 7]) -> int:
    """Multiply two numbers."""
    return a * b


def test_a_reply_in_words_and_in_pieces(model: ChatForkServe) -> None:
    question = [SystemMessage("Answer in one word."), HumanMessage("The capital of France?")]
    said = model.invoke(question)
    assert "Paris" in said.text
    assert said.usage_metadata is not None
    assert "".join(chunk.text for chunk in model.stream(question)) == said.text


def test_the_second_turn_computes_what_is_new(model: ChatForkServe) -> None:
    history: list[Any] = [SystemMessage("You are brief. " * 20), HumanMessage("Say hello.")]
    first = model.invoke(history)
    second = model.invoke([*history, first, HumanMessage("Again.")])
    usage = second.usage_metadata
    assert usage is not None
    assert usage["input_tokens"] - usage["input_token_details"]["cache_read"] < 20


def test_a_grammar_keeps_the_model_to_a_schema(model: ChatForkServe) -> None:
    for method in ("json_schema", "function_calling"):
        chain = model.with_structured_output(Verdict, method=method)  # type: ignore[arg-type]
        assert isinstance(chain.invoke("The sea is dry."), Verdict)


def test_a_forced_call_is_a_call(model: ChatForkServe) -> None:
    bound = model.bind_tools([multiply], tool_choice="any")
    (call,) = bound.invoke("What is 3 times 6?").tool_calls
    assert call["name"] == "multiply"
    assert call["args"]["a"] * call["args"]["b"] == multiply.invoke(call["args"])


def beyond(why: str) -> pytest.MarkDecorator:
    """The model is greedy, so what it cannot do it never does."""
    return pytest.mark.xfail(reason=why, strict=True)


CALLS = beyond("135M parameters do not decide to call a tool")
LONG = beyond("135M parameters do not end a string within 64 tokens")
# The suite wants the mark at the whole test; the other two forms pass.
PYDANTIC_LONG = pytest.mark.xfail(reason=f"{LONG.kwargs['reason']} (pydantic)", strict=False)
FORMS = pytest.mark.parametrize("schema_type", ["pydantic", "typeddict", "json_schema"])


@pytest.mark.long
class TestIntegration(ChatModelIntegrationTests):
    """The rest of the suite passes; on the mock all of it does."""

    @property
    def chat_model_class(self) -> type[ChatForkServe]:
        return ChatForkServe

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "smollm2", "engine": smollm2(), "max_tokens": 64}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "another"

    @CALLS
    def test_tool_calling(self, model: Any) -> None:
        super().test_tool_calling(model)

    @CALLS
    async def test_tool_calling_async(self, model: Any) -> None:
        await super().test_tool_calling_async(model)

    @CALLS
    def test_bind_runnables_as_tools(self, model: Any) -> None:
        super().test_bind_runnables_as_tools(model)

    @CALLS
    def test_agent_loop(self, model: Any) -> None:
        super().test_agent_loop(model)

    @PYDANTIC_LONG
    @FORMS
    def test_structured_output(self, model: Any, schema_type: Any) -> None:
        super().test_structured_output(model, schema_type)

    @PYDANTIC_LONG
    @FORMS
    async def test_structured_output_async(self, model: Any, schema_type: Any) -> None:
        await super().test_structured_output_async(model, schema_type)

    @LONG
    def test_structured_output_pydantic_2_v1(self, model: Any) -> None:
        super().test_structured_output_pydantic_2_v1(model)

    @LONG
    def test_json_mode(self, model: Any) -> None:
        super().test_json_mode(model)
