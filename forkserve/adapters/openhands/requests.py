"""What a client of the bridge asks for, and what it gets.  No framework is loaded here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from forkserve.adapters.guessing import Guesser
from forkserve.adapters.openhands.trees import Family, Tip
from forkserve.adapters.sampling import sampling_fields
from forkserve.adapters.templates import Message
from forkserve.errors import ConfigError, SessionError

__all__ = ["ADDRESS", "Answer", "ChatRequest", "Delta", "Turn"]

ADDRESS = "forkserve"  # key of ``extra_body`` that says where a request belongs
_FIELDS = {"conversation", "parent", "side"}
_KEPT = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")


@dataclass(frozen=True)
class ChatRequest:
    """One call of the model, with the whole history.

    conversation: whose history it is; empty for nobody's.  parent: the conversation that it was
    forked from.  side: answer it on a branch, and forget it.
    max_tokens: None for what the bridge allows.  timeout: s for the whole reply.  id: of the reply.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    conversation: str = ""
    parent: str = ""
    side: bool = False
    tool_choice: Any = None
    response_format: Mapping[str, Any] | None = None
    max_tokens: int | None = None
    timeout: float | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid4().hex}")

    @classmethod
    def read(
        cls,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        *,
        session: str = "",
        timeout: float | None = None,
    ) -> ChatRequest:
        """From the fields of an OpenAI chat completion; those of no meaning here are ignored.

        session: id of the conversation by the transport.  Raises ConfigError for a bad address, or
        for several choices (fork the conversation instead).
        """
        if options.get("n") not in (None, 1):
            raise ConfigError(f"n={options['n']}: one reply a call; fork to get several")
        address = (options.get("extra_body") or {}).get(ADDRESS) or {}
        if not isinstance(address, Mapping) or set(address) - _FIELDS:
            raise ConfigError(
                f"extra_body['{ADDRESS}'] is {address!r}; it takes {', '.join(sorted(_FIELDS))}"
            )
        named = address.get("conversation") or session or options.get("prompt_cache_key") or ""
        stop = options.get("stop") or ()
        asked = {**(options.get("extra_body") or {}), **options}
        unsaid = {"logprobs": None, "top_logprobs": None}  # replies have no place for them
        sampling = sampling_fields({**asked, **unsaid})
        limit = options.get("max_completion_tokens") or options.get("max_tokens")
        return cls(
            messages=[{k: m[k] for k in _KEPT if m.get(k) is not None} for m in messages],
            tools=list(options.get("tools") or ()),
            conversation=str(named),
            parent=str(address.get("parent") or ""),
            side=bool(address.get("side", False)) or not named,
            tool_choice=options.get("tool_choice"),
            response_format=options.get("response_format"),
            max_tokens=limit,
            timeout=timeout,
            sampling={**sampling, "stop": (stop,) if isinstance(stop, str) else tuple(stop)},
        )

    @property
    def head(self) -> str:
        """Tools and system message, hashed: calls of one kind have it in common."""
        first = self.messages[0] if self.messages else {}
        system = first.get("content") if first.get("role") == "system" else None
        text = json.dumps([list(self.tools), system], sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def callables(self) -> tuple[str, ...]:
        """Names of the tools that the reply may call."""
        if self.tool_choice == "none":
            return ()
        return tuple(tool["function"]["name"] for tool in self.tools)


@dataclass(frozen=True)
class Delta:
    """What a reply goes on with: text, thoughts, or whole calls in OpenAI's form."""

    text: str = ""
    thought: str = ""
    calls: tuple[dict[str, Any], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.thought or self.calls)


@dataclass(frozen=True)
class Answer:
    """A whole reply.

    finish_reason: stop, length or tool_calls.  cached: tokens of the prompt that were there.
    """

    id: str
    text: str
    thought: str
    calls: tuple[dict[str, Any], ...]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached: int

    @property
    def usage(self) -> dict[str, Any]:
        """As OpenAI counts."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass(eq=False)
class Turn:
    """A reply, while its conversation has not gone on.

    serial: of the tip, to notice when it does.  decoded: tokens of prompt and reply.
    guesser: what was forked while its tools ran.
    """

    answer: Answer
    request: ChatRequest
    family: Family
    tip: Tip
    serial: int
    decoded: list[int]
    guesser: Guesser | None = None

    def drop(self) -> None:
        """Abort what was forked and not committed.  Idempotent."""
        guesser, self.guesser = self.guesser, None
        if guesser is not None:
            with self.family.lock, suppress(SessionError):
                guesser.drop()

    @property
    def stale(self) -> bool:
        """Whether another prompt was put in place since; ask with the family's lock held."""
        return self.tip.serial != self.serial or self.tip not in self.family.tips
