"""What is asked in the demo: a list of turns for the logbook, and one for any other text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from forkserve.cli.document import Document

__all__ = ["CHECKLIST", "INSTRUCTIONS", "SORRY", "Turn", "plan_turns"]

INSTRUCTIONS = """\
You answer questions about a text. First you write one call of a tool, then you answer in one \
short sentence from its result.
Tools:
{tools}
Examples of calls:
Who signed the letter? -> search("signed letter")
What is 12 times 7? -> calculate("12*7")
How many paragraphs are there? -> query("SELECT COUNT(*) FROM paragraphs")
The text:

"""

# What may be said after a tool has failed.
SORRY = (
    "Sorry, the tool failed, so I cannot answer that.",
    "Sorry, the tables do not hold that.",
)

CHECKLIST = """\
From here on you are the reviewer. Go through this list before you say anything.
1. Read the passage once as a whole, then once again line by line.
2. Note every date, and whether the order of the dates is possible.
3. Note every time of day. A span must not end before it begins.
4. Note every number with its unit. A number without a unit is a fault unless it counts things.
5. Where the passage gives a total, add up its parts and compare.
6. Note every name. A person who acts must be named at least once in full or by office.
7. Whoever opened something must have closed it, or the passage must say that it is still open.
8. Whoever promised something must have kept it, or the passage must say that it is still due.
9. Seals, orders and part numbers must be written with all their digits.
10. An opinion must be marked as one. A remark by a visitor counts as his, not as the keeper's.
11. If a rule of the house is named, the passage must say what was done about it.
12. Do not use anything that you know from elsewhere, and do not guess.
13. A passage that leaves a point open is incomplete, even if all it says is right.
14. A passage that answers every point that concerns it is complete. Points that do not concern \
it do not count against it.
15. Say only whether the passage is complete or incomplete; the reasons are written elsewhere.
The passage under review:
"""


@dataclass(frozen=True)
class Turn:
    """One question and what the grammar lets the model do about it.

    calls: (tool, argument) pairs, one of which the model chooses.  checklist: known text that
    stands before the observation.  primer: words the reply begins with.  replies: the only ones
    allowed, if any are given.  attempts: answer several times and keep the best.
    """

    name: str
    question: str
    calls: tuple[tuple[str, str], ...]
    primer: str = ""
    replies: tuple[str, ...] = ()
    checklist: str = ""
    attempts: bool = False
    texts: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        texts = tuple(f'{tool}("{argument}")' for tool, argument in self.calls)
        object.__setattr__(self, "texts", texts)


_VERDICTS = ("The passage is complete.", "The passage is incomplete.")


def _pump(query: str) -> str:
    return f"SELECT {query} FROM shifts WHERE pump = 'B'"


_LOGBOOK = (
    Turn(
        "look up",
        "Who found the north intake frozen, and when?",
        (("search", "found north intake frozen"), ("search", "north intake frozen over")),
        primer="On 3 March",
    ),
    Turn(
        "calculate",
        "Pump B lifted 4180 litres in 95 minutes. How much is that in one minute?",
        (("calculate", "4180/95"), ("calculate", "4180 / 95")),
        primer="In one minute it lifted",
    ),
    Turn(
        "missing table",
        "What was the highest pressure in the fire main?",
        (
            ("query", "SELECT MAX(bar) FROM pressure"),
            ("query", "SELECT bar FROM pressure ORDER BY bar DESC"),
        ),
        primer="The highest pressure was",
    ),
    Turn(
        "review",
        "Is the entry of 7 March complete?",
        (("fetch", "11"),),
        replies=_VERDICTS,
        checklist=CHECKLIST,
    ),
    Turn(
        "seal",
        "Make a checksum of the book, so that a change will show.",
        (("seal", "book"), ("seal", "logbook")),
        primer="The checksum is",
    ),
    Turn(
        "attempts",
        "How many litres did pump B lift in total?",
        (("query", _pump("SUM(litres) AS total_litres")), ("query", _pump("TOTAL(litres) AS sum"))),
        primer="In total",
        attempts=True,
    ),
)


def _own(document: Document) -> tuple[Turn, ...]:
    """Questions that any text can answer."""
    words = dict.fromkeys(re.findall(r"\w+", document.text))  # as the search reads them
    name = next(iter([*document.names, *sorted(words, key=len, reverse=True)]), "text")
    numbers = [*[n for n in document.numbers if len(n) < 9], "12", "7"]
    sum_, product = f"{numbers[0]}+{numbers[1]}", f"{numbers[0]}*{numbers[1]}"
    return (
        Turn(
            "look up",
            f"What does the text say about {name}?",
            (("search", name), ("search", f"the {name}")),
            primer="It says that",
        ),
        Turn(
            "calculate",
            f"What is the sum of {numbers[0]} and {numbers[1]}?",
            (("calculate", sum_), ("calculate", product)),
            primer="It is",
        ),
        Turn(
            "missing table",
            "Who are the readers of the text?",
            (("query", "SELECT name FROM readers"), ("query", "SELECT COUNT(*) FROM readers")),
            primer="The readers are",
        ),
        Turn(
            "review",
            "Is the last paragraph complete?",
            (("fetch", str(len(document.paragraphs))),),
            replies=_VERDICTS,
            checklist=CHECKLIST,
        ),
        Turn(
            "seal",
            "Make a checksum of the text, so that a change will show.",
            (("seal", "text"), ("seal", "book")),
            primer="The checksum is",
        ),
        Turn(
            "attempts",
            "How many paragraphs does the text have?",
            (
                ("query", "SELECT COUNT(*) AS paragraphs FROM paragraphs"),
                ("query", "SELECT MAX(id) AS paragraphs FROM paragraphs"),
            ),
            primer="The text has",
            attempts=True,
        ),
    )


def plan_turns(document: Document) -> tuple[Turn, ...]:
    """The turns for a document."""
    return _own(document) if document.own else _LOGBOOK
