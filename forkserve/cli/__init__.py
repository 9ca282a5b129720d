"""The command `forkserve`.  Each part loads when its command runs."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import click

from forkserve import __version__
from forkserve.cli.faults import Group
from forkserve.cli.store import group as _store

__all__ = ["main"]


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="forkserve")
def main() -> None:
    """Hold the tree of an agent's steps in your hands: fork, speculate, commit, abort."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a screen that can't show a sign is no fault
            stream.reconfigure(errors="replace")


@main.command("demo")
@click.option(
    "--backend",
    type=click.Choice(["mock", "local"]),
    help="The deterministic mock, or the bundled engine.  [default: local if it is installed]",
)
@click.option(
    "--model",
    metavar="NAME|PATH",
    help="A GGUF file, a folder of safetensors, or smollm2.  [default: smollm2]",
)
@click.option(
    "--file",
    type=click.Path(path_type=Path),
    help="A text of your own, UTF-8.  [default: a pumping station's logbook]",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Root of every random draw.")
@click.option(
    "--branches",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    help="Attempts at the last answer, in one batch.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Longest answer.",
)
@click.option("--no-speculate", is_flag=True, help="Do not work while a tool runs.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@click.pass_context
def _demo(ctx: click.Context, /, as_json: bool, no_speculate: bool, **options: Any) -> None:
    """Watch an agent fork, speculate, commit and abort.

    It answers questions about a text with tools that really run, and speculates while they do.
    Every turn is run with and without speculation, and every committed token is compared with those
    of an engine that did none of it.
    Exit code 1 if one differs, 2 for a wrong option.
    """
    from forkserve.cli.demo import Options, run_demo

    if not run_demo(Options(speculate=not no_speculate, as_json=as_json, **options)):
        ctx.exit(1)


@main.command("tree")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def _tree(as_json: bool) -> None:
    """Draw the tree of the last demo.

    It shows what was committed, what was aborted, what each cost. The run is kept in
    $XDG_STATE_HOME/forkserve/last-run.json; FORKSERVE_STATE names another file.
    """
    from forkserve.cli.tree import run_tree

    run_tree(as_json=as_json)


@main.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@click.pass_context
def _doctor(ctx: click.Context, as_json: bool) -> None:
    """Say what is installed, what is missing, how fast it is.

    That is packages, extras, native kernels and devices.
    Exit code 1 if something that every user needs is broken; a missing extra is no fault.
    """
    from forkserve.cli.doctor import run_doctor

    if not run_doctor(as_json=as_json):
        ctx.exit(1)


@main.command("template-check")
@click.argument("model", metavar="MODEL")
@click.argument(
    "conversation",
    required=False,
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="[CONVERSATION]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@click.pass_context
def _template_check(
    ctx: click.Context, model: str, conversation: Path | None, as_json: bool
) -> None:
    """Show where a chat template breaks the prefix.

    A conversation is rendered turn by turn. MODEL is a GGUF file, a folder with tokenizer.json, or
    smollm2; weights are not read.
    CONVERSATION is a JSON file: a list of messages, or an object with "messages" and "tools"; an
    assistant's message may hold "raw", its text as the model wrote it. Without it a built-in
    one is used, with reasoning, calls and results. Exit code 1 if a prompt does not begin with all
    that was held before it, 2 for a model or a conversation that cannot be read.
    """
    from forkserve.cli.template_check import run_template_check

    if not run_template_check(model, conversation, as_json=as_json):
        ctx.exit(1)


main.add_command(_store, "store")
