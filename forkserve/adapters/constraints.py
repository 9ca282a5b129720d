"""What a request forbids the model to write: tool choice and response format as grammars."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from forkserve.api import Engine
from forkserve.engine.constraints import GrammarConstraint
from forkserve.errors import ConfigError

__all__ = ["SchemaConstraint", "constraint_for"]

_KEPT = 32  # grammars of an engine
_built: WeakKeyDictionary[Engine, OrderedDict[str, SchemaConstraint]] = WeakKeyDictionary()
_lock = threading.Lock()


class SchemaConstraint(GrammarConstraint):
    """A grammar that remembers the schema it was made from."""

    schema: Mapping[str, Any]


def constraint_for(
    engine: Engine,
    tools: Sequence[Mapping[str, Any]],
    choice: Any,
    response_format: Mapping[str, Any] | None,
) -> SchemaConstraint | None:
    """The grammar of a reply, or None when it is free.

    Raises MissingExtra without the `engine` extra, ConfigError for a schema that it refuses.
    """
    schema: Mapping[str, Any] | None = None
    if isinstance(choice, Mapping):
        name = choice["function"]["name"]
        schema = _calls([tool for tool in tools if tool["function"]["name"] == name])
    elif choice == "required":
        schema = _calls(tools)
    elif response_format is not None:
        kind = response_format.get("type")
        if kind == "json_schema":
            schema = _asked(response_format)
        elif kind == "json_object":
            schema = {"type": "object"}
        elif kind != "text":
            raise ConfigError(f"response_format {kind!r}: use json_schema, json_object or text")
    return _build(engine, _closed(schema)) if schema is not None else None


def _asked(response_format: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a ``response_format``, as OpenAI spells it."""
    inner = response_format.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, Mapping):
        raise ConfigError(
            "response_format holds no schema: give "
            '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'
        )
    return schema


def _closed(schema: Any) -> Any:
    """The schema without undeclared properties, in which small models lose themselves."""
    if not isinstance(schema, Mapping):
        return schema
    out = dict(schema)
    for key in ("properties", "$defs", "definitions"):
        if isinstance(out.get(key), Mapping):
            out[key] = {name: _closed(one) for name, one in out[key].items()}
    for key in ("anyOf", "oneOf", "prefixItems"):
        if isinstance(out.get(key), list):
            out[key] = [_closed(one) for one in out[key]]
    if "items" in out:
        out["items"] = _closed(out["items"])
    if "properties" in out and "allOf" not in out:
        out.setdefault("additionalProperties", False)
    return out


def _calls(tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The schema of a call of one of the tools."""
    definitions: dict[str, Any] = {}
    forms = []
    for tool in tools:
        function = tool["function"]
        parameters = dict(function.get("parameters") or {"type": "object", "properties": {}})
        definitions.update(parameters.pop("$defs", {}))
        forms.append(
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, "arguments": parameters},
                "required": ["name", "arguments"],
            }
        )
    schema: dict[str, Any] = forms[0] if len(forms) == 1 else {"anyOf": forms}
    return {**schema, "$defs": definitions} if definitions else schema


def _build(engine: Engine, schema: Mapping[str, Any]) -> SchemaConstraint:
    try:
        key = json.dumps(schema, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the JSON schema is refused: {error}") from error
    with _lock:
        kept = _built.setdefault(engine, OrderedDict())
        constraint = kept.pop(key, None)
        if constraint is None:
            info = engine.backend.info
            constraint = SchemaConstraint.from_json_schema(
                engine.backend.tokenizer,
                schema,
                vocab_size=info.vocab_size,
                eos_ids=info.eos_ids,
            )
            constraint.schema = schema
        kept[key] = constraint
        while len(kept) > _KEPT:
            kept.popitem(last=False)
        return constraint
