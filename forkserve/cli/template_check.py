"""`forkserve template-check`: where a model's chat template breaks the prefix."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path

import click

from forkserve.adapters.checking import Step, check_template, read_conversation
from forkserve.engine import needs_engine_extra
from forkserve.errors import ConfigError

__all__ = ["run_template_check"]

_BUILT_IN = "tool_conversation.json"
_WIDTH = 96


def run_template_check(model: str, conversation: Path | None, *, as_json: bool) -> bool:
    """Print the steps; whether every one keeps all that was held and leaves nothing out."""
    with needs_engine_extra():
        from forkserve.engine.local.checkpoint import open_tokenizer

    given = read_conversation(*_read(conversation))
    report = check_template(open_tokenizer(model), given)
    if as_json:
        rows = [
            {**asdict(step), "again": step.again, "added": step.added, "ok": step.ok}
            for step in report.steps
        ]
        whole = {"model": model, "ok": report.ok, "folded": report.folded, "steps": rows}
        click.echo(json.dumps(whole, indent=2))
        return report.ok
    if report.folded:
        click.echo("The template takes no system message; it stands before the first user's text.")
    for step in report.steps:
        _show(step)
    click.echo(_verdict(report.steps))
    return report.ok


def _read(path: Path | None) -> tuple[object, str]:
    """The conversation's JSON and what to call it."""
    if path is None:
        return json.loads((files("forkserve.cli") / _BUILT_IN).read_text("utf-8")), _BUILT_IN
    try:
        return json.loads(path.read_text(encoding="utf-8")), str(path)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"cannot read the conversation {path}: {error}") from error


def _show(step: Step) -> None:
    then = {"tool": "a tool's result", "user": "the user"}.get(step.then, step.then)
    head = f"turn {step.turn}, then {then}"
    if step.refused:
        click.secho(f"{head}: the template refuses the next prompt", fg="red")
        click.echo(f"    {_line(step.refused)}")
        return
    click.echo(
        f"{click.style(head, bold=True)}: {step.held} tokens held, {step.kept} kept, "
        f"{step.again} written anew, {step.added} to compute for a prompt of {step.prompt}"
    )
    if step.again:
        where = {"turn": "inside the turn", "prompt": "before the turn"}[step.inside]
        click.echo(f"    the prefix breaks {where}; what was decoded (-), the next prompt (+):")
        click.secho(f"    - {_line(step.before)}", fg="red")
        click.secho(f"    + {_line(step.after)}", fg="green")
    if step.lost:
        which = ", ".join(map(str, step.lost))
        click.secho(
            f"    the next prompt leaves out the text of message {which} (from 0)", fg="red"
        )
    if step.drift:
        click.secho(f"    nothing is known while the tool runs: {_line(step.drift)}", fg="yellow")
    elif step.then == "tool":
        click.echo(f"    known while the tool runs: {step.known} tokens")
        click.echo(f"      {_line(step.wrapper)} RESULT {_line(step.close)}")


def _line(text: str) -> str:
    """Text on one line, its middle left out if it is long, with what can't be seen written out."""
    shown = json.dumps(text, ensure_ascii=False)
    if len(shown) > _WIDTH:
        shown = f"{shown[: _WIDTH // 2]} … {shown[-_WIDTH // 2 :]}"
    return shown


def _verdict(steps: list[Step]) -> str:
    broken = [step for step in steps if not step.ok]
    if not broken:
        return click.style(f"The prefix holds after all {len(steps)} turns.", fg="green")
    lost = {number for step in steps for number in step.lost}
    if lost:
        said = "message" if len(lost) == 1 else "messages"
        return click.style(f"The template leaves out the text of {len(lost)} {said}.", fg="red")
    again = sum(step.again for step in broken)
    text = f"The prefix breaks after {len(broken)} of {len(steps)} turns"
    if again:
        text += f"; {again} tokens that were decoded or prefilled are computed again"
    if any(step.assumed and step.again for step in broken):
        text += (
            ". No text of the model's was recorded: it is taken to write what the template writes "
            "for a last message, after its reasoning"
        )
    return click.style(f"{text}.", fg="red")
