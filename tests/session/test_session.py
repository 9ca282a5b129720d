"""A session as an object: opening, looking in, closing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from forkserve import Engine, NodeMode, SamplingParams, Session
from forkserve.engine.mock import ByteTokenizer
from forkserve.engine.prompting import render_prompt
from forkserve.errors import ConfigError, ModelError, NodeError, SessionError

Make = Callable[..., Engine]


@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99], (97, 98, 99)])
def test_prompt_is_text_or_ids(eng: Engine, prompt: str | list[int]) -> None:
    with eng.session(prompt) as s:
        assert (s.text, s.tokens) == ("abc", [97, 98, 99])
        assert s.tip.id == s.tip.tip == eng.tip(s.id)


def test_messages_are_rendered_by_the_template(eng: Engine) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    with Session(eng, messages) as s:
        rendered = eng.backend.tokenizer.render(messages)
        assert s.text == rendered
        assert s.tokens == eng.backend.tokenizer.encode(rendered)
        assert rendered.endswith("assistant\n")


@pytest.mark.parametrize("prompt", ["", [], [{"role": "user"}, "no"], [{"content": "x"}], [-1]])
def test_bad_prompts_are_refused(eng: Engine, prompt: object) -> None:
    with pytest.raises(ConfigError):
        Session(eng, prompt)  # type: ignore[arg-type]
    assert eng.sessions() == []


ASKED = {"role": "user", "content": "x"}
CALLING = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        (None, "not NoneType"),
        (5, "not int"),
        ({1, 2}, "not set"),
        (ASKED, "list of chat messages, not dict"),
        ([ASKED, "no"], "message 1 of 2 is str"),
        ([{"content": "x"}], "message 0 of 1 has role=None"),
        ([{"role": 1, "content": "x"}], "has role=1"),
        ([ASKED, {"role": "user"}], "message 1 of 2, of role 'user', has no content"),
        ([{"role": "assistant", "tool_calls": []}], "has no content"),
        ([{**CALLING, "role": "tool"}], "has no content"),
        ([{"role": "user", "content": 5}], "content=5"),
        ([{"role": "assistant", "content": "x", "tool_calls": 5}], "tool_calls=5; give a list"),
        ([{"role": "assistant", "tool_calls": {"id": 1}}], "give a list of calls"),
        ([{"role": "user", "content": "a\ud800"}], "not valid Unicode"),
    ],
)
def test_what_is_no_prompt_is_said(eng: Engine, prompt: object, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        eng.session(prompt)  # type: ignore[arg-type]
    assert eng.sessions() == []


def test_a_message_that_calls_tools_needs_no_content(eng: Engine) -> None:
    answer = {"role": "tool", "content": ""}
    texts = []
    for calling in (CALLING, {**CALLING, "content": None}, {**CALLING, "content": ""}):
        with eng.session([ASKED, calling, answer]) as s:
            texts.append(s.text)
    assert len({*texts}) == 1
    assert "tool_call" in texts[0]


def calling(arguments: object) -> dict[str, object]:
    function = {"name": "look", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": function}]}


def test_arguments_of_a_call_may_be_json_in_a_string(eng: Engine) -> None:
    """OpenAI's way; a template would write the string as a string in JSON."""

    def text(arguments: object) -> str:
        with eng.session([ASKED, calling(arguments)]) as s:
            return s.text

    given = calling('{"at": "é"}')
    assert text('{"at": "é"}') == text({"at": "é"}) != text('"at"')
    assert text("") == text({})
    assert '"arguments": "[1]"' in text("[1]")  # no object: left to the template
    assert '"arguments": "no {json"' in text("no {json")
    assert "[[[" in text("[" * 100_000)
    assert given == calling('{"at": "é"}')


