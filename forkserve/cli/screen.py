"""What is printed on."""

from __future__ import annotations

import errno
import os
from typing import NoReturn

from rich.console import Console

__all__ = ["Screen"]


class Screen(Console):
    """A console that reports a closed pipe as it does a full disk; rich would end the program."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
