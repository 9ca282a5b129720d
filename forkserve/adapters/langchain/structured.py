"""Parsers for replies that match a schema."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any, Literal

from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.pydantic import is_basemodel_subclass

__all__ = ["Method", "parser_for", "response_format", "with_raw"]

Method = Literal["json_schema", "function_calling", "json_mode"]


def parser_for(schema: Any, method: Method, tool: Mapping[str, Any] | None) -> Runnable[Any, Any]:
    """From a reply to an object: a model for a model, else a dict."""
    model = isinstance(schema, type) and is_basemodel_subclass(schema)
    if method == "function_calling":
        assert tool is not None
        if model:
            return PydanticToolsParser(tools=[schema], first_tool_only=True)
        return JsonOutputKeyToolsParser(key_name=tool["function"]["name"], first_tool_only=True)
    return PydanticOutputParser(pydantic_object=schema) if model else JsonOutputParser()


def response_format(method: Method, tool: Mapping[str, Any] | None) -> dict[str, Any]:
    """The request's ``response_format``, as OpenAI spells it."""
    if method == "json_mode" or tool is None:
        return {"type": "json_object"}
    function = tool["function"]
    body = {"name": function["name"], "schema": function.get("parameters", {})}
    return {"type": "json_schema", "json_schema": body}


def with_raw(model: Runnable[Any, Any], parser: Runnable[Any, Any]) -> Runnable[Any, Any]:
    """Reply, object and parsing error beside each other."""
    good = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    bad = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=model) | good.with_fallbacks([bad], exception_key="parsing_error")
