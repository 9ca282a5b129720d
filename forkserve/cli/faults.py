"""How a command ends badly: one line on standard error, and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

import click

from forkserve.errors import ForkServeError

__all__ = ["Group"]


class _Fault(click.ClickException):
    """An error of ours, or of the operating system, as one red line."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        with suppress(OSError):  # standard error may be as full as standard output
            click.secho(f"Error: {' '.join(self.message.split())}", fg="red", err=True)


class _Interrupted(click.ClickException):
    """Ctrl-C, with the exit code that shells give it."""

    exit_code = 130

    def show(self, file: IO[Any] | None = None) -> None:
        with suppress(OSError):
            click.echo("Interrupted.", err=True)


class Group(click.Group):
    """Errors of ours, and of the operating system, in one line.

    That of an output which cannot be written as well: a full disk, a pipe that nobody reads.
    """

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with _one_line():  # --help and --version print here
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _one_line():
            return super().invoke(ctx)


@contextmanager
def _one_line() -> Iterator[None]:
    try:
        try:
            yield
        except click.exceptions.Exit:
            _flush()
            raise
        else:
            _flush()  # else Python meets the fault when it ends, and has its own words
    except ForkServeError as error:
        raise _Fault(str(error)) from error
    except OSError as error:
        _let_go()
        raise _Fault(str(error)) from error
    except KeyboardInterrupt as error:
        raise _Interrupted("interrupted") from error


def _flush() -> None:
    if sys.stdout is not None:  # Python's word for one that was closed before the program began
        sys.stdout.flush()


def _let_go() -> None:
    """Drop output that cannot be written: Python would try again when it ends."""
    try:
        _flush()
    except OSError:
        with suppress(OSError):  # a stream without a descriptor
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)
