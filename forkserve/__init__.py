"""ForkServe: an agent step is a tree, and the program holds it in its hands.

Names load on first use, so that importing the package costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forkserve.api import Engine, SessionHandle
    from forkserve.config import ForkServeConfig
    from forkserve.control.commit import CommitResult
    from forkserve.control.generation import Generation
    from forkserve.control.join import JoinResult
    from forkserve.control.speculation import Speculation
    from forkserve.control.stats import EngineStats
    from forkserve.errors import ForkServeError
    from forkserve.prompt_text import PromptText, plain
    from forkserve.reply import Reply
    from forkserve.session import Branch, Session
    from forkserve.types import HitClass, JoinPolicy, NodeMode, SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "Branch": "forkserve.session",
    "CommitResult": "forkserve.control.commit",
    "Engine": "forkserve.api",
    "EngineStats": "forkserve.control.stats",
    "ForkServeConfig": "forkserve.config",
    "ForkServeError": "forkserve.errors",
    "Generation": "forkserve.control.generation",
    "HitClass": "forkserve.types",
    "JoinPolicy": "forkserve.types",
    "JoinResult": "forkserve.control.join",
    "NodeMode": "forkserve.types",
    "PromptText": "forkserve.prompt_text",
    "SamplingParams": "forkserve.types",
    "Reply": "forkserve.reply",
    "Session": "forkserve.session",
    "SessionHandle": "forkserve.api",
    "Speculation": "forkserve.control.speculation",
    "plain": "forkserve.prompt_text",
}

__all__ = [
    "Branch",
    "CommitResult",
    "Engine",
    "EngineStats",
    "ForkServeConfig",
    "ForkServeError",
    "Generation",
    "HitClass",
    "JoinPolicy",
    "JoinResult",
    "NodeMode",
    "PromptText",
    "Reply",
    "SamplingParams",
    "Session",
    "SessionHandle",
    "Speculation",
    "plain",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'forkserve' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value