def test_a_template_that_takes_the_string_alone_gets_it() -> None:
    class Strings(ByteTokenizer):
        def render(self, messages: Any, **options: Any) -> str:
            found = messages[0]["tool_calls"][0]["function"]["arguments"]
            if not isinstance(found, str):
                raise ModelError("it adds a string")
            return found

    assert render_prompt(Strings(), [calling('{"a": 1}')]) == '{"a": 1}'
    with pytest.raises(ModelError, match="it adds"):
        render_prompt(Strings(), [calling({"a": 1})])


def test_a_list_of_parts_is_for_templates_that_take_it(eng: Engine) -> None:
    parts = [{"type": "text", "text": "x"}]
    with pytest.raises(ModelError, match="takes text"):
        eng.session([{"role": "user", "content": parts}])


def test_text_that_is_none_is_refused_by_every_verb(eng: Engine) -> None:
    with eng.session("abc") as s:
        branch = s.fork("b", "x")
        for verb in (s.commit, branch.commit, s.append, lambda text: s.fork("c", text)):
            with pytest.raises(ConfigError, match="not valid Unicode"):
                verb("\ud800")
            with pytest.raises(ConfigError, match="text or integers"):
                verb(5)  # type: ignore[arg-type]
        assert (s.text, branch.alive) == ("abc", True)


def test_options_reach_open(make: Make) -> None:
    eng = make(prefix_index=True)
    with eng.session("a prompt of some length", session="one", tenant="t", prefill=True) as s:
        assert s.id == "one"
        assert eng.tree("one").tenant == "t"
        assert s.cached_tokens == 0
        with pytest.raises(SessionError, match="open already"):
            eng.session("x", session="one")
        with eng.session("a prompt of some length", tenant="t") as again:
            assert again.cached_tokens == 20
        with eng.session("a prompt of some length", tenant="t", salt="other") as apart:
            assert apart.cached_tokens == 0


def test_prefill_shares_the_pass_of_the_first_token_unless_asked_for(make: Make) -> None:
    eng = make()
    with eng.session("some prompt"):
        assert eng.stats().forward_passes == 0
    with eng.session("some prompt", prefill=True) as s:
        assert eng.stats().forward_passes == 1
        s.generate(1)
        assert eng.stats().forward_passes == 2
    with eng.session("some prompt") as s:
        s.generate(1)
        assert eng.stats().forward_passes == 3


def test_leaving_closes_and_closing_twice_is_fine(eng: Engine) -> None:
    with eng.session("abc") as s:
        b = s.fork("b", "x")
        s.generate(2)
        assert not s.closed
    assert s.closed
    assert eng.sessions() == []
    s.close()
    with s:  # a closed session may be entered and left again
        pass
    for use in (
        lambda: s.text,
        lambda: s.tip,
        lambda: s.generate(1),
        lambda: s.commit("x"),
        lambda: s.fork("y"),
        lambda: s.append("x"),
        lambda: next(s.stream(1)),
        lambda: s.join([b]),
        lambda: b.text,
        lambda: b.fork("z"),
        b.abort,
    ):
        with pytest.raises(SessionError):
            use()
    assert (b.alive, b.mode) == (False, NodeMode.DEAD)
    assert "closed" in repr(s)
    assert "dead" in repr(b)


def test_leaving_by_an_exception_closes(eng: Engine) -> None:
    with pytest.raises(ZeroDivisionError), eng.session("abc") as s:  # noqa: PT012
        s.generate(3)
        raise ZeroDivisionError
    assert s.closed


def test_a_later_session_of_the_same_id_is_another_one(eng: Engine) -> None:
    old = eng.session("abc", session="same")
    branch = old.fork("b", "x")
    old.close()
    with eng.session("xyz", session="same") as new:
        assert old.closed
        assert not branch.alive
        with pytest.raises(SessionError, match="another one"):
            old.generate(1)
        with pytest.raises(SessionError):
            branch.generate(1)
        old.close()
        assert not new.closed


