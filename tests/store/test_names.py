"""Names that move: in one transaction, seen by other processes.  And wrong options of stores."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from forkserve import Engine, ForkServeConfig
from forkserve.engine import MockBackend
from forkserve.errors import ConfigError, StoreError
from forkserve.store import Store, admin, faults
from forkserve.store.collect import collect
from forkserve.store.rebuild import verify
from tests.waiting import HANGS_S

from .engines import PROMPT, engine

GONE = 9  # exit status of a process that ends where it stands


def text_of(eng: Engine, name: str) -> list[int]:
    h = eng.restore(name)
    ids = eng.tokens(h.id)
    eng.close(h.id)
    return ids


def test_replace_moves_a_name_and_nothing_else_does(tmp_path: Path) -> None:
    eng = engine(tmp_path)
    h = eng.open(PROMPT, session="a")
    eng.publish("a", name="latest", replace=True)  # free: it is given
    eng.commit("a", h.tip, [1, 2, 3])
    with pytest.raises(StoreError, match="'latest' is taken; replace=True moves it"):
        eng.publish("a", name="latest")
    assert text_of(eng, "latest") == PROMPT
    eng.publish("a", name="latest", replace=True)
    assert text_of(eng, "latest") == [*PROMPT, 1, 2, 3]
    eng.publish("a", name="latest", replace=True)  # the state that it stands for already
    assert text_of(eng, "latest") == [*PROMPT, 1, 2, 3]
    assert eng.store is not None
    (state,) = admin.names(eng.store.catalog)
    assert state["name"] == "latest"
    with pytest.raises(ConfigError, match="needs name="):
        eng.publish("a", replace=True)
    with pytest.raises(StoreError, match="no name"):
        eng.publish("a", name="", replace=True)
    eng.shutdown()


def test_names_move_in_the_order_of_their_publishes(tmp_path: Path) -> None:
    eng = engine(tmp_path)
    h = eng.open(PROMPT, session="a")
    tickets = [eng.publish("a", name="latest", replace=True, wait=False)]
    eng.commit("a", h.tip, [7])
    tickets.append(eng.publish("a", name="latest", replace=True, wait=False))
    for ticket in tickets:
        ticket.wait(HANGS_S)
    assert text_of(eng, "latest") == [*PROMPT, 7]
    eng.shutdown()


def test_what_a_name_has_left_is_garbage_and_what_it_took_is_kept(tmp_path: Path) -> None:
    eng = engine(tmp_path)
    eng.open(PROMPT, session="a")
    eng.publish("a", name="latest")
    eng.close("a")
    other = [*reversed(PROMPT)]
    eng.open(other, session="b")
    eng.publish("b", name="latest", replace=True)
    eng.close("b")
    assert eng.store is not None
    assert collect(eng.store.vault, grace_s=-5).chunks == 2
    assert verify(eng.store.vault).clean
    assert text_of(eng, "latest") == other
    eng.shutdown()


@pytest.mark.parametrize(
    ("wrong", "near"), [("budgetbytes", "budget_bytes"), ("rol", "role"), ("formt", "format")]
)
def test_an_unknown_option_is_named_with_the_nearest(tmp_path: Path, wrong: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"'{wrong}' of a store; did you mean '{near}'"):
        Store(tmp_path / "new", **{wrong: 1})  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("wrong", [5, object(), ["states"], b"states"])
def test_what_is_no_store_is_refused(wrong: object) -> None:
    backend = MockBackend(ForkServeConfig())
    with pytest.raises(ConfigError, match=rf"is {type(wrong).__name__}; give a directory"):
        Engine(backend, store=wrong)  # type: ignore[arg-type]
    with Engine(backend) as eng:  # the backend was left free
        assert eng.open("x").tip == 1


# -------------------------------------------------------------------- several processes


def move(folder: Path, ending: str) -> None:
    """A process beside the owner: moves the name, and ends at a step if one is given."""
    eng = engine(Store(folder, "shared"))
    eng.open([5, *PROMPT], session="other")

    def hook(point: str) -> None:
        if point == ending:
            os._exit(GONE)

    faults.hook = hook
    eng.publish("other", name="latest", replace=True)
    os._exit(0)  # returned: nothing else is needed


def child(folder: Path, ending: str = "") -> int:
    code = "import sys; from pathlib import Path; from store.test_names import move\n"
    code += "move(Path(sys.argv[1]), sys.argv[2])"
    here = Path(__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": f"{here}:{here.parent}"}
    command = [sys.executable, "-c", code, str(folder), ending]
    return subprocess.run(command, env=env, check=False, timeout=HANGS_S).returncode


def test_another_process_moves_it_and_this_one_sees_it(tmp_path: Path) -> None:
    eng = engine(tmp_path)
    eng.open(PROMPT, session="a")
    eng.publish("a", name="latest")
    assert child(tmp_path) == 0
    assert text_of(eng, "latest") == [5, *PROMPT]
    with pytest.raises(StoreError, match="taken"):
        eng.publish("a", name="latest")
    eng.publish("a", name="latest", replace=True)
    assert text_of(eng, "latest") == PROMPT
    eng.shutdown()


@pytest.mark.parametrize("ending", ["publish.stored", "publish.catalogued", "name.written"])
def test_a_process_that_dies_on_the_way_leaves_the_name_as_it_was(
    tmp_path: Path, ending: str
) -> None:
    eng = engine(tmp_path)
    eng.open(PROMPT, session="a")
    eng.publish("a", name="latest")
    assert child(tmp_path, ending) == GONE
    assert text_of(eng, "latest") == PROMPT
    eng.publish("a", name="latest", replace=True)
    assert eng.store is not None
    assert verify(eng.store.vault).clean
    eng.shutdown()
