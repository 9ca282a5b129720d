"""A rig for conversations of the real SDK on the mock engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from openhands.sdk import Agent, Conversation, Tool
from openhands.sdk.conversation import LocalConversation
from openhands.sdk.event import ActionEvent, Event, MessageEvent
from openhands.sdk.tool import Action, Observation, ToolDefinition, ToolExecutor, register_tool
from pydantic import Field

from forkserve import Engine, ForkServeConfig
from forkserve.adapters.openhands import OpenHandsAdapter
from forkserve.adapters.openhands.requests import Answer, ChatRequest, Delta
from forkserve.engine import MockBackend
from forkserve.tree.node import Node
from tests.waiting import wait_for

SYSTEM = "You keep a small shop. Look things up before you answer. " * 12
work: Callable[[str], Any] = str  # what the tool does


class LookupAction(Action):
    key: str = Field(description="what to look up")


class LookupObservation(Observation):
    pass


class _Lookup(ToolExecutor):
    def __call__(self, action: LookupAction, conversation: Any = None) -> LookupObservation:
        found = work(action.key)
        if isinstance(found, LookupObservation):
            return found
        return LookupObservation.from_text(str(found))


class LookupTool(ToolDefinition[LookupAction, LookupObservation]):
    @classmethod
    def create(cls, conv_state: Any = None, **params: Any) -> Sequence[LookupTool]:
        return [
            cls(
                description="Looks a thing up in the shop's book.",
                action_type=LookupAction,
                observation_type=LookupObservation,
                executor=_Lookup(),
            )
        ]


register_tool("LookupTool", LookupTool)


def call(key: str, name: str = "lookup", **more: Any) -> str:
    arguments = {"message": key} if name == "finish" else {"key": key}
    given = {"name": name, "arguments": {**arguments, **more}}
    return f"<tool_call>{json.dumps(given)}</tool_call>"


class Rig:
    def __init__(self, folder: Path, **config: Any) -> None:
        self.folder = folder
        settings = {"capacity_pages": 4096, **config}  # fields of ForkServeConfig
        self.backend = MockBackend(ForkServeConfig(**settings))
        self.engine = Engine(self.backend)
        self.adapter = OpenHandsAdapter(self.engine)
        self.requests: list[ChatRequest] = []
        self.conversations: list[LocalConversation] = []
        self._record()

    def _record(self) -> None:
        bridge = self.adapter.bridge
        sync, asynchronous = bridge.stream, bridge.astream

        def stream(request: ChatRequest) -> Generator[Delta | Answer, None, None]:
            self.requests.append(request)
            return sync(request)

        def astream(request: ChatRequest) -> Any:
            self.requests.append(request)
            return asynchronous(request)

        bridge.stream, bridge.astream = stream, astream  # type: ignore[method-assign]

    def agent(self, **options: Any) -> Agent:
        llm = options.pop("llm", None) or self.adapter.llm(num_retries=0)
        options.setdefault("tools", [Tool(name="LookupTool")])
        return Agent(llm=llm, system_prompt=SYSTEM, **options)

    def conversation(
        self, *replies: str, tool: Callable[[str], Any] | None = None, **options: Any
    ) -> LocalConversation:
        """A watched conversation; `replies` are what the model will say."""
        global work  # noqa: PLW0603
        work = tool or (lambda key: f"the {key} costs 4")
        self.backend.script(*replies)
        agent = options.pop("agent", None) or self.agent()
        options.setdefault("callbacks", [self.adapter.watch()])
        made = Conversation(
            agent,
            workspace=str(self.folder),
            visualizer=None,
            delete_on_close=False,
            stuck_detection=False,
            **options,
        )
        self.conversations.append(made)
        return made

    def ask(self, conversation: LocalConversation, text: str = "What does the lamp cost?") -> None:
        conversation.send_message(text)
        conversation.run()
        self.adapter.settle()
        self.engine.check()

    def close(self) -> None:
        for conversation in self.conversations:
            conversation.close()
        self.adapter.close()
        self.engine.check()
        assert len(self.adapter.bridge.forest) == 0
        stats = self.engine.stats()
        assert stats.sessions == 0
        assert stats.live_pages == stats.index_pages, "only the prefix index may hold pages"
        self.engine.shutdown()

    # ---------------------------------------------------------------- looking in

    def nodes(self, conversation: LocalConversation) -> list[Node]:
        family = self.adapter.bridge.forest.of(str(conversation.id))
        assert family is not None
        return list(family.tree)

    def spine(self, conversation: LocalConversation) -> list[Node]:
        family = self.adapter.bridge.forest.of(str(conversation.id))
        assert family is not None
        tip = family.last(str(conversation.id))
        assert tip is not None
        end = family.tree.get(tip.node)
        return [*reversed(list(end.ancestors())), end]

    def only_spine(self, *conversations: LocalConversation) -> None:
        """All nodes are on a spine of these, and the pool has not a page beside theirs."""
        self.adapter.settle()
        spine = {node.id for one in conversations for node in self.spine(one)}
        nodes = self.nodes(conversations[0])
        assert {node.id for node in nodes} == spine

        def held() -> set[int]:
            return {p for node in nodes for segment in node.segments for p in segment.pages}

        def nothing_else() -> bool:  # a loop of its own may be re-aligning rows
            with self.engine._core.lock:
                stats = self.engine.stats()
                return stats.live_pages - stats.index_pages == len(held())

        wait_for(nothing_else, "pages that no node holds")
        assert self.engine.stats().speculative_pages == 0
        assert len(held()) <= sum(-(-n.length // 16) for n in nodes if not n.children) + len(nodes)


def said(conversation: LocalConversation) -> list[Event]:
    """Events of the model's turns on the active branch."""
    return [
        event
        for event in conversation.state.active_branch()
        if isinstance(event, ActionEvent)
        or (isinstance(event, MessageEvent) and event.source == "agent")
    ]
