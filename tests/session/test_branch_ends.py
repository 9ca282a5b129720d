"""Branches that end: leaving, aborting, joining, misuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from forkserve import Engine, Session
from forkserve.errors import ConfigError, NodeError, SessionError

Make = Callable[..., Engine]


# --- leaving ----------------------------------------------------------------------------------


def pages(s: Session) -> int:
    return s.engine.stats().live_pages


def test_leaving_aborts_what_was_not_committed(eng: Engine) -> None:
    with eng.session("abc", prefill=True) as s:
        start = pages(s)
        with s.fork("a", "x" * 20) as a:
            a.generate(3)
            assert pages(s) > start
        assert not a.alive
        assert pages(s) == start
        with s.fork("a", "x") as a, s.fork("b", "y") as b:
            b.commit()
        assert (a.alive, b.alive, s.text) == (False, True, "abcy")
        with s.fork("p", "q") as p:
            p.promote()
        assert (p.alive, s.text) == (True, "abcyq")
        with s.fork("w", "won") as w:
            s.commit("won!")
        assert (w.alive, s.text) == (True, "abcyqwon!")


def test_leaving_by_an_exception(eng: Engine) -> None:
    with eng.session("abc") as s:
        with pytest.raises(ZeroDivisionError), s.fork("a", "x") as a:
            raise ZeroDivisionError
        assert not a.alive
        with pytest.raises(ZeroDivisionError), s.fork("b", "y") as b:  # noqa: PT012
            b.commit()
            raise ZeroDivisionError
        assert b.alive
        assert s.text == "abcy"


def test_nested_branches(eng: Engine) -> None:
    with eng.session("abc") as s:
        with s.fork("a", "1") as a:
            with a.fork("b", "2") as b:
                pass
            assert a.alive, "the parent stays, without a child"
            assert not b.alive
            with a.fork("c", "3") as c:
                c.generate(1)
                c.commit()
                kept = c.tokens
            assert c.alive
            assert a.tokens == [*b"1", *kept]
        assert not a.alive
        assert not c.alive
        assert s.text == "abc"
        with s.fork("d", "4") as d, d.fork("e", "5") as e:
            e.commit()
        assert s.text == "abc45"


def test_leaving_twice_and_after_the_end(eng: Engine) -> None:
    s = eng.session("abc")
    b = s.fork("b", "x")
    with b:
        b.abort()
        assert b.abort() == 0
    with b:
        pass
    with s.fork("c", "x") as c:
        s.commit("y")
    assert not c.alive
    with s.fork("d", "x") as d:
        s.close()
    assert not d.alive


def test_abort_keeps_the_parent_unless_cascade(eng: Engine) -> None:
    with eng.session("abc") as s:
        b = s.fork("b", "1")
        b.fork("c", "2").abort()
        assert b.alive
        b.fork("c", "2").abort(cascade=True)
        assert not b.alive
        with pytest.raises(NodeError, match="main line"):
            s.tip.abort()


def test_lazy_abort(make: Make) -> None:
    eng = make(lazy_abort=True)
    with eng.session("abc", prefill=True) as s:
        start = eng.stats().live_pages
        with s.fork("b", "x" * 20) as b:
            b.generate(1)
        assert not b.alive
        assert eng.stats().live_pages > start
        assert eng.drain_aborts() > 0
        assert eng.stats().live_pages == start
        c = s.fork("c", "x" * 20)
        c.generate(1)
        assert c.abort(lazy=False) > 0


def test_an_attempt_that_moved_on_is_aborted_whole(eng: Engine) -> None:
    with eng.session("abc", prefill=True) as s:
        start = pages(s)
        with s.fork("a", "one") as a:
            a.generate(4)
            a.commit("seen")
            a.generate(4)
        assert not a.alive
        assert len(eng.tree(s.id).nodes) == 1
        assert pages(s) == start


# --- join -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "options", "text", "alive"),
    [
        ("all", {}, "122333", [True, True, True]),
        ("all", {"scaffold": "=", "blend": "x"}, "=x", [True, True, True]),
        ("concat", {"scaffold": "="}, "=122333", [True, True, True]),
        ("kofn", {"k": 2}, "122", [True, True, False]),
        ("summary", {"blend": "so"}, "so", [True, True, True]),
        ("first", {}, "1", [True, False, False]),
        ("winner", {"k": 1}, "22", [False, True, False]),
    ],
)
def test_join(
    eng: Engine, policy: str, options: dict[str, object], text: str, alive: list[bool]
) -> None:
    with eng.session("abc") as s:
        branches = [s.fork(name, t) for name, t in (("a", "1"), ("b", "22"), ("c", "333"))]
        joined = s.join(branches, policy, **options)  # type: ignore[arg-type]
        assert (joined.text, s.text, joined) == (text, "abc" + text, s.tip)
        assert [b.alive for b in branches] == alive
        assert s.generate(3).tokens == tuple(s.tokens[-3:])


def test_join_of_attempts_that_moved_on(eng: Engine) -> None:
    with eng.session("abc") as s:
        branches = [s.fork(text=t) for t in "xyz"]
        for b in branches:
            b.attempt().commit("seen" + b.text)
        joined = s.join(branches, "kofn", k=1)
        assert joined.text == "xseenx"
        assert [b.alive for b in branches] == [True, False, False]
        assert s.text == "abcxseenx"


def test_join_below_an_attempt(eng: Engine) -> None:
    with eng.session("abc") as s:
        a = s.fork("a", "1").attempt()
        joined = s.join([a.fork(text="2"), a.fork(text="3")])
        assert (joined.tip, a.text, s.text) == (a.tip, "123", "abc")
        a.commit()
        assert s.text == "abc123"


def test_join_of_branches_of_different_trunks(eng: Engine) -> None:
    with eng.session("abc") as s:
        a = s.fork("a", "1")
        with pytest.raises(NodeError, match="common parent"):
            s.join([a, a.fork("b", "2")])
        with pytest.raises(ConfigError, match="needs at least one"):
            s.join([])


# --- misuse -----------------------------------------------------------------------------------


def test_verbs_while_it_generates(make: Make) -> None:
    eng = make(slow_ms=1)
    with eng.session("abc") as s:
        b = s.fork("b", "x")
        stream = b.stream(500, ignore_eos=True)
        next(stream)
        for verb in (b.commit, lambda: b.append("y"), lambda: b.generate(1)):
            with pytest.raises(SessionError, match="generation is running"):
                verb()
        stream.close()
        b.commit()
        assert s.tokens == b.full_tokens
