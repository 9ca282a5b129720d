"""What the commands of `forkserve store` share: options, output, errors in one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import click

from forkserve.cli import faults

__all__ = ["Amount", "Group", "Progress", "Where", "argument", "pass_where"]

Progress = Callable[[int, int], None]
F = TypeVar("F", bound=Callable[..., Any])


class Amount(click.FloatRange):
    """A number of at least `min` that is finite: NaN is less than nothing and more than nothing."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        found = float(super().convert(value, param, ctx))
        if not isfinite(found):
            self.fail(f"{value} is not finite.", param, ctx)
        return found


class Group(faults.Group):
    """An option of the group that stands behind a command is refused with its right place."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            own = next((p for p in self.params if error.option_name in p.opts), None)
            if not isinstance(own, click.Option) or error.ctx is None:
                raise
            value = "" if own.is_flag else f" {own.metavar or own.type.name.upper()}"
            raise click.NoSuchOption(
                error.option_name,
                f"'{error.option_name}' goes before the command: {ctx.command_path} "
                f"{error.option_name}{value} {error.ctx.info_name}",
                ctx=error.ctx,
            ) from error


class _Argument(click.Argument):
    """An argument that says what it is, also where click's own takes no help."""

    def __init__(self, *names: Any, help: str, **options: Any) -> None:
        super().__init__(*names, **options)
        self.help = help


def argument(name: str, help: str, **options: Any) -> Callable[[F], F]:
    """`click.argument` with a help text."""
    return click.argument(name, cls=_Argument, help=help, **options)


class Where:
    """Options that all commands share."""

    def __init__(
        self, folder: Path, key: str | None, as_json: bool, far: str | None = None
    ) -> None:
        self.folder = folder
        self.key = key
        self.far = far
        self.as_json = as_json

    @contextmanager
    def open(self, *, write: bool = False) -> Iterator[Any]:
        from forkserve.store.admin import open_store

        with open_store(self.folder, write=write, key=self.key, far=self.far) as store:
            yield store

    def say(self, value: Any, text: str) -> None:
        """One JSON object, or lines for people."""
        if self.as_json:
            text = json.dumps(_plain(value), indent=2, default=str)
        click.echo(text)

    @contextmanager
    def progress(self, label: str) -> Iterator[Progress]:
        """A bar on standard error for work that takes long, where somebody is looking."""
        if self.as_json or sys.stderr is None or not sys.stderr.isatty():
            yield lambda done, total: None
            return
        with click.progressbar(length=1, label=label, file=sys.stderr) as bar:

            def show(done: int, total: int) -> None:
                bar.length = max(total, 1)
                bar.update(done - bar.pos)

            yield show


def _plain(value: Any) -> Any:
    """What JSON can say: no infinity, and bytes in hex."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not isfinite(value):
        return None
    return value.hex() if isinstance(value, bytes) else value


pass_where = click.make_pass_decorator(Where)
