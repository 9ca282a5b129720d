"""Arguments of tools are not speculated on, and nothing that was secret stays behind."""

from __future__ import annotations

import json
import threading

import pytest

from forkserve import Engine
from forkserve.adapters.react import (
    Final,
    ReactAgent,
    Speculated,
)
from forkserve.adapters.tools import Tool
from forkserve.types import NodeMode
from tests.waiting import HANGS_S

from .agents import gaze
from .conftest import Make, spoken

SECRET = "hunter2-swordfish"


def everything(eng: Engine) -> str:
    """All text that any node of any session holds, dead ones that wait for reclaim as well."""
    decode = eng.backend.tokenizer.decode_bytes
    parts = []
    for name in eng.sessions():
        tree = eng.tree(name)
        parts += [decode(node.tokens) for node in [*tree, *tree.dead]]
    return b"\0".join(parts).decode("utf-8", "replace")


def guessed(eng: Engine) -> str:
    """All text on speculative branches, with what they see of their parents left out."""
    decode = eng.backend.tokenizer.decode_bytes
    parts = [
        decode(node.tokens)
        for name in eng.sessions()
        for node in eng.tree(name)
        if node.mode is NodeMode.SPEC
    ]
    return b"\0".join(parts).decode("utf-8", "replace")


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("family", ["qwen", "hermes", "mistral", "plain"])
def test_arguments_are_not_speculated(make: Make, family: str, lazy: bool) -> None:
    held = threading.Event()

    def login(password: str) -> str:
        assert held.wait(HANGS_S)
        return "welcome"

    wrote = "<think>\nLog in.\n</think>\n\n" + spoken({"login": {"password": SECRET}})
    eng = make(wrote, "Done.", family=family, lazy_abort=lazy)
    agent = ReactAgent(eng, [login])
    seen = 0
    with eng.session(agent.prompt("Go.")) as session:
        for event in agent.stream("Go.", session=session):
            if isinstance(event, Speculated):
                seen += 1
                assert SECRET not in guessed(eng)
                assert SECRET in everything(eng), "it was decoded: committed text has it"
                held.set()
            if isinstance(event, Final):
                assert SECRET in json.dumps(event.result.messages)
        assert seen
        eng.commit(session.id, session.tip.tip, [1], at=1)  # the conversation is taken back
        eng.drain_aborts()
        assert SECRET not in everything(eng)


def test_public_arguments_are_speculated(make: Make) -> None:
    wrote = "<think>\nHm.\n</think>\n\n" + spoken({"gaze": {"at": "the open sea"}})
    for public in (False, True):
        eng = make(wrote, "Done.")
        result = ReactAgent(eng, [Tool.of(gaze, public=public)]).run("Go.")
        stats = result.turns[1].stats
        assert (stats.withheld == 0) == public
        assert (stats.used > 40) == public


def test_an_aborted_run_leaves_no_secret(make: Make) -> None:
    over = threading.Event()
    tool = Tool.of(lambda password="": over.wait(HANGS_S), name="login")
    eng = make("<think>\nx\n</think>\n\n" + spoken({"login": {"password": SECRET}}), "Done.")
    agent = ReactAgent(eng, [tool])
    with eng.session(agent.prompt("Go.")) as session:
        run = agent.stream("Go.", session=session)
        for event in run:
            if isinstance(event, Speculated):
                break
        run.close()
        over.set()
        assert guessed(eng) == ""
        modes = {node.mode for node in eng.tree(session.id)}
        assert modes == {NodeMode.COMMIT}
