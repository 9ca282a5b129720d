"""A branch as an object: forking, choosing, and what leaving it does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from forkserve import Branch, Engine, HitClass, NodeMode
from forkserve.errors import AdmissionRefused, ConfigError, NodeError

Make = Callable[..., Engine]


def uses(b: Branch) -> list[Callable[[], object]]:
    """Every member of a branch that needs it alive."""
    return [
        lambda: b.tip,
        lambda: b.text,
        lambda: b.tokens,
        lambda: b.full_text,
        lambda: b.full_tokens,
        lambda: b.parent,
        lambda: b.children,
        lambda: b.committed,
        lambda: b.fork("x", "y"),
        lambda: b.append("x"),
        b.speculate,
        b.attempt,
        b.commit,
        lambda: b.commit("x"),
        b.promote,
        lambda: b.generate(1),
        lambda: next(b.stream(1)),
        lambda: b.session.generate_many([b]),
        lambda: b.session.join([b]),
    ]


# --- looking in -------------------------------------------------------------------------------


def test_text_is_its_own_and_full_text_the_whole_path(eng: Engine) -> None:
    with eng.session("abc") as s:
        b = s.fork("b", "de")
        c = b.fork("c", [102, 103])
        assert (b.text, b.full_text, c.text, c.full_text) == ("de", "abcde", "fg", "abcdefg")
        assert (c.tokens, c.full_tokens) == ([102, 103], [*b"abcdefg"])
        assert (b.name, b.mode, b.alive, b.committed) == ("b", NodeMode.SPEC, True, False)
        assert c.parent is not None
        assert (c.parent.id, c.parent.text) == (b.id, "de")
        assert (b.children, s.tip.children, c.children) == ([c], [b], [])
        assert s.tip.parent is None
        assert s.tip.committed
        assert b.append("!") == 6
        assert (b.text, c.full_text) == ("de!", "abcdefg"), "a child keeps what it saw"
        assert repr(b) == "Branch('s1', 2, 'b', spec)"
        assert b.__eq__(1) is False


def test_branches_without_a_name_get_one(eng: Engine) -> None:
    with eng.session("abc") as s:
        assert [s.fork().name, s.tip.fork("x").name, s.fork(text="y").name] == ["b1", "x", "b2"]


# --- commit -----------------------------------------------------------------------------------


def test_commit_of_a_branch_makes_it_what_happened(eng: Engine) -> None:
    with eng.session("abc") as s:
        a, b = s.fork("a", "same"), s.fork("b", "same")
        result = b.commit()
        assert (result.winner, result.aborted, result.tail) == (b.id, (a.id,), 0)
        assert (s.text, s.tip.id, b.committed, b.mode) == ("abcsame", b.id, True, NodeMode.COMMIT)
        assert not a.alive
        for use in uses(a):
            with pytest.raises(NodeError, match="dead"):
                use()
        with pytest.raises(NodeError, match="committed already"):
            b.commit()


def test_what_was_observed_follows_the_text_of_the_branch(eng: Engine) -> None:
    """The idiom for a tool: fork the wrap, speculate, commit the result.  Ids stay at the seam."""
    with eng.session("abc") as s, eng.session("abc") as t:
        with s.fork("bash", "<tool><|im_") as b, s.fork("err", "<error>") as e:
            b.speculate()
            while eng.drain_slack():
                pass
            result = b.commit("end|>")
            assert (b.alive, e.alive) == (True, False)
        assert (result.tail, result.lcp, result.hit) == (5, 14, HitClass.KNOWN_SUFFIX)
        assert result.skipped_prefill == len("<tool><|im_")
        assert s.tokens == [*b"abc<tool><|im_end|>"]
        c = t.fork("bash", "<tool><|im_")
        c.append("end|>")
        assert c.commit().tail == 0
        assert t.tokens == s.tokens


def test_an_observation_goes_to_the_branch_that_foresaw_most(eng: Engine) -> None:
    with eng.session("abc") as s:
        a, b = s.fork("a", "right"), s.fork("b", "wrong")
        assert s.commit("right, and more").winner == a.id
        assert (s.text, a.text, b.alive) == ("abcright, and more", "right, and more", False)
        c, d = s.fork("c", "123"), s.fork("d", "12")
        assert d.commit("345").winner == c.id, "the same text, of which c has more"
        assert (c.alive, d.alive, c.text) == (True, False, "12345")
        e = s.fork("e", "no")
        assert s.commit("yes").hit is HitClass.MISS
        assert (e.alive, s.tip.text) == (False, "yes")


def test_a_guess_is_not_text_until_it_is_confirmed(eng: Engine) -> None:
    with eng.session("abc", prefill=True) as s:
        b = s.fork("b", "<tool>")
        b.speculate(guess="42 files", q=0.9, t_idle_ms=1000)
        while eng.drain_slack():
            pass
        assert (b.text, b.full_text) == ("<tool>", "abc<tool>")
        with pytest.raises(NodeError, match="guess"):
            b.append("42 directories")
        result = b.commit("42 directories")
        assert (result.hit, result.skipped_prefill) == (HitClass.RESIDUAL_PARTIAL, 9)
        assert s.text == "abc<tool>42 directories"
        c = s.fork("c", "<tool>")
        c.speculate(guess="42 files", q=0.9)
        c.commit()
        assert s.text == "abc<tool>42 directories<tool>"


def test_speculation_on_a_tool_that_is_known(eng: Engine) -> None:
    with eng.session("abc", prefill=True) as s:
        eng.observe(s.id, "ls", ms=500, output='{"files": 42}', schema_stable=True)
        b = s.fork("ls", "<tool>")
        b.speculate(tool="ls")
        while eng.drain_slack():
            pass
        result = b.commit('{"files": 43}')
        assert s.text == 'abc<tool>{"files": 43}'
        assert result.skipped_prefill >= len("<tool>")


def test_commit_of_a_guess_on_a_guess(eng: Engine) -> None:
    with eng.session("abc") as s:
        b = s.fork("b", "de")
        c = b.fork("c", "fg")
        other = b.fork("other", "xy")
        assert c.commit().winner == c.id
        assert (s.text, b.committed, c.committed, other.alive) == ("abcdefg", True, True, False)
        assert b.tip == c.id, "a branch follows its line"
        assert b.text == "defg"


def test_commit_on_an_attempt_binds_after_its_own_end(eng: Engine) -> None:
    with eng.session("abc") as s:
        a, b = s.fork("a", "one"), s.fork("b", "two")
        said = a.generate(3, ignore_eos=True)
        before = a.full_tokens
        assert before == [*b"abcone", *said.tokens]
        result = a.commit("seen")
        assert a.full_tokens == [*before, *b"seen"]
        assert (a.tip, a.id) == (result.winner, a.id)
        assert result.winner != a.id
        assert (b.alive, s.text) == (True, "abc"), "the main line does not move"
        a.generate(2)
        with pytest.raises(NodeError, match="tip of its line"):
            eng.generate(s.id, 1, node=a.id)
        chosen = a.full_tokens
        assert a.commit().winner == a.tip
        assert (s.tokens, a.committed, b.alive) == (chosen, True, False)
        s.generate(2)
        assert a.full_tokens == s.tokens


def test_commit_without_text_and_full(eng: Engine) -> None:
    with eng.session("abc") as s:
        with pytest.raises(ConfigError, match="at least one"):
            s.fork("empty").commit()
        with pytest.raises(NodeError, match="committed already"):
            s.tip.commit()
        b = s.fork("b", "de")
        with pytest.raises(ConfigError, match="whole"):
            b.commit(full=True)
        b.commit("abcdef", full=True)
        assert s.text == "abcdef"
        s.tip.commit("gh")
        assert s.text == "abcdefgh"


def test_choosing_is_refused_when_the_line_went_another_way(eng: Engine) -> None:
    with eng.session("abc") as s:
        b = s.fork("b", "de").attempt()
        s.append("xy")
        with pytest.raises(NodeError, match="grown by 2 tokens"):
            b.commit()
        with pytest.raises(NodeError, match="grown"):
            s.branch(b.id).commit()
        s.commit("z")
        with pytest.raises(NodeError):
            b.commit()
        b.promote()
        assert s.text == b.full_text == "abcde"
        assert b.committed


def test_choosing_after_the_line_grew_the_same_way(eng: Engine) -> None:
    with eng.session("abc") as s:
        b = s.fork("b", "defg")
        s.append("de")
        assert b.commit().winner == b.id
        assert s.text == "abcdefg"


def test_promote_goes_back_in_time(eng: Engine) -> None:
    with eng.session("abc") as s:
        first = s.fork("first", "one")
        first.commit()
        s.commit("more")
        back = first.parent
        assert back is not None
        second = back.fork("second", "two").promote()
        assert (s.text, first.full_text) == ("abctwo", "abconemore")
        assert first.mode is NodeMode.IDLE
        s.generate(2)
        assert second.full_tokens == s.tokens
        first.promote()
        assert s.text == "abconemore"


def test_attempts_of_guesses(eng: Engine) -> None:
    with eng.session("abc") as s:
        b = s.fork("b", "de")
        c = b.fork("c", "fg")
        c.generate(2)
        assert (b.mode, c.mode) == (NodeMode.COMMIT, NodeMode.COMMIT)
        assert not b.committed
        assert not c.committed
        own = c.tokens
        c.commit()
        assert b.tokens == [*b"de", *own]
        b.commit()
        assert s.tokens == [*b"abcde", *own]
        assert c.committed


def test_an_attempt_on_a_guess_is_refused_whole(eng: Engine) -> None:
    with eng.session("abc") as s:
        b = s.fork("b", "de")
        c = b.fork("c", "fg")
        c.speculate(guess="hij", q=0.9)
        assert c.text == "fg"
        with pytest.raises(NodeError, match="guess"):
            c.generate(1)
        assert b.mode is NodeMode.SPEC
        with pytest.raises(NodeError, match="guess"):
            c.append("k")


# --- speculation ------------------------------------------------------------------------------


def test_speculate_prefills_and_says_why_not(make: Make) -> None:
    eng = make()
    with eng.session("abc", prefill=True) as s:
        b = s.fork("b", "0123456789")
        assert b.speculate(priority=0.9, t_idle_ms=1000).tokens == 10
        while eng.drain_slack():
            pass
        assert b.commit().skipped_prefill == 10
        with pytest.raises(NodeError, match="only a speculative"):
            s.tip.speculate()
        c = s.fork("c", "x")
        assert not c.speculate(priority=0.0)
        with pytest.raises(AdmissionRefused):
            c.speculate(priority=0.0, strict=True)
