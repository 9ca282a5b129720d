"""Tools from functions, models, OpenAI schemas and MCP definitions."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from forkserve.adapters.react import ReactAgent
from forkserve.adapters.schema import complaints
from forkserve.adapters.tools import (
    BadArguments,
    Tool,
    ToolFailed,
    as_tool,
    as_tools,
    to_text,
)
from forkserve.errors import ConfigError

from .conftest import Make, spoken


class Size(Enum):
    SMALL = "small"
    LARGE = "large"


class Place(BaseModel):
    """Somewhere on a map."""

    name: str
    floor: int = 0


def book(
    place: Place,
    nights: Annotated[int, Field(ge=1, le=30)],
    size: Size = Size.SMALL,
    *,
    tags: list[str] | None = None,
    class_: Literal["a", "b"] = "a",
) -> str:
    """Book a room.

    Ask before you book.

    Args:
        nights: how many nights
        tags (list): what to note down
    """
    return f"{place.name} {nights} {size.value} {tags} {class_}"


def test_a_function_gives_its_schema() -> None:
    tool = Tool.of(book)
    assert (tool.name, tool.description) == ("book", "Book a room.")
    parameters = tool.schema["function"]["parameters"]
    assert parameters["required"] == ["place", "nights"]
    assert list(parameters["properties"]) == ["place", "nights", "size", "tags", "class_"]
    nights = parameters["properties"]["nights"]
    assert nights == {
        "type": "integer",
        "minimum": 1,
        "maximum": 30,
        "description": "how many nights",
    }
    assert parameters["properties"]["tags"]["description"] == "what to note down"


def test_arguments_are_checked_and_converted() -> None:
    tool = Tool.of(book)
    given = {"place": {"name": "Inn"}, "nights": "3", "size": "large", "tags": ["x"]}
    assert tool.call(tool.check(given)) == "Inn 3 large ['x'] a"
    with pytest.raises(BadArguments, match=r"nights: Input should be less.*'a' or 'b'"):
        tool.check({"place": {"name": "Inn"}, "nights": 31, "class_": "c"})
    with pytest.raises(BadArguments, match="room: Extra inputs"):
        tool.check({"place": {"name": "Inn"}, "nights": 3, "room": 1})


def test_all_kinds_of_callables() -> None:
    class Desk:
        def ask(self, what: str) -> str:
            """Ask at the desk."""
            return f"desk: {what}"

        def __call__(self, what: str) -> str:
            """Ring the bell."""
            return f"bell: {what}"

        @staticmethod
        async def later(what: str) -> str:
            return f"later: {what}"

    def positional(a: int, /, b: int, *, c: int = 3) -> int:
        return a * 100 + b * 10 + c

    part = functools.partial(positional, c=9)

    @functools.wraps(positional)
    def wrapped(*args: Any, **options: Any) -> int:
        return positional(*args, **options)

    for tool, given, want in (
        (Tool.of(Desk().ask), {"what": "x"}, "desk: x"),
        (Tool.of(Desk()), {"what": "x"}, "bell: x"),
        (Tool.of(positional), {"a": 1, "b": 2}, 123),
        (Tool.of(part, name="part"), {"a": 1, "b": 2}, 129),
        (Tool.of(wrapped), {"a": 1, "b": 2}, 123),
        (Tool.of(lambda x=1: x, name="anything"), {"x": [1]}, [1]),
    ):
        assert not tool.is_async
        assert tool.call(tool.check(given)) == want
    assert Tool.of(Desk()).name == "Desk"
    assert Tool.of(Desk.later).is_async
    with pytest.raises(ConfigError, match="name it"):
        Tool.of(lambda *args: args, name="star")
    with pytest.raises(ConfigError, match="1 to 64 letters"):
        Tool.of(lambda: 1)
    with pytest.raises(ConfigError, match="signature"):
        Tool.of(type("Odd", (), {"__call__": 3})(), name="odd")


class Search(BaseModel):
    """Search the archive."""

    words: str = Field(min_length=2)
    limit: int = 5

    def __call__(self) -> str:
        return f"{self.words}:{self.limit}"


def test_pydantic_models_are_tools() -> None:
    tool = as_tool(Search)
    assert (tool.name, tool.description) == ("Search", "Search the archive.")
    assert tool.parameters["required"] == ["words"]
    assert tool.call(tool.check({"words": "abc"})) == "abc:5"
    with pytest.raises(BadArguments, match="words"):
        tool.check({"words": "a"})

    def find(search: Search) -> str:
        """Find it."""
        return f"found {search.words}"

    tool = Tool.of(find)
    assert (tool.name, tool.description) == ("find", "Find it.")
    assert tool.parameters["required"] == ["words"]
    assert tool.call(tool.check({"words": "abc"})) == "found abc"
    with pytest.raises(ConfigError, match="not callable"):
        Tool.typed(Place)


OPENAI = {
    "type": "function",
    "function": {
        "name": "weigh",
        "description": "Weigh something.",
        "parameters": {
            "type": "object",
            "properties": {"what": {"type": "string"}, "unit": {"enum": ["g", "kg"]}},
            "required": ["what"],
            "additionalProperties": False,
        },
    },
}


def test_openai_definitions_are_tools() -> None:
    tool = as_tool((OPENAI, lambda what, unit="g": f"{what} in {unit}"))
    assert tool.schema == OPENAI
    assert tool.call(tool.check({"what": "salt", "unit": "kg"})) == "salt in kg"
    with pytest.raises(BadArguments) as caught:
        tool.check({"unit": "t", "size": 1})
    assert str(caught.value) == (
        "wrong arguments for tool 'weigh': what: is missing; unit: 't' is none of ['g', 'kg']; "
        "size: is not a parameter"
    )
    with pytest.raises(ConfigError, match="'function'"):
        Tool.openai({"type": "function"}, print)


@dataclass
class Block:
    text: str
    type: str = "text"


@dataclass
class Result:
    content: list[Any]
    isError: bool = False


@dataclass
class Definition:
    name: str
    description: str | None
    inputSchema: dict[str, Any]


def test_mcp_definitions_are_tools() -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    async def call_tool(name: str, arguments: dict[str, Any]) -> Any:
        calls.append((name, arguments))
        if arguments["n"] == 0:
            return Result([Block("division by zero")], isError=True)
        return {"content": [{"type": "text", "text": "one"}, {"type": "image", "data": "AA"}]}

    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    for definition in (
        {"name": "divide", "description": "Divide.", "inputSchema": schema},
        Definition("divide", None, schema),
    ):
        tool = as_tool((definition, call_tool))
        assert tool.is_async
        assert tool.parameters == schema
        text = asyncio.run(tool.call(tool.check({"n": 1})))
        assert text == 'one\n{"type": "image", "data": "AA"}'
        with pytest.raises(ToolFailed, match="division by zero"):
            asyncio.run(tool.call({"n": 0}))
        with pytest.raises(BadArguments, match="n: 'x' is not of type integer"):
            tool.check({"n": "x"})
    assert calls[0] == ("divide", {"n": 1})


def test_two_of_one_name() -> None:
    with pytest.raises(ConfigError, match="two tools"):
        as_tools([book, Tool.of(book)])


def test_options() -> None:
    tool = Tool.of(book).with_options(timeout_s=2.0, stable=True, name="reserve")
    assert (tool.name, tool.timeout_s, tool.stable) == ("reserve", 2.0, True)
    with pytest.raises(ConfigError, match="timeout_s"):
        tool.with_options(timeout_s=0)


def test_plain_text_is_the_one_parameter() -> None:
    assert as_tool(Search).from_text("abc") == {"words": "abc"}
    assert Tool.of(lambda: 1, name="now").from_text("") == {}
    with pytest.raises(BadArguments, match="JSON object with place, nights"):
        Tool.of(book).from_text("Inn")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x", "x"),
        (b"\xc3\xa9", "é"),
        (None, "null"),
        (3, "3"),
        ({"a": [1, "é"]}, '{"a": [1, "é"]}'),
        (Place(name="x"), '{"name": "x", "floor": 0}'),
        ([Size.SMALL, (1, 2)], '["small", [1, 2]]'),
        (object, "\"<class 'object'>\""),
    ],
)
def test_results_as_text(value: object, text: str) -> None:
    assert to_text(value) == text


@pytest.mark.parametrize(
    ("schema", "value", "faults"),
    [
        (
            {"type": "array", "items": {"type": "string"}},
            ["a", 1],
            ["arguments[1]: 1 is not of type string"],
        ),
        ({"type": ["string", "null"]}, None, []),
        ({"type": "integer"}, True, ["arguments: True is not of type integer"]),
        ({"type": "integer"}, 2.0, []),
        ({"type": "number", "minimum": 1, "maximum": 2}, 3, ["arguments: 3 is more than 2"]),
        (
            {"type": "string", "maxLength": 1, "minLength": 1},
            "",
            ["arguments: is shorter than 1 characters"],
        ),
        (
            {"anyOf": [{"type": "string"}, {"type": "null"}]},
            1,
            ["arguments: 1 is not of type string"],
        ),
        ({"const": 1}, 2, ["arguments: 2 is not 1"]),
        (
            {"$defs": {"p": {"required": ["x"]}}, "properties": {"a": {"$ref": "#/$defs/p"}}},
            {"a": {}},
            ["a.x: is missing"],
        ),
        ({"$ref": "#/nowhere"}, 1, []),
        ({"type": "strange"}, 1, []),
        (True, 1, []),
    ],
)
def test_what_a_schema_says(schema: Any, value: Any, faults: list[str]) -> None:
    assert complaints(schema, value) == faults


@pytest.mark.parametrize("how", ["sync", "async"])
def test_every_kind_in_one_run(make: Make, how: str) -> None:
    async def call_tool(name: str, arguments: dict[str, Any]) -> Any:
        await asyncio.sleep(0)
        return Result([Block(f"{name} {arguments}")])

    async def later(n: int) -> int:
        """Later."""
        await asyncio.sleep(0.01)
        return n

    def awaits(n: int) -> Any:
        return later(n)

    mcp = ({"name": "remote", "inputSchema": {"type": "object"}}, call_tool)
    weigh = (OPENAI, lambda what: f"{what}: 3 g")
    calls = [
        ("book", {"place": {"name": "Inn"}, "nights": 2}),
        ("Search", {"words": "abc"}),
        ("weigh", {"what": "salt"}),
        ("remote", {"a": 1}),
        ("later", {"n": 4}),
        ("awaits", {"n": 5}),
    ]
    tools = [book, Search, weigh, mcp, later]
    if how == "sync":
        tools.append(awaits)
    else:
        tools.append(Tool.of(awaits, is_async=True))
    agent = ReactAgent(make(spoken(calls), "Done."), tools, max_tokens=2_000)
    result = agent.run("Go.") if how == "sync" else asyncio.run(agent.arun("Go."))
    assert [o.text for o in result.turns[0].observations] == [
        "Inn 2 small None a",
        "abc:5",
        "salt: 3 g",
        "remote {'a': 1}",
        "4",
        "5",
    ]
    assert result.turns[0].observations[4].value == 4
