"""Write docs/reference.md from the code: settings, backends, sampling, errors, verbs, commands.

With --check nothing is written; a page that is out of date is shown as a diff and the exit code
is 1.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, get_args

import click

import forkserve
from forkserve import errors
from forkserve.config import ENV_PREFIX, ForkServeConfig
from forkserve.control import generation

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference.md"
FACES = ("Engine", "Session", "Branch")
BACKENDS = {"LocalBackend": "engine/local/backend.py", "MockBackend": "engine/mock.py"}


def methods(face: str) -> dict[str, Any]:
    """Public methods and properties of one of the FACES, in the order of the source."""
    cls = getattr(forkserve, face)
    found = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("forkserve"):
            found |= {n: v for n, v in vars(base).items() if not n.startswith("_")}
    return {
        name: value
        for name, value in found.items()
        if callable(value) or isinstance(value, property | staticmethod | classmethod)
    }


def commands() -> dict[str, click.Command]:
    """Every command of the `forkserve` program by its full name, nested ones too."""
    cli = importlib.import_module("forkserve.cli")
    group = next(v for v in [cli.main, *vars(cli).values()] if isinstance(v, click.Group))

    def walk(parent: click.Group, prefix: str) -> Iterator[tuple[str, click.Command]]:
        for name in parent.list_commands(click.Context(parent)):
            command = parent.get_command(click.Context(parent), name)
            if command is None or command.hidden:
                continue
            yield prefix + name, command
            if isinstance(command, click.Group):
                yield from walk(command, f"{prefix}{name} ")

    return dict(walk(group, ""))


def type_name(annotation: Any) -> str:
    """A type as a reader writes it."""
    if isinstance(annotation, UnionType):
        return " or ".join(type_name(part) for part in get_args(annotation))
    if annotation is type(None):
        return "None"
    if isinstance(annotation, type):
        return annotation.__name__
    return " or ".join(f"`{choice}`" for choice in get_args(annotation)) or str(annotation)


def first_paragraph(value: Any) -> str:
    """The first paragraph of a docstring on one line."""
    text = inspect.getdoc(value) or ""
    return re.sub(r"\s+", " ", text.split("\n\n")[0]).strip()


@dataclass(frozen=True)
class Shown:
    """A default value as a reader writes it."""

    value: Any

    def __repr__(self) -> str:
        if isinstance(self.value, Enum):
            return str(self.value)
        if isinstance(self.value, str | int | float | tuple | None):
            return repr(self.value)
        return f"{type(self.value).__name__}()"


def shown(parameter: inspect.Parameter) -> inspect.Parameter:
    """A parameter without its type, with a short default."""
    empty = inspect.Parameter.empty
    default = empty if parameter.default is empty else Shown(parameter.default)
    return parameter.replace(annotation=empty, default=default)


def signature(name: str, value: Any) -> str:
    """A call as it is written, without `self`."""
    if isinstance(value, property):
        return name
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return f"{name}(...)"
    rest = [shown(p) for p in parameters if p.name not in ("self", "cls")]
    prefix = "await " if inspect.iscoroutinefunction(value) else ""
    return prefix + name + str(inspect.Signature(rest))


def settings_section() -> Iterator[str]:
    """One row for each field of ForkServeConfig."""
    yield "## Settings\n"
    yield "Fields of `ForkServeConfig`. An argument wins over the environment, which wins over the"
    yield f"default; the variable of `page_size` is `{ENV_PREFIX}PAGE_SIZE`.\n"
    yield "| name | type | default | meaning |\n|---|---|---|---|"
    for name, field in ForkServeConfig.model_fields.items():
        cells = (f"`{name}`", type_name(field.annotation), f"`{field.default!r}`")
        yield "| " + " | ".join([*cells, (field.description or "").replace("|", "\\|")]) + " |"


def entries(docstring: str, names: Sequence[str]) -> dict[str, str]:
    """Meanings by name, of a docstring that explains them as ``a: ...  b, c: ...``."""
    text = re.sub(r"\s+", " ", docstring)
    name = "(?:" + "|".join(names) + ")"
    parts = re.split(rf"(?:^|(?<=[.:] ))({name}(?:, {name})*): ", text)[1:]
    found = {}
    for heads, meaning in zip(parts[::2], parts[1::2], strict=True):
        found |= dict.fromkeys(heads.split(", "), meaning.strip().replace("``", "`"))
    return found


def constructor(name: str) -> tuple[str, dict[str, str]]:
    """Docstring of one of the BACKENDS, and its parameters after `config` with their defaults.

    From the source: the page must be the same where torch is not installed.
    """
    source = (Path(forkserve.__file__).parent / BACKENDS[name]).read_text(encoding="utf-8")
    found = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    cls = next(node for node in found if node.name == name)
    functions = (node for node in cls.body if isinstance(node, ast.FunctionDef))
    args = next(node for node in functions if node.name == "__init__").args
    placed = [arg.arg for arg in args.args[-len(args.defaults) :]] if args.defaults else []
    defaults = dict(zip(placed, args.defaults, strict=True))
    keywords = zip(args.kwonlyargs, args.kw_defaults, strict=True)
    defaults |= {arg.arg: default for arg, default in keywords if default is not None}
    shown = {name: ast.unparse(default) for name, default in defaults.items() if name != "config"}
    return ast.get_docstring(cls) or "", shown


def backends_section() -> Iterator[str]:
    """One row for each parameter of the backends that come with the package."""
    yield "\n## Backends\n"
    yield "Of `forkserve.engine`. A `ForkServeConfig` comes first, what follows is given by name:"
    yield '`LocalBackend(ForkServeConfig(), dtype="bfloat16")`.'
    for name in BACKENDS:
        docstring, defaults = constructor(name)
        meanings = entries(re.split(r"\bRaises ", docstring)[0], list(defaults))
        yield f"\n### {name}\n\n| name | default | meaning |\n|---|---|---|"
        for parameter, default in defaults.items():
            yield f"| `{parameter}` | `{default}` | {meanings[parameter]} |"


def sampling_section() -> Iterator[str]:
    """One row for each field of SamplingParams, and one for each way a generation ends."""
    params = fields(forkserve.SamplingParams)
    meanings = entries(inspect.getdoc(forkserve.SamplingParams) or "", [f.name for f in params])
    yield "\n## Sampling\n"
    yield "Fields of `SamplingParams`; sessions and branches take them as keywords too."
    yield "Constraints: [sessions](sessions.md#constraints).\n"
    yield "| name | default | meaning |\n|---|---|---|"
    for field in params:
        yield f"| `{field.name}` | `{field.default!r}` | {meanings[field.name]} |"
    yield "\n`finish_reason` of a reply, `None` while a stream runs:\n"
    yield "| reason | when |\n|---|---|"
    reasons = get_args(generation.FinishReason)
    meanings = entries(generation.__doc__ or "", reasons)
    for reason in meanings:
        yield f"| `{reason}` | {meanings[reason]} |"


def errors_section() -> Iterator[str]:
    """One row for each public error."""
    yield "\n## Errors\n"
    yield "| class | is also a | raised when |\n|---|---|---|"
    for name in errors.__all__:
        cls = getattr(errors, name)
        bases = ", ".join(f"`{base.__name__}`" for base in cls.__bases__)
        yield f"| `{name}` | {bases} | {first_paragraph(cls)} |"


def verbs_section() -> Iterator[str]:
    """The public methods of the engine and of the objects above it."""
    for face in FACES:
        yield f"\n## {face}\n"
        yield first_paragraph(getattr(forkserve, face)) + "\n"
        for name, value in methods(face).items():
            yield f"* `{signature(name, value)}`: {first_paragraph(value)}"


def commands_section() -> Iterator[str]:
    """The help text of each command."""
    yield "\n## Commands"
    for name, command in commands().items():
        context = click.Context(
            command,
            info_name=f"forkserve {name}",
            max_content_width=96,
            help_option_names=["-h", "--help"],  # what commands inherit from the program
        )
        yield f"\n### forkserve {name}\n\n```text\n{command.get_help(context)}\n```"


SECTIONS = (
    settings_section,
    backends_section,
    sampling_section,
    errors_section,
    verbs_section,
    commands_section,
)


def page() -> str:
    """The whole page."""
    lines = ["# Reference\n", "Written by `make docs` from the code; do not edit by hand.\n"]
    for section in SECTIONS:
        lines += section()
    return "\n".join(line.rstrip() for line in "\n".join(lines).splitlines()) + "\n"


def main() -> int:
    """Write the page, or with --check compare it."""
    new = page()
    old = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    if "--check" not in sys.argv[1:]:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(new, encoding="utf-8")
        print(f"{PAGE.name}: {'unchanged' if new == old else 'written'}")
        return 0
    if new == old:
        print(f"{PAGE.name} is up to date")
        return 0
    lines = old.splitlines(), new.splitlines()
    print("\n".join(difflib.unified_diff(*lines, "docs/reference.md", "code", n=1)))
    print("docs/reference.md is out of date; run: make docs")
    return 1


if __name__ == "__main__":
    sys.exit(main())
