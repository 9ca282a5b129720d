"""Adding what the adapter remembers to what a node returns, whatever its form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from langgraph.func import entrypoint
from langgraph.types import Command

from forkserve.adapters.langgraph.state import PRIVATE

__all__ = ["merge_output", "save_tip"]


def merge_output(out: Any, extra: Mapping[str, Any]) -> Any:
    """`out` with `extra`, which wins: a node that hands back its whole state writes old refs."""
    if not extra:
        return out
    if out is None:
        return dict(extra)
    if isinstance(out, Mapping):
        return {**out, **extra}
    if isinstance(out, Command):
        return replace(out, update={**_update(out), **extra})
    if isinstance(out, (list, tuple)):  # of commands and updates
        public = [
            replace(item, update=_update(item)) if isinstance(item, Command) else _public(item)
            for item in out
        ]
        return [*public, Command(update=dict(extra))]
    return {**_update(Command(update=out)), **extra}  # a model or a dataclass


def save_tip(out: Any, tip: Any) -> Any:
    """What an entrypoint returned, with ``fork_tip`` in the mapping that it saves for next time."""
    if not isinstance(out, entrypoint.final) or not isinstance(out.save, Mapping):
        return out
    return replace(out, save={"fork_tip": tip, **out.save})


def _update(command: Command[Any]) -> dict[str, Any]:
    """A command's update as a mapping, without the adapter's keys."""
    public: dict[str, Any] = _public(dict(command._update_as_tuples()))
    return public


def _public(update: Any) -> Any:
    if not isinstance(update, Mapping):
        return update
    return {key: value for key, value in update.items() if not key.startswith(PRIVATE)}
