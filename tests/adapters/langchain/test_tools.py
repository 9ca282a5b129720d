"""Tools, tool choice, speculation on results, structured output."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from pydantic import BaseModel

from forkserve.adapters.constraints import constraint_for
from forkserve.adapters.langchain import ChatForkServe
from forkserve.errors import ConfigError, MissingExtra

from .rules import SYSTEM, RuleEngine, cached, tide, weather

# ------------------------------------------------------------------ tools and structure


def test_tool_choice(model: ChatForkServe) -> None:
    pytest.importorskip("llguidance")
    free = model.bind_tools([weather, tide]).invoke("no tool please")
    assert not free.tool_calls
    for choice in ("any", "required", True):
        forced = model.bind_tools([weather, tide], tool_choice=choice).invoke("no tool please")
        assert forced.tool_calls[0]["name"] == "weather"
        assert forced.content == ""
    named = model.bind_tools([weather, tide], tool_choice="tide").invoke("no tool please")
    assert [call["name"] for call in named.tool_calls] == ["tide"]
    none = model.bind_tools([weather], tool_choice="none").invoke("San Francisco")
    assert not none.tool_calls
    with pytest.raises(ValueError, match="not one of the tools"):
        model.bind_tools([weather], tool_choice="moon")


def test_the_result_of_a_tool_goes_on_with_the_conversation(
    model: ChatForkServe, engine: RuleEngine
) -> None:
    bound = model.bind_tools([weather])
    history: list[Any] = [SYSTEM, HumanMessage("How is it in San Francisco?")]
    reply = bound.invoke(history)
    call = reply.tool_calls[0]
    history += [reply, ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])]
    final = bound.invoke(history)
    assert final.content == "Hello from the engine. "
    assert final.usage_metadata is not None
    assert cached(final) > 0.8 * final.usage_metadata["input_tokens"]
    assert len(engine.sessions()) == 1


def test_the_known_part_of_the_next_prompt_is_speculated(
    model: ChatForkServe, engine: RuleEngine
) -> None:
    """While the tool runs: the turn as the template writes it, and the head of the result."""
    bound, schemas = model.bind_tools([weather]), model.bind_tools([weather]).kwargs["tools"]
    history: list[Any] = [SYSTEM, HumanMessage("How is it in San Francisco?")]
    reply = bound.invoke(history)
    assert model.speculate_results(history, reply, schemas, t_idle_ms=1e6) > 20
    while engine.drain_slack():
        pass
    before = engine.stats().prefilled_tokens.committed
    result = ToolMessage("sunny", tool_call_id=reply.tool_calls[0]["id"])
    final = bound.invoke([*history, reply, result])
    said = len("Hello from the engine. ") + 1
    # left: the result, its end, and the header of the next turn
    rest = len("sunny") + len("X\nXassistant\n")
    assert engine.stats().prefilled_tokens.committed - before <= rest + said
    assert engine.stats().prefilled_tokens.wasted == 0
    assert final.content == "Hello from the engine. "


def test_speculating_for_nobody_does_nothing(model: ChatForkServe) -> None:
    assert model.speculate_results([SYSTEM], AIMessage("no call")) == 0
    call = {"name": "weather", "args": {}, "id": "1", "type": "tool_call"}
    assert model.speculate_results([SYSTEM], AIMessage("", tool_calls=[call])) == 0


class Joke(BaseModel):
    """A joke."""

    setup: str
    stars: int


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
@pytest.mark.parametrize("raw", [False, True])
def test_structured_output(model: ChatForkServe, method: Any, raw: bool) -> None:
    pytest.importorskip("llguidance")
    for schema in (Joke, Joke.model_json_schema()):
        chain = model.with_structured_output(schema, method=method, include_raw=raw)
        if method == "json_mode" and schema is Joke:
            continue  # any object may come; the suite tests the rest
        got = chain.invoke("A joke with 3 stars")
        if raw:
            assert isinstance(got["raw"], AIMessage)
            assert got["parsing_error"] is None
            got = got["parsed"]
        if method == "json_mode":
            assert got == {"setup": "why", "punchline": "because"}
        elif schema is Joke:
            assert got == Joke(setup="text", stars=3)
        else:
            assert got == {"setup": "text", "stars": 3}


def test_a_reply_that_does_not_parse_is_shown_raw(model: ChatForkServe) -> None:
    pytest.importorskip("llguidance")
    chain = model.with_structured_output(Joke, method="json_mode", include_raw=True)
    got = chain.invoke("any object")
    assert got["parsed"] is None
    assert "stars" in str(got["parsing_error"])


def test_a_grammar_admits_no_undeclared_property(engine: RuleEngine) -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {
            "properties": {"type": "array", "items": {"properties": {"a": {"type": "null"}}}},
            "open": {"properties": {}, "additionalProperties": True},
        },
        "$defs": {"x": {"properties": {}}},
    }
    wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
    constraint = constraint_for(engine, [], None, wanted)
    assert constraint is not None
    got = constraint.schema
    assert got["additionalProperties"] is False
    assert got["properties"]["properties"]["items"]["additionalProperties"] is False
    assert got["properties"]["open"]["additionalProperties"] is True
    assert "additionalProperties" not in got["properties"]  # these are names, not a schema
    assert constraint_for(engine, [], None, wanted) is constraint  # kept


def test_structured_output_refuses_what_it_cannot_do(model: ChatForkServe) -> None:
    with pytest.raises(ValueError, match="unknown method"):
        model.with_structured_output(Joke, method="yaml")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs a schema"):
        model.with_structured_output()
    with pytest.raises(ConfigError, match="response_format"):
        model.invoke("x", response_format={"type": "yaml"})


def test_a_grammar_without_its_library_names_the_extra(
    model: ChatForkServe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(MissingExtra, match=r"pip install .*\[engine\]"):
        model.with_structured_output({"title": "x", "type": "object"}).invoke("x")
