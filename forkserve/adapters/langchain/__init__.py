"""A LangChain chat model on an engine in this process.

::

    model = ChatForkServe(engine=engine, model="smollm2")
    model.invoke("Hello")

docs/adapters/langchain.md lists what it supports.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from forkserve.errors import MissingExtra

if find_spec("langchain_core") is None:
    raise MissingExtra("the LangChain chat model", "langchain", "langchain_core")

if TYPE_CHECKING:
    from forkserve.adapters.langchain.chat import ChatForkServe

__all__ = ["ChatForkServe"]


def __getattr__(name: str) -> Any:
    if name != "ChatForkServe":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = import_module(f"{__name__}.chat").ChatForkServe
    globals()[name] = value
    return value
