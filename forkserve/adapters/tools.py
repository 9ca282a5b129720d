"""Tools from what people have: functions, pydantic models, OpenAI schemas, MCP definitions."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic_core import to_jsonable_python

from forkserve.adapters.schema import complaints
from forkserve.errors import AdapterError, ConfigError

__all__ = [
    "BadArguments",
    "Tool",
    "ToolError",
    "ToolFailed",
    "ToolTimeout",
    "UnknownTool",
    "as_tool",
    "as_tools",
    "failure_of",
    "to_text",
]

_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_PARAMETER = re.compile(r"^\s*:?(?:param )?\*{0,2}(\w+)(?: \([^)]*\))?:\s+(.+)$")


class ToolError(AdapterError):
    """A call of a tool gave no result.  The agent binds its text as the observation."""


class UnknownTool(ToolError):
    """The model called a tool that does not exist."""


class BadArguments(ToolError):
    """The arguments do not fit the tool's parameters."""


class ToolTimeout(ToolError):
    """The tool took longer than it may."""


class ToolFailed(ToolError):
    """The tool raised; its exception is the cause."""


@dataclass(frozen=True)
class Tool:
    """A tool as the model sees it, and the callable behind it.

    parameters: JSON schema of the arguments.  call: takes a dict of arguments, checked by `check`;
    returns the result or an awaitable.  timeout_s, idle_ms: longest and expected time of a call.
    stable: its output has a fixed shape (JSON, XML, a diff), so that its beginning can be guessed.
    public: its arguments hold no secret and may be speculated on.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    call: Callable[[dict[str, Any]], Any] = field(repr=False)
    check: Callable[[dict[str, Any]], dict[str, Any]] = field(repr=False)
    is_async: bool = False
    timeout_s: float | None = None
    idle_ms: float | None = None
    stable: bool = False
    public: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"tool name {self.name!r}: 1 to 64 letters, digits, '_', '-' or '.'")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ConfigError(f"timeout_s={self.timeout_s} of tool '{self.name}' must be > 0")

    @property
    def schema(self) -> dict[str, Any]:
        """As OpenAI describes tools, which is what chat templates expect."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}

    def with_options(self, **options: Any) -> Tool:
        """A copy with other options (timeout_s, idle_ms, stable, public, name, description)."""
        return replace(self, **options)

    def from_text(self, text: str) -> dict[str, Any]:
        """Arguments from plain text: the one parameter that the tool needs.

        Raises BadArguments when that is not clear.
        """
        properties = self.parameters.get("properties", {})
        needed = self.parameters.get("required") or list(properties)
        if not text and not self.parameters.get("required"):
            return {}
        if len(needed) != 1:
            raise BadArguments(
                f"tool '{self.name}' takes a JSON object with {', '.join(properties) or 'no keys'}"
            )
        return {needed[0]: text}

    @classmethod
    def of(cls, function: Callable[..., Any], **options: Any) -> Tool:
        """From a function: its name, signature and docstring.

        Parameters may have any type that pydantic knows.  If the only parameter is a pydantic
        model, the model's fields are the arguments.
        """
        name = options.pop("name", None) or getattr(function, "__name__", type(function).__name__)
        signature, hints = _signature(function)
        text, notes = _document(function)
        only = next(iter(hints.values()), None) if len(signature.parameters) == 1 else None
        if isinstance(only, type) and issubclass(only, BaseModel):
            options.setdefault("description", text)
            (key,) = signature.parameters.values()
            named = key.kind is key.KEYWORD_ONLY
            options.setdefault("is_async", _is_async(function))
            take = (lambda value: function(**{key.name: value})) if named else function
            return cls.typed(only, take, name=name, **options)
        fields: dict[str, Any] = {}
        for number, parameter in enumerate(signature.parameters.values()):
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise ConfigError(f"tool '{name}': *{parameter.name} has no schema; name it")
            default = ... if parameter.default is parameter.empty else parameter.default
            note = Field(default, description=notes.get(parameter.name), alias=parameter.name)
            fields[f"p{number}"] = (hints.get(parameter.name, Any), note)
        model: type[BaseModel] = create_model(
            name, __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=True), **fields
        )
        names = list(signature.parameters)
        positional = {n for n, p in signature.parameters.items() if p.kind is p.POSITIONAL_ONLY}

        def check(arguments: dict[str, Any]) -> dict[str, Any]:
            value = _validate(model, name, arguments)
            return {n: getattr(value, f"p{i}") for i, n in enumerate(names)}

        def call(arguments: dict[str, Any]) -> Any:
            first = [arguments[n] for n in names if n in positional]
            return function(*first, **{n: v for n, v in arguments.items() if n not in positional})

        options.setdefault("is_async", _is_async(function))
        options.setdefault("description", text)
        return cls(name, parameters=_schema(model), call=call, check=check, **options)

    @classmethod
    def typed(
        cls, model: type[BaseModel], function: Callable[[Any], Any] | None = None, **options: Any
    ) -> Tool:
        """From a pydantic model of the arguments, and a function that takes an instance of it.

        Without a function the model's own ``__call__`` is the tool.
        """
        own = function if function is not None else inspect.getattr_static(model, "__call__", None)
        if own is None or own is inspect.getattr_static(type, "__call__"):
            raise ConfigError(f"{model.__name__} is not callable; give a function that takes it")
        name = options.pop("name", None) or model.__name__
        options.setdefault("description", inspect.cleandoc(model.__doc__ or ""))
        options.setdefault("is_async", _is_async(own))

        def check(arguments: dict[str, Any]) -> dict[str, Any]:
            return {"value": _validate(model, name, arguments)}

        def call(arguments: dict[str, Any]) -> Any:
            return own(arguments["value"])

        return cls(name, parameters=_schema(model), call=call, check=check, **options)

    @classmethod
    def openai(
        cls, definition: Mapping[str, Any], function: Callable[..., Any], **options: Any
    ) -> Tool:
        """From an OpenAI tool definition and a function that takes the arguments as keywords."""
        inner = definition.get("function", definition)
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            raise ConfigError("an OpenAI tool definition has a 'function' with a 'name'")
        options.setdefault("is_async", _is_async(function))
        return cls._declared(
            inner["name"],
            inner.get("description") or "",
            inner.get("parameters"),
            lambda arguments: function(**arguments),
            options,
        )

    @classmethod
    def mcp(
        cls,
        definition: Any,
        call: Callable[[str, dict[str, Any]], Awaitable[Any]],
        **options: Any,
    ) -> Tool:
        """From an MCP tool (a dict or an object with name, description, inputSchema).

        call: awaited with name and arguments, as ``ClientSession.call_tool`` is.  A result with
        ``isError`` is a failure; text blocks of its content are joined.
        """
        name = _field(definition, "name")
        if not isinstance(name, str):
            raise ConfigError("an MCP tool definition has a 'name'")

        async def run(arguments: dict[str, Any]) -> Any:
            result = await call(name, arguments)
            text = _mcp_text(result)
            if _field(result, "isError"):
                raise ToolFailed(text or f"tool '{name}' reported an error")
            return text

        options.setdefault("is_async", True)
        schema = _field(definition, "inputSchema")
        return cls._declared(name, _field(definition, "description") or "", schema, run, options)

    @classmethod
    def _declared(
        cls,
        name: str,
        description: str,
        schema: Mapping[str, Any] | None,
        call: Callable[[dict[str, Any]], Any],
        options: dict[str, Any],
    ) -> Tool:
        parameters = dict(schema or {"type": "object", "properties": {}})

        def check(arguments: dict[str, Any]) -> dict[str, Any]:
            faults = complaints(parameters, arguments)
            if faults:
                raise BadArguments(f"wrong arguments for tool '{name}': {'; '.join(faults)}")
            return arguments

        return cls(name, description, parameters, call, check, **options)


