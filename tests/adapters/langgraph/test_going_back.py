"""Time travel over turns: a checkpoint says what had been told, and what a node had seen of it."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import HumanMessage

from .graphs import THREAD
from .test_turns import talk, user


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
@pytest.mark.parametrize("step", ["__start__", "n"])
def test_to_go_back_to_where_a_turn_began_is_to_be_told_again(
    make: Any, step: str, durability: Any
) -> None:
    """What was said then is in the state, and not in the trunk that ended before it.

    The checkpoint that was named is asked: what the run itself saves may come as late as its end.
    """
    seen: list[str] = []
    fs, graph = talk(make, seen)
    for text in ("FIRST", "SECOND", "THIRD"):
        graph.invoke(user(text), THREAD)
    first, second, third = seen
    history = [s for s in graph.get_state_history(THREAD) if s.next == (step,)]
    for old, told in zip(history, (third, second, first), strict=True):
        result = graph.invoke(None, old.config, durability=durability)
        assert seen[-1] == told
        assert fs.text(result["fork_tip"]) == told + result["messages"][-1].content
    assert fs.stats["opened"] == 1


def test_a_question_that_is_edited_where_it_was_asked_is_seen_so(make: Any) -> None:
    seen: list[str] = []
    _, graph = talk(make, seen)
    for text in ("FIRST", "SECOND"):
        graph.invoke(user(text), THREAD)
    old = next(s for s in graph.get_state_history(THREAD) if s.next == ("n",))
    asked = old.values["messages"][-1]
    config = graph.update_state(old.config, {"messages": [HumanMessage("ELSE", id=asked.id)]})
    graph.invoke(None, config)
    assert seen[-1] == "human: FIRST\nai: answer 1\nhuman: ELSE\nai: "
    graph.invoke(user("THIRD"), THREAD)
    assert seen[-1] == seen[-2] + "answer 3\nhuman: THIRD\nai: "


def test_to_go_back_while_a_turn_waits_is_to_go_where_the_checkpoint_says(make: Any) -> None:
    seen: list[str] = []
    _, graph = talk(make, seen, interrupt_before=["n"])
    for text in ("FIRST", "SECOND"):
        graph.invoke(user(text), THREAD)
        graph.invoke(None, THREAD)
    old = [s for s in graph.get_state_history(THREAD) if s.next == ("n",)]
    graph.invoke(user("THIRD"), THREAD)  # waits
    for state, told in zip(old, reversed(list(seen)), strict=True):
        graph.invoke(None, state.config)
        assert seen[-1] == told
