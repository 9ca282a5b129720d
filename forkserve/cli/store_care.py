"""Commands that keep a store well: rebuild, scrub, stats, doctor, decisions, migrate, push."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import click

from forkserve.cli.store_base import Amount, Where, pass_where
from forkserve.cli.store_text import checked, size, table
from forkserve.errors import StoreError
from forkserve.values import counted

__all__ = ["COMMANDS"]

_LOOK_S = 0.5  # between two looks at how far a push is


@click.command("scrub")
@click.option("--bytes", "most", type=click.IntRange(1), help="Most to hash.  [default: all]")
@click.option("--rate", type=Amount(min=1), help="Bytes a second.  [default: no limit]")
@click.pass_context
def _scrub(ctx: click.Context, most: int | None, rate: float | None) -> None:
    """Hash a slice of what is stored, the longest unseen first.

    Damaged chunks are set aside.  Exit code 1 if there was one.
    """
    from forkserve.store.scrub import scrub

    at: Where = ctx.obj
    with at.open(write=True) as store, at.progress("scrub") as show:
        report = scrub(store.vault, most_bytes=most, rate=rate, progress=show)
    found = {
        "checked": report.checked,
        "bytes": report.bytes,
        "damaged": [{"place": p, "content": c, "why": w} for p, c, w in report.faults],
        "missing": report.dangling,
        "problems": report.problems,
    }
    at.say(found, "\n".join([*checked(report), *report.problems]))
    if not report.clean:
        ctx.exit(1)


@click.command("stats")
@click.option("--prometheus", is_flag=True, help="In the text format of Prometheus.")
@pass_where
def _stats(at: Where, prometheus: bool) -> None:
    """Show what lies where, what waits, and totals.

    Totals count since the store was made.
    """
    from forkserve.store import metrics

    with at.open() as store:
        found = store.metrics()
    if prometheus:
        click.echo(metrics.prometheus(found), nl=False)
        return
    tiers = [{"tier": tier, **row} for tier, row in found["tiers"].items()]
    parts = [table(tiers, {"tier": str, "bytes": size, "parts": str}, "no tier")]
    waiting = [
        f"{counted(count, 'chunk')} to go to {queue[3:]}"
        for queue, count in found["queued"].items()
        if queue.startswith("to_")
    ]
    totals = [{"total": name, "value": value} for name, value in found["totals"].items()]
    parts += waiting
    none = "no events, and nothing has left a tier"
    parts.append(table(totals, {"total": str, "value": lambda v: f"{v:g}"}, none))
    at.say(found, "\n\n".join(parts))


@click.command("doctor")
@click.pass_context
def _doctor(ctx: click.Context) -> None:
    """Cross-check database and files, without reading chunks.

    Exit code 1 if they disagree.  `verify` also hashes every byte.
    """
    from forkserve.store.checkup import checkup

    at: Where = ctx.obj
    with at.open() as store:
        found = checkup(store)
    rows: list[dict[str, Any]] = [
        {"check": c.name, "": "ok" if c.ok else "WRONG", "found": c.found} for c in found
    ]
    ok = all(check.ok for check in found)
    at.say(
        {"ok": ok, "checks": [{"name": c.name, "ok": c.ok, "found": c.found} for c in found]},
        table(rows, {"check": str, "": str, "found": str}, ""),
    )
    if not ok:
        ctx.exit(1)


@click.command("migrate")
@pass_where
def _migrate(at: Where) -> None:
    """Bring the database to the version of this ForkServe.

    Does nothing when it is there. Opening a store for writing does the same. A newer database is
    refused.
    """
    from forkserve.store.schema import VERSION, version_of

    before = version_of(at.folder)
    with at.open(write=True):
        pass
    done = "is at" if before == VERSION else f"went from version {before} to"
    at.say({"from": before, "to": VERSION}, f"the database {done} version {VERSION}")


@click.command("push")
@click.option(
    "--wait",
    type=Amount(min=0),
    default=600.0,
    show_default=True,
    help="s to wait for all receipts.",
)
@click.pass_context
def _push(ctx: click.Context, wait: float) -> None:
    """Bring every chunk that the further place (--far) lacks there.

    Exit code 1 if some are left.
    """
    from forkserve.store import Store

    at: Where = ctx.obj
    if at.far is None:
        raise StoreError("say where to: forkserve store --far URL push")
    with at.open():
        pass  # it must be a store
    with Store(at.folder, "shared", encrypt=at.key, far=[at.far], write_behind=True) as store:
        behind = store.behind
        assert behind is not None
        with at.progress("push") as show:
            while behind.catch_up():
                total, end = behind.waiting(), time.monotonic() + wait
                while not behind.drain(min(_LOOK_S, wait)) and time.monotonic() < end:
                    show(total - behind.waiting(), total)
                if behind.waiting():
                    break
                show(total, total)
        left, sent = behind.waiting(), behind.sent
    found = {"sent": sent.chunks, "bytes": sent.bytes, "left": left, "error": sent.last_error}
    why = f": {sent.last_error}" if left and sent.last_error else ""
    at.say(found, f"{counted(sent.chunks, 'chunk')} sent, {size(sent.bytes)}; {left:,} left{why}")
    if left:
        ctx.exit(1)


@click.command("decisions")
@click.option("--session", help="Of this session only.")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="At most.")
@click.pass_context
def _decisions(ctx: click.Context, session: str | None, limit: int) -> None:
    """List what was decided and why, and decide again.

    Restores, moves to memory and evictions. What was chosen by numbers (restore or prefill, to move
    or not) is chosen once more from the record: exit code 1 if that does not come out the same.
    """
    from forkserve.store.decisions import decisions

    at: Where = ctx.obj
    with at.open() as store:
        found = decisions(store.catalog, session, limit)
    again = {True: "same", False: "DIFFERS", None: ""}
    rows = [{**row, "again": again[row["repeats"]]} for row in found]
    ms = dict.fromkeys(("gain_ms", "cost_ms", "actual_ms"), _ms)
    words = ("id", "session", "node", "what", "verdict", "reason", "tokens")
    at.say(found, table(rows, {**dict.fromkeys(words, str), **ms, "again": str}, "no decision"))
    if any(row["repeats"] is False for row in found):
        ctx.exit(1)


@click.command("rebuild")
@click.option(
    "--from",
    "take",
    multiple=True,
    metavar="ID",
    help="Copy in what another store has in the further place; all: what every one has.",
)
@click.option("--as", "store_id", metavar="ID", help="The id that the lost database had.")
@pass_where
def _rebuild(at: Where, take: tuple[str, ...], store_id: str | None) -> None:
    """Make the list of chunks again from the files alone.

    From those of --far as well. Sessions and names are only in the database: a lost one takes them
    with it. In a further place each store has a folder that is called as its id (`du` shows it);
    --as makes a new store the owner of an old folder.
    """
    from forkserve.store import Store, admin
    from forkserve.store.rebuild import rebuild

    lost = (at.folder / "chunks").is_dir()  # a store whose database is gone
    if not lost and at.far is None:
        raise StoreError(
            f"{at.folder} has no folder 'chunks', and no --far URL was given: there is nothing to "
            "rebuild from"
        )
    far = [at.far] if at.far is not None else []
    with nullcontext() if lost else admin.making_room(at.folder):
        if store_id is not None:
            admin.take_id(at.folder, store_id)
        with (
            Store(at.folder, "shared", encrypt=at.key, far=far) as store,
            at.progress("rebuild") as show,
        ):
            report = rebuild(store.vault, show, take)
    found = {"files": report.checked, "adopted": report.adopted, "struck": report.dangling}
    found |= {"damaged": len(report.faults), "copied": report.copied}
    text = ", ".join(f"{v} {k}" for k, v in found.items())
    if report.others and not take:
        text += f"\nother stores have folders there (--from): {', '.join(report.others)}"
    at.say({**found, "others": report.others}, text)


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


COMMANDS = (_rebuild, _scrub, _stats, _doctor, _decisions, _migrate, _push)
