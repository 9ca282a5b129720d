"""The demo's tools really do something, and nothing that they should not."""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Iterator

import pytest

from forkserve.cli.agent import score
from forkserve.cli.calculator import calculate
from forkserve.cli.document import Document, load_document
from forkserve.cli.tools import RateLimit, Toolbox


@pytest.fixture
def box() -> Iterator[Toolbox]:
    made = Toolbox(load_document(None), pause_s=0, fetch_s=0, seal_rounds=1000)
    yield made
    made.close()


# --- calculator -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4180/95", "44"),
        ("1+2*3", "7"),
        ("-(2 - 5) ** 2", "-9"),
        ("7 // 2 + 7 % 2", "4"),
        ("0.1 + 0.2", "0.3"),
        ("2 ** -1", "0.5"),
        ("1e3", "1000"),
        (" 10 ", "10"),
    ],
)
def test_calculate(text: str, value: str) -> None:
    assert calculate(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "().__class__",
        "open('x')",
        "[x for x in (1,)]",
        "lambda: 1",
        "'a' * 9",
        "True + 1",
        "1j",
        "x",
        "1 if 1 else 2",
        "1 < 2",
        "2 ** 2 ** 99",
        "9 ** 999999999",
        "(10 ** 60) ** 60",
        "(-8) ** 0.5",
        "1 << 99",
        "~1",
        "",
        "1 +",
        "1; 2",
        "\0",
        "(" * 150 + ")" * 20,
        "-" * 60 + "1",
        "1" * 201,
        "1" * 120,
    ],
)
def test_calculator_refuses(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        calculate(text)


@pytest.mark.parametrize("text", ["1/0", "1 % 0", "0 ** -1", "1e308 ** 2"])
def test_calculator_fails_as_arithmetic_does(text: str) -> None:
    with pytest.raises(ArithmeticError):
        calculate(text)


# --- tools ------------------------------------------------------------------------------------


def test_failure_is_an_observation(box: Toolbox) -> None:
    seen = box.tools["calculate"]("1/0")
    assert not seen.ok
    assert seen.text.startswith("ZeroDivisionError")
    assert seen.ms > 0


def test_search_finds_the_sentence(box: Toolbox) -> None:
    seen = box.tools["search"]("north intake frozen over")
    assert seen.ok
    assert seen.text.startswith("3 March. At 05:20 Halloran")
    assert not box.tools["search"]("zzzz qqqq").ok


def test_query_reads_the_shift_table(box: Toolbox) -> None:
    shifts = load_document(None).shifts
    total = sum(s.litres for s in shifts if s.pump == "B")
    seen = box.tools["query"]("SELECT SUM(litres) AS n FROM shifts WHERE pump = 'B'")
    assert seen.text == f"n={total}"
    assert box.tools["query"]("SELECT * FROM shifts WHERE pump = 'X'").text == "no rows"


@pytest.mark.parametrize(
    "sql",
    [
        "DROP TABLE shifts",
        "DELETE FROM paragraphs",
        "INSERT INTO shifts VALUES (1, 2, 3, 4, 5)",
        "ATTACH DATABASE '/tmp/x' AS x",
        "PRAGMA writable_schema = 1",
        "CREATE TABLE t (x)",
        "SELECT 1; SELECT 2",
        "SELECT bar FROM pressure",
        "nonsense",
    ],
)
def test_query_only_reads(box: Toolbox, sql: str) -> None:
    assert not box.tools["query"](sql).ok
    assert box.tools["query"]("SELECT COUNT(*) AS n FROM shifts").text == "n=9"


def test_endless_query_is_stopped(box: Toolbox) -> None:
    sql = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT MAX(i) FROM n"
    seen = box.tools["query"](sql)
    assert not seen.ok
    assert "interrupted" in seen.text


def test_fetch(box: Toolbox) -> None:
    assert box.tools["fetch"]("1").text.startswith("Logbook of the Tarn Bridge")
    assert not box.tools["fetch"]("0").ok
    assert not box.tools["fetch"]("99").ok
    assert not box.tools["fetch"]("one").ok


def test_seal_is_a_checksum(box: Toolbox) -> None:
    text = load_document(None).text.encode()
    digest = hashlib.pbkdf2_hmac("sha256", text, b"book", 1000).hex()
    assert box.tools["seal"]("book").text == f"seal {digest[:12]} over {len(text)} bytes"
    assert box.tools["seal"]("other").text != box.tools["seal"]("book").text


def test_rate_limit_takes_its_time() -> None:
    limit = RateLimit(0.03)
    begin = time.perf_counter()
    limit.wait()
    limit.wait()
    assert time.perf_counter() - begin >= 0.06


def test_text_without_a_table_has_paragraphs_only() -> None:
    box = Toolbox(Document("t", "One two.\n\nThree.", own=True), pause_s=0, seal_rounds=1)
    assert (
        box.tools["query"]("SELECT id, words FROM paragraphs").text
        == "id=1, words=2; id=2, words=1"
    )
    assert not box.tools["query"]("SELECT * FROM shifts").ok
    box.close()
    with pytest.raises(sqlite3.ProgrammingError):
        box._database.execute("SELECT 1")


# --- document ---------------------------------------------------------------------------------


def test_logbook_adds_up() -> None:
    document = load_document(None)
    assert len(document.shifts) == 9
    assert {s.keeper for s in document.shifts} == {"Halloran", "Brandt", "Adeyemi", "Lindqvist"}
    assert all(40 <= s.litres / s.minutes <= 61 for s in document.shifts)
    assert document.paragraphs[10].startswith("7 March.")


def test_cut_keeps_whole_paragraphs() -> None:
    document = Document("t", "First one.\n\nSecond one.\n\nThird one.")
    cut = document.cut(30)
    assert cut.text == "First one.\n\nSecond one."
    assert "first 23 of 35 characters" in cut.note
    assert document.cut(99) is document


def test_score_prefers_what_the_evidence_says() -> None:
    evidence = "total=14220"
    answers = ["It was 99 litres.", "It was.", "It was 14,220 litres in all.", "14220 litres."]
    best = max(answers, key=lambda a: score(a, evidence, complete=True))
    assert best == "14220 litres."
    assert score("14220", evidence, True) > score("14220", evidence, False)
