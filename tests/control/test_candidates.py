"""Sources of candidates: validation, grammar mass, n-gram guesses."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkserve.control.candidates import OTHER, Candidate, NGramResidual, grammar_branches
from forkserve.errors import ConfigError

BASE = Candidate("s", 1, 0, "bash", 0, "t", 10, 0, 1.0, 1.0, True, 100.0, 64)


def test_a_declared_candidate_keeps_the_callers_priority() -> None:
    assert BASE.declared
    assert replace(BASE, p=0.2).p == 0.2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("known", -1),
        ("guess", -1),
        ("p", 1.5),
        ("p", -0.1),
        ("p", math.nan),
        ("q", 1.01),
        ("t_idle_ms", -1.0),
        ("t_idle_ms", math.nan),
        ("context", -1),
    ],
)
def test_bad_candidates_are_config_errors_that_name_the_field(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"'bash'.*{field}="):
        replace(BASE, **{field: value})


# -- grammar ---------------------------------------------------------------------------------

WRAPPERS = {"bash": (1,), "edit": (2,), "find": (3,), "grep": (4,)}


def test_top_tools_by_mass_and_one_branch_for_the_rest() -> None:
    masses = {"find": 1.0, "bash": 4.0, "grep": 0.5, "edit": 2.0, "ls": 0.5}
    branches = grammar_branches(masses, WRAPPERS, (9, 9), 3)
    assert [(b.branch, b.tokens, b.p) for b in branches] == [
        ("bash", (1,), 0.5),
        ("edit", (2,), 0.25),
        ("find", (3,), 0.125),
        (OTHER, (9, 9), 0.125),
    ]


def test_a_tool_without_a_wrapper_goes_to_the_rest() -> None:
    branches = grammar_branches({"ls": 3.0, "bash": 1.0}, WRAPPERS, (9,), 3)
    assert [(b.branch, b.p) for b in branches] == [("bash", 0.25), (OTHER, 0.75)]


def test_a_tool_named_other_is_not_a_second_other() -> None:
    branches = grammar_branches({OTHER: 3.0, "bash": 1.0}, {**WRAPPERS, OTHER: (7,)}, (9,), 3)
    assert [(b.branch, b.tokens) for b in branches] == [("bash", (1,)), (OTHER, (9,))]


def test_no_rest_no_other_and_nothing_for_a_tool_without_mass() -> None:
    branches = grammar_branches({"bash": 2.0, "edit": 0.0}, WRAPPERS, (9,), 3)
    assert [(b.branch, b.p) for b in branches] == [("bash", 1.0)]


def test_equal_masses_go_by_name() -> None:
    first = grammar_branches({"edit": 1.0, "bash": 1.0}, WRAPPERS, (), 1)
    second = grammar_branches({"bash": 1.0, "edit": 1.0}, WRAPPERS, (), 1)
    assert first == second
    assert [b.branch for b in first] == ["bash", OTHER]


@pytest.mark.parametrize(
    ("masses", "top_m"),
    [({}, 3), ({"a": 0.0}, 3), ({"a": -1.0}, 3), ({"a": math.inf}, 3), ({"a": 1.0}, -1)],
)
def test_bad_masses_are_config_errors(masses: dict[str, float], top_m: int) -> None:
    with pytest.raises(ConfigError):
        grammar_branches(masses, WRAPPERS, (), top_m)


@given(
    masses=st.dictionaries(st.text(max_size=3), st.floats(0, 1e6), min_size=1),
    known=st.sets(st.text(max_size=3)),
    top_m=st.integers(0, 5),
)
def test_masses_sum_to_one_and_no_branch_is_invented(
    masses: dict[str, float], known: set[str], top_m: int
) -> None:
    if not sum(masses.values()):
        return
    branches = grammar_branches(masses, dict.fromkeys(known, (1,)), (2,), top_m)
    assert sum(b.p for b in branches) == pytest.approx(1.0)
    assert len(branches) <= top_m + 1
    assert len({b.branch for b in branches}) == len(branches)
    assert {b.branch for b in branches} <= (set(masses) & known) | {OTHER}


# -- n-gram ----------------------------------------------------------------------------------


def test_one_sighting_is_worth_a_half_and_more_are_worth_more() -> None:
    predictor = NGramResidual(3, 8, 0.35)
    assert predictor.predict("ls") == ((), 0.0)
    predictor.observe("ls", [5, 6, 7, 8])
    assert predictor.predict("ls") == ((5, 6, 7, 8), 0.5)
    predictor.observe("ls", [5, 6, 7, 8])
    assert predictor.predict("ls") == ((5, 6, 7, 8), pytest.approx(2 / 3))


def test_the_guess_stops_where_outputs_part() -> None:
    predictor = NGramResidual(3, 8, 0.5)
    for tail in (1, 2, 3, 4):
        predictor.observe("json", [9, 9, 7, tail, 0, 0, 0, 0])
    guess, q = predictor.predict("json")
    assert guess == (9, 9, 7)
    assert q == pytest.approx(4 / 5)


def test_probability_is_the_product_of_shares() -> None:
    predictor = NGramResidual(2, 3, 0.3)
    for last in (1, 1, 1, 2):
        predictor.observe("t", [8, last, 5])
    # 4 outputs: 4/5, then 8 (4/4), 1 (3/4), 5 (3/3)
    assert predictor.predict("t") == ((8, 1, 5), pytest.approx(4 / 5 * 3 / 4))


def test_only_the_first_tokens_are_kept() -> None:
    predictor = NGramResidual(3, 2, 0.0)
    predictor.observe("t", range(100))
    assert predictor.predict("t")[0] == (0, 1)


def test_free_form_output_is_forgotten() -> None:
    predictor = NGramResidual(3, 8, 0.35)
    predictor.observe("t", [1, 2, 3])
    predictor.observe("t", [1, 2, 3], schema_stable=False)
    assert predictor.predict("t") == ((), 0.0)


def test_tools_do_not_mix_and_neither_do_objects() -> None:
    mine, theirs = NGramResidual(3, 8, 0.35), NGramResidual(3, 8, 0.35)
    mine.observe("a", [1, 2, 3])
    assert mine.predict("b") == ((), 0.0)
    assert theirs.predict("a") == ((), 0.0)


def test_memory_of_the_predictor_is_bounded() -> None:
    predictor = NGramResidual(3, 4, 0.0)
    for tool in range(100):
        for _ in range(50):
            predictor.observe(str(tool), range(1000))
    assert len(predictor._tools) == 64
    assert all(len(s) == 32 and len(s[0]) == 4 for s in predictor._tools.values())
    assert predictor.predict("0") == ((), 0.0)


def test_an_empty_output_is_learned_as_an_end() -> None:
    predictor = NGramResidual(3, 4, 0.0)
    predictor.observe("t", [])
    assert predictor.predict("t") == ((), 0.0)


def test_a_window_of_no_tokens_guesses_nothing() -> None:
    predictor = NGramResidual(3, 0, 0.0)
    predictor.observe("t", [1])
    assert predictor.predict("t") == ((), 0.0)


@pytest.mark.parametrize(("order", "tokens", "q_min"), [(0, 1, 0.5), (1, -1, 0.5), (1, 1, 2.0)])
def test_bad_predictor_arguments(order: int, tokens: int, q_min: float) -> None:
    with pytest.raises(ConfigError):
        NGramResidual(order, tokens, q_min)


@given(
    outputs=st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=8),
    order=st.integers(1, 4),
    q_min=st.floats(0.1, 1),
)
def test_a_guess_is_never_below_the_gate(
    outputs: list[list[int]], order: int, q_min: float
) -> None:
    predictor = NGramResidual(order, 5, q_min)
    for output in outputs:
        predictor.observe("t", output)
    guess, q = predictor.predict("t")
    assert len(guess) <= 5
    assert (q == 0.0) if not guess else (q_min <= q < 1)
