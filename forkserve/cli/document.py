"""The text the demo reads: the logbook that ships with the package, or the user's own file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from forkserve.errors import ConfigError

__all__ = ["Document", "Shift", "load_document"]

_SHIFT = re.compile(r"^(\d{4}-\d\d-\d\d) \| (\w+) \| (\w) \| (\d+) \| (\d+)$", re.MULTILINE)
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]*\d)")
_MAX_BYTES = 4_000_000


@dataclass(frozen=True, slots=True)
class Shift:
    """One line of the logbook's shift table."""

    day: str
    keeper: str
    pump: str
    minutes: int
    litres: int


@dataclass(frozen=True)
class Document:
    """A text and what the tools need of it.  own: it is the user's, not the logbook."""

    title: str
    text: str
    own: bool = False
    note: str = ""

    @property
    def paragraphs(self) -> list[str]:
        """Blocks between blank lines, white space folded."""
        blocks = re.split(r"\n\s*\n", self.text)
        return [" ".join(block.split()) for block in blocks if block.strip()]

    @property
    def shifts(self) -> list[Shift]:
        """The shift table, if the text has one."""
        return [
            Shift(day, keeper, pump, int(minutes), int(litres))
            for day, keeper, pump, minutes, litres in _SHIFT.findall(self.text)
        ]

    @property
    def numbers(self) -> list[str]:
        """Numbers as they are written, in order, each once."""
        return list(dict.fromkeys(_NUMBER.findall(self.text)))

    @property
    def names(self) -> list[str]:
        """Capitalised words inside sentences, the most frequent first."""
        found = re.findall(r"(?<=[a-z,] )[A-Z][a-z]{2,}", self.text)
        return sorted(dict.fromkeys(found), key=lambda name: -found.count(name))

    def cut(self, characters: int) -> Document:
        """At most `characters` of it, whole paragraphs if possible, with a note that says so."""
        if len(self.text) <= characters:
            return self
        kept = self.text[:characters]
        end = kept.rfind("\n\n")
        kept = kept[:end] if end > characters // 2 else kept
        note = (
            f"{self.title} is too long for the context: "
            f"the demo reads its first {len(kept):,} of {len(self.text):,} characters"
        )
        return Document(self.title, kept, self.own, note)


def load_document(path: Path | None) -> Document:
    """The user's text, or the logbook.  ConfigError when it cannot be read as text."""
    if path is None:
        source = resources.files("forkserve.cli").joinpath("logbook.txt")
        return Document("logbook", source.read_text(encoding="utf-8").strip())
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        text = raw.decode("utf-8-sig") if b"\0" not in raw else None
    except UnicodeDecodeError as error:
        # A file longer than the limit may end inside a character.
        whole = len(raw) <= _MAX_BYTES or error.start < _MAX_BYTES - 4
        text = None if whole else raw[: error.start].decode("utf-8-sig")
    if text is None:
        raise ConfigError(f"{path} is not UTF-8 text; give a plain text file")
    if not text.strip():
        raise ConfigError(f"{path} is empty; give a file with some text in it")
    return Document(path.name, text.replace("\r\n", "\n").strip(), own=True)
