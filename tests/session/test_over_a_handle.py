"""The object of a session that is open already: opened by verbs, resumed, or restored."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from forkserve import Engine, ForkServeConfig, Session
from forkserve.engine import MockBackend
from forkserve.errors import ConfigError, SessionError, StoreError
from forkserve.opening import Opening
from forkserve.session import _OPTIONS
from forkserve.store.collect import collect

TRUNK = "A trunk of some length. " * 12  # 288 tokens: a whole chunk and a rest


def engine(folder: Path | None = None) -> Engine:
    config = ForkServeConfig(page_size=16, capacity_pages=512)
    return Engine(MockBackend(config), store=folder)


def test_a_handle_of_open_is_the_session(eng: Engine) -> None:
    h = eng.open("abc", tenant="t")
    child = eng.fork(h.id, h.tip, "guess", " and")
    with eng.session(h) as s:
        assert (s.id, s.text, s.cached_tokens) == (h.id, "abc", h.cached_tokens)
        assert s.tip.id == h.tip
        assert s.branch(child).text == " and"
        s.commit(" and so on")
        assert eng.text(h.id) == "abc and so on"
        assert Session(eng, h).text == s.text
    assert s.closed
    assert h.id not in eng.sessions()


def test_a_handle_takes_no_options_and_is_of_this_engine_and_open(eng: Engine) -> None:
    h = eng.open("abc", session="x")
    for options in ({"seed": 1}, {"prefill": True}, {"session": "y", "tenant": "t"}):
        with pytest.raises(ConfigError, match=f"open already: {', '.join(options)} can't"):
            eng.session(h, **options)
    with engine() as other, pytest.raises(ConfigError, match="another engine"):
        other.session(h)
    eng.close(h.id)
    with pytest.raises(SessionError, match="'x'"):
        eng.session(h)
    eng.open("xyz", session="x")
    with pytest.raises(SessionError, match="another one has its id now"):
        eng.session(h)
    assert eng.text("x") == "xyz", "it was left alone"


def test_an_unknown_option_is_named_with_the_nearest(eng: Engine) -> None:
    with pytest.raises(ConfigError, match="'sesion' of a session; did you mean 'session'"):
        eng.session("x", sesion="s")
    with pytest.raises(ConfigError, match="did you mean 'prefill'"):
        Session(eng, "x", prefil=True)
    assert not eng.sessions()
    assert set(_OPTIONS) == set(Opening.open.__kwdefaults__) - {"prefill"}


def test_a_resumed_and_a_restored_session_go_on_as_objects(tmp_path: Path) -> None:
    with engine(tmp_path) as eng:
        s = eng.session(TRUNK, session="job")
        side = s.fork("side", "Aside: ")
        side.generate(2)
        s.fork("guess", "never happened")
        assert s.publish("start").tokens == 256
        said = s.generate(4, temperature=1.0).tokens
        text = s.text
    with engine(tmp_path) as eng:
        with eng.session(eng.restore("start")) as again:
            assert again.text == TRUNK
            assert again.generate(4, temperature=1.0).tokens == said, "the draws were seeded alike"
        with eng.session(eng.resume("job")) as s:
            assert s.text == text, "its tip is that of the main line"
            assert s.branch(side.id).text.startswith("Aside: ")
            branches = [node.branch for node in eng.tree("job")]
            assert branches[1:] == ["side"], "an attempt lives on; speculation was never written"
            with s.fork("ok", " Result: ") as ok:
                ok.commit("fine")
            s.generate(2)
        assert "job" not in eng.sessions()


def test_an_exception_closes_the_session_in_the_store_until_gc_takes_it(tmp_path: Path) -> None:
    with engine(tmp_path) as eng:
        with pytest.raises(KeyboardInterrupt), eng.session(TRUNK, session="c"):
            raise KeyboardInterrupt
        assert eng.store is not None
        assert eng.stored_sessions() == ["c"], "it can be resumed still"
        with eng.session(eng.resume("c")) as s:
            assert s.text == TRUNK
            assert collect(eng.store.vault, grace_s=-5).sessions == 0, "it is open again"
        assert collect(eng.store.vault, grace_s=-5).sessions == 1
        with pytest.raises(SessionError, match="no session 'c'"):
            eng.resume("c")


def test_publish_is_the_verb_at_the_tip(tmp_path: Path) -> None:
    with engine() as eng, eng.session("x") as s, pytest.raises(StoreError, match="no store"):
        s.publish("n")
    with engine(tmp_path) as eng:
        with eng.session(TRUNK) as s:
            ticket = s.publish(wait=False)
            ticket.wait()
            s.publish("n")
            s.append("more")
            with pytest.raises(StoreError, match="taken; replace=True"):
                s.publish("n")
            s.publish("n", replace=True)
            assert eng.text(eng.restore("n").id) == TRUNK + "more"
        with pytest.raises(SessionError):
            s.publish("m")


def test_async_twins(tmp_path: Path) -> None:
    async def main() -> None:
        async with await eng.asession(eng.open(TRUNK, session="a")) as s:
            ticket = await s.apublish("n")
            assert ticket.done
            await s.acommit("seen")
            await s.apublish("n", replace=True)
        async with await Session.aopen(eng, eng.restore("n")) as again:
            assert again.text == TRUNK + "seen"
            assert (await again.agenerate(2)).tokens
        with pytest.raises(SessionError):
            await s.apublish()

    with engine(tmp_path) as eng:
        asyncio.run(main())
