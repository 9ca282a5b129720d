"""The branch prior: decay, order, bounds, and the same answer in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import forkserve.control.prior as module
from forkserve.control.prior import BranchPrior
from forkserve.errors import ConfigError


def test_an_empty_prior_is_uniform_and_keeps_the_order() -> None:
    prior = BranchPrior(64, 4, 0.97)
    assert prior.rank("user", ["b", "a"]) == {"b": 0.5, "a": 0.5}
    assert list(prior.rank("user", ["b", "a"])) == ["b", "a"]
    assert prior.rank("user", []) == {}


def test_what_was_taken_moves_to_the_front_per_role() -> None:
    prior = BranchPrior(2048, 4, 1.0)
    prior.observe("assistant", "err")
    assert prior.rank("assistant", ["bash", "err"]) == {"err": 2 / 3, "bash": 1 / 3}
    assert prior.rank("user", ["bash", "err"]) == {"bash": 0.5, "err": 0.5}


def test_old_counts_decay() -> None:
    prior = BranchPrior(2048, 4, 0.5)
    prior.observe("r", "old")
    prior.observe("r", "new")
    prior.observe("r", "new")
    assert prior.estimate("r", "old") == pytest.approx(0.25)
    assert prior.estimate("r", "new") == pytest.approx(1.5)


def test_role_and_branch_do_not_run_together() -> None:
    prior = BranchPrior(2048, 4, 1.0)
    prior.observe("a", "bc")
    assert prior.estimate("ab", "c") == 0.0


def test_long_decay_neither_overflows_nor_grows() -> None:
    prior = BranchPrior(32, 4, 0.5)
    for i in range(5000):
        prior.observe("r", str(i))
    assert len(prior) <= 32 * 4
    assert prior.estimate("r", "4999") >= 1.0
    assert sum(prior.rank("r", ["4999", "x"]).values()) == pytest.approx(1.0)


@given(
    seen=st.lists(st.text(max_size=2), max_size=30),
    asked=st.lists(st.text(max_size=2), unique=True),
)
def test_it_re_ranks_and_never_invents(seen: list[str], asked: list[str]) -> None:
    prior = BranchPrior(16, 2, 0.9)
    for branch in seen:
        prior.observe("r", branch)
    ranked = prior.rank("r", asked)
    assert set(ranked) == set(asked)
    assert all(weight > 0 for weight in ranked.values())
    assert list(ranked.values()) == sorted(ranked.values(), reverse=True)


def test_the_same_answer_in_processes_with_other_hash_seeds() -> None:
    code = (
        "from forkserve.control.prior import BranchPrior\n"
        "prior = BranchPrior(7, 3, 0.9)\n"
        "for i in range(40): prior.observe('r', 'b%d' % (i * i % 11))\n"
        "print(prior.rank('r', ['b%d' % i for i in range(11)]))\n"
    )
    root = str(Path(module.__file__).parents[2])
    answers = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": root},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(answers) == 1
    assert "b0" in answers.pop()


@pytest.mark.parametrize(
    ("width", "depth", "decay"), [(0, 1, 0.9), (1, 0, 0.9), (1, 1, 0.0), (1, 1, 1.1)]
)
def test_bad_arguments(width: int, depth: int, decay: float) -> None:
    with pytest.raises(ConfigError):
        BranchPrior(width, depth, decay)
