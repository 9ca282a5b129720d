"""Tells the reader what is going on while the demo runs."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.status import Status
from rich.text import Text

from forkserve.cli.screen import Screen
from forkserve.cli.turns import Turn

__all__ = ["Narrator"]

_LINE = 140  # characters of a line of narration


class Narrator:
    """Writes to standard output, or with quiet=True to standard error.

    What is finished is a line that stays; what is under way is a spinner that goes.  Without a
    terminal a long step is a line on standard error instead.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.console = Screen(file=sys.stderr if quiet else sys.stdout, highlight=False)
        on_screen = self.console.is_terminal
        self._signs = self.console if on_screen else Screen(stderr=True, highlight=False)
        self._status = Status("", console=self._signs, spinner="dots")
        self._open = False  # a line of the answer is being written

    def __enter__(self) -> Narrator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._status.stop()
        if self._open:
            self.console.print()

    def head(self, model: str, text: str, tools: str, note: str) -> None:
        """What runs on what."""
        self._status.stop()
        self.console.print(Text.assemble(("ForkServe demo  ", "bold"), model))
        self.console.print(text)
        self.console.print(tools, style="dim", markup=False)
        if note:
            self.note(note)

    def note(self, text: str) -> None:
        self._status.stop()
        self.console.print(text, style="yellow", markup=False)

    def turn(self, number: int, turn: Turn) -> None:
        self._status.stop()
        self.console.print()
        self.console.print(Text.assemble((f"{number} {turn.name}  ", "bold cyan"), turn.question))

    def working(self, what: str) -> None:
        if self._signs.is_terminal and not self._open:
            self._status.update(f"{what} ...")
            self._status.start()

    def step(self, what: str) -> None:
        """Something takes so long that a reader without a terminal must hear of it, too."""
        if self._signs.is_terminal:
            self.working(what)
        else:
            self._signs.print(f"{what} ...", style="dim", markup=False, soft_wrap=True)

    def line(self, label: str, text: str) -> None:
        self._status.stop()
        text = " ".join(text.split())
        text = text if len(text) <= _LINE else f"{text[:_LINE]} ..."
        self.console.print(Text.assemble((f"  {label}: ", "dim"), text))

    def piece(self, text: str) -> None:
        self._status.stop()
        if not text:
            if self._open:
                self.console.print()
            self._open = False
            return
        if not self._open:
            self.console.print(Text("  answer: ", "dim"), end="")
        self._open = True
        self.console.print(Text(text.replace("\n", " "), "bold"), end="", soft_wrap=True)