def as_tool(thing: Any) -> Tool:
    """A tool from a Tool, a function, a pydantic model, or a pair (definition, callable).

    A definition with ``inputSchema`` is read as MCP, any other as OpenAI.
    """
    if isinstance(thing, Tool):
        return thing
    if isinstance(thing, tuple) and len(thing) == 2:
        definition, call = thing
        if _field(definition, "inputSchema") is not None:
            return Tool.mcp(definition, call)
        if isinstance(definition, Mapping):
            return Tool.openai(definition, call)
    if isinstance(thing, type) and issubclass(thing, BaseModel):
        return Tool.typed(thing)
    if callable(thing):
        return Tool.of(thing)
    raise ConfigError(f"{thing!r} is no tool: give a function, a pydantic model or a Tool")


def as_tools(things: Any) -> dict[str, Tool]:
    """Tools by name; ConfigError for two of the same name."""
    tools: dict[str, Tool] = {}
    for tool in map(as_tool, things):
        if tool.name in tools:
            raise ConfigError(f"two tools are called '{tool.name}'")
        tools[tool.name] = tool
    return tools


def failure_of(failure: BaseException) -> ToolFailed:
    """What a tool raised, as the error that the model is told."""
    try:
        text = str(failure)
    except Exception:  # its own text fails too
        text = ""
    error = ToolFailed(f"{type(failure).__name__}: {text}" if text else type(failure).__name__)
    error.__cause__ = failure
    return error


def to_text(value: Any) -> str:
    """A tool's result as the model reads it: text as it is, everything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    plain = to_jsonable_python(value, fallback=str)
    return json.dumps(plain, ensure_ascii=False)


def _signature(function: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, Any]]:
    """Parameters of a function and their types, from strings as well."""
    try:
        signature = inspect.signature(function)
        target = function if inspect.isroutine(function) else type(function).__call__
        while hasattr(target, "__wrapped__"):
            target = target.__wrapped__
        hints = get_type_hints(target, include_extras=True)
    except (TypeError, ValueError, NameError) as error:
        raise ConfigError(f"cannot read the signature of {function!r}: {error}") from error
    return signature, {n: hints[n] for n in signature.parameters if n in hints}


def _document(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """First paragraph of a docstring, and what it says of each parameter ("name: text")."""
    text = inspect.getdoc(function) or ""
    notes = {m[1]: m[2].strip() for m in map(_PARAMETER.match, text.splitlines()) if m}
    return " ".join(text.split("\n\n", 1)[0].split()), notes


def _is_async(function: Callable[..., Any]) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004
    kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    return any(kind(function) or kind(call) for kind in kinds)


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    schema = TypeAdapter(model).json_schema()
    schema.pop("title", None)
    schema.pop("description", None)
    schema.pop("additionalProperties", None)
    for part in schema.get("properties", {}).values():
        part.pop("title", None)
    schema.setdefault("properties", {})
    return schema


def _validate(model: type[BaseModel], name: str, arguments: dict[str, Any]) -> BaseModel:
    try:
        return model.model_validate(arguments)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise BadArguments(f"wrong arguments for tool '{name}': {'; '.join(faults)}") from error


def _field(thing: Any, name: str) -> Any:
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)


def _mcp_text(result: Any) -> str:
    """Text of an MCP result; blocks of other kinds as JSON."""
    content = _field(result, "content")
    if content is None:
        return to_text(result)
    blocks = content if isinstance(content, list) else [content]
    return "\n".join(
        text if isinstance(text := _field(block, "text"), str) else to_text(block)
        for block in blocks
    )
