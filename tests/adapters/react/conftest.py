"""Engines that are found empty afterwards, and a loop that knows nothing of ForkServe."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from forkserve import Engine
from forkserve.adapters.events import Observation
from forkserve.adapters.running import Tasks, Threads
from tests.adapters.templates.chats import FAMILIES, SeamTokenizer, backend
from tests.waiting import at_rest, wait_for

Make = Callable[..., Engine]
PROMPTS = "prompts"


LIVE: list[Engine] = []  # of the present test
WAITING: list[object] = []  # runs that have nothing to do but to wait for a tool


@contextmanager
def _noted(run: object, wait: bool) -> Iterator[None]:
    if wait:
        WAITING.append(run)
    try:
        yield
    finally:
        if wait:
            WAITING.remove(run)


def _note_waits() -> None:
    """Have every run say in `WAITING` when it waits."""
    in_threads, in_tasks = Threads.next, Tasks.next

    def next_in_threads(self: Threads, *, wait: bool) -> Observation | None:
        with _noted(self, wait):
            return in_threads(self, wait=wait)

    async def next_in_tasks(self: Tasks, *, wait: bool) -> Observation | None:
        with _noted(self, wait):
            return await in_tasks(self, wait=wait)

    Threads.next = next_in_threads  # type: ignore[method-assign]
    Tasks.next = next_in_tasks  # type: ignore[method-assign]


_note_waits()


def rest_until_quiet(at_least_s: float = 0.3) -> None:
    """What a slow tool does: it outlasts the model's turn and what is speculated after it."""
    time.sleep(at_least_s)
    wait_for(_quiet, "the run never came to wait for its tool")


def _quiet() -> bool:
    if not any(eng.sessions() for eng in LIVE):
        return True  # the run was left
    return bool(WAITING) and not any(eng.stats().queued for eng in LIVE)


def spoken(calls: Mapping[str, Any] | list[tuple[str, Mapping[str, Any]]]) -> str:
    """Calls as Qwen's models write them."""
    pairs = list(calls.items()) if isinstance(calls, Mapping) else calls
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': n, 'arguments': a}, ensure_ascii=False)}\n</tool_call>"
        for n, a in pairs
    )


@pytest.fixture(params=[False, True], ids=["stepped", "background"])
def background(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def make(background: bool) -> Iterator[Make]:
    """Make an engine: family=, slow_ms= (a pass lasts that long), **config."""
    made: list[Engine] = []
    before = set(threading.enumerate())

    def build(*replies: str, family: str = "qwen", slow_ms: float = 0, **config: Any) -> Engine:
        def wait(_: object) -> None:
            time.sleep(slow_ms / 1e3)

        model = backend(family, replies=replies, on_batch=wait, background=background, **config)
        eng = Engine(model)
        prompts: list[list[int]] = []
        start = eng.start

        def spy(session: str, *args: Any, **options: Any) -> Any:
            prompts.append(eng.tokens(session))
            return start(session, *args, **options)

        eng.start = spy  # type: ignore[method-assign]
        setattr(eng, PROMPTS, prompts)
        made.append(eng)
        LIVE.append(eng)
        return eng

    yield build
    LIVE.clear()
    for eng in made:
        eng.check()
        assert eng.sessions() == []
        at_rest(eng)
        stats = eng.stats()
        assert (stats.live_pages, stats.queued, stats.nodes) == (0, 0, 0)
        eng.shutdown()
    wait_for(
        lambda: not any(t.name.startswith("tool-") for t in set(threading.enumerate()) - before),
        "a tool's thread is left",
    )


def prompts(eng: Engine) -> list[list[int]]:
    found: list[list[int]] = getattr(eng, PROMPTS)
    return found


# --- a loop without forks ------------------------------------------------------------------------

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


def plain_loop(
    family: str,
    replies: list[str],
    tools: Mapping[str, Callable[..., str]],
    schemas: list[dict[str, Any]],
    messages: list[dict[str, Any]],
    last: int,
) -> tuple[list[list[int]], list[int]]:
    """The prompts of an agent that renders each turn whole for an engine that knows nothing.

    Also the tokens that a cold engine says at the end, for itself.
    """
    tokenizer = SeamTokenizer(FAMILIES[family])
    seen, count = [], 0
    for reply in [*replies, None]:
        shown = schemas if family != "plain" else None
        prompt = tokenizer.encode(tokenizer.render(messages, tools=shown))
        seen.append(prompt)
        if reply is None:
            break
        calls = [json.loads(text) for text in _CALL.findall(reply)]
        content = _CALL.sub("", reply).strip() if calls else reply
        if family == "plain":
            messages.append({"role": "assistant", "content": reply})
        else:
            written = []
            for call in calls:
                count += 1
                written.append({"id": f"call{count:05d}", "type": "function", "function": call})
            messages.append({"role": "assistant", "content": content, "tool_calls": written})
        first = count - len(calls) + 1
        for number, call in enumerate(calls, first if family != "plain" else count + 1):
            try:
                text = tools[call["name"]](**call["arguments"])
            except Exception as error:
                text = f"Error: {type(error).__name__}: {error}"
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": f"call{number:05d}",
                    "name": call["name"],
                    "content": text,
                }
            )
        if family == "plain":
            count += len(calls)
    eng = Engine(backend(family))
    with eng.session(seen[-1]) as session:
        own = list(session.generate(last).tokens)
    eng.shutdown()
    return seen, own
