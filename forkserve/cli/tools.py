"""Tools that really run: search, calculator, SQLite, a rate-limited reader, a slow seal."""

from __future__ import annotations

import hashlib
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forkserve.cli.calculator import calculate
from forkserve.cli.document import Document

__all__ = ["SEAL_ROUNDS", "Observation", "RateLimit", "Tool", "Toolbox"]

SEAL_ROUNDS = 3_000_000
_MAX_ROWS = 5
_MAX_STEPS = 2000  # of 10,000 SQLite instructions each
_READING = frozenset(
    {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
)


@dataclass(frozen=True, slots=True)
class Observation:
    """What a tool gave back.  ok: False when it failed; `text` is then the error's own message."""

    text: str
    ok: bool
    ms: float


class RateLimit:
    """Lets one caller through every `seconds`, the first one after `seconds` as well."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Wait for one's turn."""
        with self._lock:
            time.sleep(self.seconds)


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool as the model sees it.  expected_ms: how long a call takes, or may take."""

    name: str
    usage: str
    run: Callable[[str], str]
    expected_ms: float

    def __call__(self, argument: str) -> Observation:
        begin = time.perf_counter()
        try:
            text, ok = self.run(argument), True
        except Exception as error:  # whatever a tool raises is an observation
            text, ok = f"{type(error).__name__}: {error}", False
        return Observation(text, ok, (time.perf_counter() - begin) * 1e3)


class Toolbox:
    """The tools over one document.

    pause_s, fetch_s: deliberate pauses of search and query, and of fetch; they stand for the
    network that such tools have in front of them.
    """

    def __init__(
        self,
        document: Document,
        *,
        pause_s: float = 0.5,
        fetch_s: float = 4.0,
        seal_rounds: int = SEAL_ROUNDS,
    ) -> None:
        self.document = document
        self._near, self._far = RateLimit(pause_s), RateLimit(fetch_s)
        self._rounds = seal_rounds
        self._database = _build(document)
        self.tools = {
            tool.name: tool
            for tool in (
                Tool("search", 'search("words"): find a passage', self._search, pause_s * 1e3),
                Tool("calculate", 'calculate("2*3"): arithmetic', self._calculate, 1.0),
                Tool("query", 'query("SELECT ..."): SQL on the tables', self._query, pause_s * 1e3),
                Tool("fetch", 'fetch("4"): a whole paragraph', self._fetch, fetch_s * 1e3),
                Tool(
                    "seal", 'seal("text"): checksum of the text', self._seal, _hash_ms(seal_rounds)
                ),
            )
        }

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    @property
    def pauses(self) -> str:
        """One line that says where the tools' time goes."""
        return (
            f"tools: search and query pause {self._near.seconds:g} s on purpose and fetch "
            f"{self._far.seconds:g} s, as a network would; seal computes {self._rounds / 1e6:g} "
            "million hash rounds; calculate takes what it takes"
        )

    def _search(self, words: str) -> str:
        """The sentence that shares most words with the question, rare words counting more."""
        self._near.wait()
        sentences = _sentences(self.document.paragraphs)
        bags = [set(re.findall(r"\w+", s.lower())) for s in sentences]
        wanted = set(re.findall(r"\w+", words.lower()))
        seen = {w: sum(w in bag for bag in bags) for w in wanted}
        scores = [sum(1 / seen[w] for w in wanted & bag) / (20 + len(bag)) for bag in bags]
        best = max(range(len(scores)), key=lambda i: (scores[i], -i), default=-1)
        if best < 0 or not scores[best]:
            raise LookupError(f"no passage has any of the words {words!r}")
        return sentences[best][:600]

    def _calculate(self, expression: str) -> str:
        return f"{expression} = {calculate(expression)}"

    def _query(self, sql: str) -> str:
        self._near.wait()
        cursor = self._database.execute(sql)
        rows = cursor.fetchmany(_MAX_ROWS)
        names = [column[0] for column in cursor.description or ()]
        lines = [", ".join(f"{n}={v}" for n, v in zip(names, row, strict=True)) for row in rows]
        return "; ".join(lines)[:600] or "no rows"

    def _fetch(self, number: str) -> str:
        self._far.wait()
        paragraphs = self.document.paragraphs
        index = int(number)
        if not 1 <= index <= len(paragraphs):
            raise LookupError(f"there is no paragraph {index}; the text has {len(paragraphs)}")
        return paragraphs[index - 1][:1000]

    def _seal(self, salt: str) -> str:
        """A checksum that is slow to forge: PBKDF2 over the whole text."""
        text = self.document.text.encode()
        digest = hashlib.pbkdf2_hmac("sha256", text, salt.encode(), self._rounds)
        return f"seal {digest.hex()[:12]} over {len(text)} bytes"


def _sentences(paragraphs: Sequence[str]) -> list[str]:
    """Sentences; one of less than four words ("3 March.") belongs to the next."""
    found, short = [], ""
    for text in paragraphs:
        for sentence in re.split(r"(?<=[.!?])\s+", text):
            short = f"{short} {sentence}".strip()
            if len(short.split()) > 3:
                found.append(short)
                short = ""
        found += [short] if short else []
        short = ""
    return found


def _hash_ms(rounds: int) -> float:
    """How long so many rounds may take here, on a processor that others use as well."""
    begin = time.perf_counter()
    hashlib.pbkdf2_hmac("sha256", b"text", b"salt", max(rounds // 100, 1))
    return 3 * (time.perf_counter() - begin) * 1e5


def _build(document: Document) -> sqlite3.Connection:
    """Tables made from the text, in memory, then locked against writing."""
    database = sqlite3.connect(":memory:", check_same_thread=False)
    database.execute("CREATE TABLE paragraphs (id INTEGER PRIMARY KEY, words INTEGER, text TEXT)")
    database.executemany(
        "INSERT INTO paragraphs VALUES (?, ?, ?)",
        [(i, len(text.split()), text) for i, text in enumerate(document.paragraphs, 1)],
    )
    if shifts := document.shifts:
        database.execute(
            "CREATE TABLE shifts "
            "(day TEXT, keeper TEXT, pump TEXT, minutes INTEGER, litres INTEGER)"
        )
        database.executemany(
            "INSERT INTO shifts VALUES (?, ?, ?, ?, ?)",
            [(s.day, s.keeper, s.pump, s.minutes, s.litres) for s in shifts],
        )
    database.commit()
    budget = [0]

    def authorise(action: int, *_: str | None) -> int:
        budget[0] = 0
        return sqlite3.SQLITE_OK if action in _READING else sqlite3.SQLITE_DENY

    def tick() -> int:
        budget[0] += 1
        return int(budget[0] > _MAX_STEPS)  # not zero: stop

    database.set_authorizer(authorise)
    database.set_progress_handler(tick, 10_000)
    return database
