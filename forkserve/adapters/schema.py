"""The part of JSON Schema that tool parameters use: enough to tell a model what was wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["complaints"]

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def complaints(schema: Mapping[str, Any], value: Any, where: str = "") -> list[str]:
    """What is wrong with `value`, a line each; what the schema says beyond this is let through.

    Looked at: type, enum, const, required, properties, additionalProperties, items, anyOf and
    oneOf (any), minimum, maximum, minLength, maxLength, and $ref to #/$defs.
    """
    return _check(schema, value, where, schema)


def _check(schema: Any, value: Any, where: str, root: Mapping[str, Any]) -> list[str]:
    if not isinstance(schema, Mapping):
        return []
    if isinstance(ref := schema.get("$ref"), str):
        return _check(_resolve(ref, root), value, where, root)
    label = where or "arguments"
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices:
        tried = [_check(choice, value, where, root) for choice in choices]
        return [] if any(not t for t in tried) else min(tried, key=len)
    kinds = schema.get("type")
    names = [kinds] if isinstance(kinds, str) else list(kinds or ())
    if names and not any(_is(value, name) for name in names):
        return [f"{label}: {_show(value)} is not of type {' or '.join(names)}"]
    faults = []
    if "enum" in schema and value not in schema["enum"]:
        faults.append(f"{label}: {_show(value)} is none of {schema['enum']}")
    if "const" in schema and value != schema["const"]:
        faults.append(f"{label}: {_show(value)} is not {schema['const']!r}")
    faults += _limits(schema, value, label)
    if isinstance(value, dict):
        faults += _object(schema, value, where, root)
    if isinstance(value, list) and "items" in schema:
        for number, item in enumerate(value):
            faults += _check(schema["items"], item, f"{label}[{number}]", root)
    return faults


def _object(
    schema: Mapping[str, Any], value: dict[str, Any], where: str, root: Mapping[str, Any]
) -> list[str]:
    dot = f"{where}." if where else ""
    faults = [f"{dot}{key}: is missing" for key in schema.get("required", ()) if key not in value]
    known = schema.get("properties", {})
    for key, item in value.items():
        if key in known:
            faults += _check(known[key], item, dot + key, root)
        elif schema.get("additionalProperties") is False:
            faults.append(f"{dot}{key}: is not a parameter")
    return faults


def _limits(schema: Mapping[str, Any], value: Any, label: str) -> list[str]:
    faults = []
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if "minimum" in schema and value < schema["minimum"]:
            faults.append(f"{label}: {value} is less than {schema['minimum']}")
        if "maximum" in schema and value > schema["maximum"]:
            faults.append(f"{label}: {value} is more than {schema['maximum']}")
    if isinstance(value, str):
        if len(value) < schema.get("minLength", 0):
            faults.append(f"{label}: is shorter than {schema['minLength']} characters")
        if "maxLength" in schema and len(value) > schema["maxLength"]:
            faults.append(f"{label}: is longer than {schema['maxLength']} characters")
    return faults


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES.get(name, (object,)))


def _resolve(ref: str, root: Mapping[str, Any]) -> Any:
    part: Any = root
    for key in ref.removeprefix("#/").split("/"):
        part = part.get(key) if isinstance(part, Mapping) else None
    return part


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