def test_the_tip_moves_with_commits(eng: Engine) -> None:
    with eng.session("abc") as s:
        root = s.tip
        s.fork("no", "xyz")
        result = s.commit("def")
        assert s.tip.id == result.winner != root.id
        assert s.text == "abcdef"
        assert root.tip == s.tip.id, "it follows its line"
        assert s.append("gh") == 8
        assert s.text == root.full_text == "abcdefgh"
        assert s.tip.text == "defgh"
        assert s.tip.parent is not None
        assert s.tip.parent.text == "abc"
        s.commit("abcdefghij", full=True)
        assert s.text == "abcdefghij"
        with pytest.raises(NodeError, match="does not extend"):
            s.commit("nonsense", full=True)


def test_commit_prefers_the_branch_that_is_named(eng: Engine) -> None:
    with eng.session("abc") as s:
        one, two = s.fork("one", "same"), s.fork("two", "same")
        assert s.commit("same!", branch="two").winner == two.id
        assert two.alive
        assert not one.alive
        new = s.commit("else", branch="three").winner  # a label: what fits nowhere gets it
        assert s.branch(new).name == "three"


def test_branch_by_id(eng: Engine) -> None:
    with eng.session("abc") as s, eng.session("xyz") as other:
        b = s.fork("name", "text")
        assert s.branch(b.id) == b
        assert hash(s.branch(b.id)) == hash(b)
        assert s.branch(b.id).name == "name"
        assert b != s.tip
        with pytest.raises(NodeError, match="no node 99"):
            s.branch(99)
        with pytest.raises(NodeError, match="another session"):
            other.join([b])
        with pytest.raises(NodeError, match="another session"):
            other.generate_many([b])
        b.abort()
        with pytest.raises(NodeError, match="dead"):
            s.branch(b.id)


def test_object_face_and_verbs_do_the_same(make: Make) -> None:
    """The same program in both faces gives the same tokens, nodes and numbers."""
    eng, twin = make(seed=3), make(seed=3)
    params = SamplingParams(temperature=1.0)
    with eng.session("system and user") as s:
        happy, fail = s.fork("bash", "<tool>"), s.fork("err", "<error>")
        happy.speculate(t_idle_ms=2900)
        fail.speculate(priority=0.2, t_idle_ms=2900)
        eng.drain_slack()
        committed = s.commit("<tool>result")
        reply = s.generate(12, params)
        face = (list(reply.tokens), committed, s.tokens)
    h = twin.open("system and user", prefill=False)
    node = twin.fork(h.id, h.tip, "bash", "<tool>")
    other = twin.fork(h.id, h.tip, "err", "<error>")
    twin.speculate(h.id, node, t_idle_ms=2900)
    twin.speculate(h.id, other, priority=0.2, t_idle_ms=2900)
    twin.drain_slack()
    committed = twin.commit(h.id, h.tip, "<tool>result")
    tokens = twin.generate(h.id, 12, params=params)
    assert face == (tokens, committed, twin.tokens(h.id))


def test_ids_decide_at_a_seam(eng: Engine) -> None:
    """Text is encoded on its own: a marker that is cut in two is not the marker."""
    whole, left, right = "x<|im_end|>", "x<|im_", "end|>"
    with eng.session("abc") as s, eng.session("abc") as t:
        s.commit(whole)
        t.commit(left)
        t.append(right)
        assert s.text == t.text
        assert s.tokens != t.tokens
        assert len(s.tokens) < len(t.tokens)


def test_sessions_in_threads(make: Make) -> None:
    """Each thread its session: they share the engine."""
    eng = make()
    replies: dict[int, str] = {}

    def work(number: int) -> None:
        with eng.session(f"prompt {number}") as s:
            s.fork("a", "guess").speculate()
            s.commit("guess, right")
            replies[number] = str(s.generate(10, ignore_eos=True))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, text in replies.items():
        with eng.session(f"prompt {number}") as s:
            s.commit("guess, right")
            assert str(s.generate(10, ignore_eos=True)) == text
    assert len(replies) == 8
