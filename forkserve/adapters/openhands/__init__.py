"""OpenHands conversations on an engine in this process.

::

    adapter = OpenHandsAdapter(engine)
    llm = adapter.llm()
    agent = Agent(llm=llm, tools=tools, condenser=adapter.condenser(llm))
    conversation = Conversation(agent, workspace=folder, callbacks=[adapter.watch()])
    conversation.run()
    other = adapter.fork(conversation, from_event_id=event.id)

Needs Python 3.12 and the extra `openhands`; this module is importable without them, what it gives
raises MissingExtra.  docs/adapters/openhands.md says what each verb of the SDK does to the tree.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from forkserve.errors import MissingExtra

if TYPE_CHECKING:
    from forkserve.adapters.openhands.adapter import EventPlace, OpenHandsAdapter
    from forkserve.adapters.openhands.bridge import Stats
    from forkserve.adapters.openhands.condenser import TrunkCondenser
    from forkserve.adapters.openhands.watching import Watch

__all__ = ["EventPlace", "OpenHandsAdapter", "Stats", "TrunkCondenser", "Watch"]

_HOMES = {
    "EventPlace": "adapter",
    "OpenHandsAdapter": "adapter",
    "Stats": "bridge",
    "TrunkCondenser": "condenser",
    "Watch": "watching",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not _there():
        raise MissingExtra(
            "the OpenHands adapter (Python 3.12 or newer)", "openhands", "openhands.sdk"
        )
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def _there() -> bool:
    """Whether the SDK is installed; `openhands` alone may be another distribution's."""
    try:
        return find_spec("openhands.sdk") is not None
    except ModuleNotFoundError:
        return False
