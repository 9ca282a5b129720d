"""`forkserve store`: look at durable states, check them, move them, throw them away.

Exit codes: 0 all is well; 1 something is damaged, or was not found by `lookup`; 2 a wrong option or
a directory that is not a usable store.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from forkserve.cli import store_care
from forkserve.cli.store_base import Amount, Group, Where, argument, pass_where
from forkserve.cli.store_text import checked, short, size, table, token_ids, tree_lines, when
from forkserve.errors import StoreError
from forkserve.values import counted

__all__ = ["group"]


@click.group("store", cls=Group)
@click.option(
    "-d",
    "--dir",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="FORKSERVE_STORE",
    default=".",
    show_default=True,
    help="The store's directory; $FORKSERVE_STORE.",
)
@click.option("--key", metavar="FILE|env:NAME", help="Key of an encrypted store.")
@click.option(
    "--far",
    metavar="URL",
    envvar="FORKSERVE_STORE_FAR",
    help="A further place: s3://BUCKET/PREFIX?endpoint=..., or a directory; $FORKSERVE_STORE_FAR.",
)
@click.option("--json", "as_json", is_flag=True, help="JSON on standard output.")
@click.pass_context
def group(
    ctx: click.Context, folder: Path, key: str | None, far: str | None, as_json: bool
) -> None:
    """Look at durable states, check, move and drop them.

    These options go before the command: forkserve store --json ls.
    """
    ctx.obj = Where(folder, key, as_json, far)


for _command in store_care.COMMANDS:
    group.add_command(_command)


# -------------------------------------------------------------------- looking


@group.command("ls")
@pass_where
def _ls(at: Where) -> None:
    """List sessions and named states."""
    from forkserve.store import admin

    with at.open() as store:
        found = {
            "sessions": admin.sessions(store.catalog),
            "names": admin.names(store.catalog, store.near),
        }
    first = table(
        found["sessions"],
        {
            "session": str,
            "tenant": str,
            "tokens": str,
            "nodes": str,
            "lines": str,
            "updated_at": when,
            "closed_at": when,
        },
        "no session",
    )
    second = table(
        found["names"],
        {"name": str, "tokens": str, "stored": str, "far": str, "chain": short, "created_at": when},
        "no named state",
    )
    at.say(found, f"{first}\n\n{second}")


@group.command("show")
@argument("what", "A name, a session or a chain id.")
@pass_where
def _show(at: Where, what: str) -> None:
    """Show the chunks behind a name or a session.

    WHAT: a name, a session's id, a chain id, or one FILE.kv.
    """
    from forkserve.store import admin

    path = Path(what)
    if path.suffix == ".kv" and path.is_file():
        found = admin.describe_file(path)
        at.say(found, "\n".join(f"{k:12} {v}" for k, v in found.items()))
        return
    with at.open() as store:
        found = admin.describe(store, what)
    columns: dict[str, Callable[[Any], str]] = {"chain": short, "start": str, "tokens": str}
    columns |= {"format": str, "bytes": size, "places": str, "uses": str, "content": short}
    at.say(found, table(found["chunks"], columns, "no chunk of it is stored"))


@group.command("lookup")
@argument(
    "tokens",
    "Ids with commas or spaces, a JSON list, or @FILE with either.",
    metavar="TOKENS|@FILE",
)
@click.option("--salt", default="default", show_default=True, help="Salt, or the tenant's name.")
@click.pass_context
def _lookup(ctx: click.Context, tokens: str, salt: str) -> None:
    """Say how much of a prompt is stored.

    TOKENS: ids with commas or spaces (1,2,3), a JSON list ([1, 2, 3]), or @FILE with either.
    Exit code 1 if nothing is.
    """
    from forkserve.store import admin

    at: Where = ctx.obj
    try:
        ids = token_ids(Path(tokens[1:]).read_text("utf-8") if tokens[:1] == "@" else tokens)
    except ValueError as error:
        raise click.BadParameter(
            f"{error}; give ids with commas or spaces (1,2,3), a JSON list ([1, 2, 3]), or @FILE "
            "with either"
        ) from None
    with at.open() as store:
        found = admin.find_prefix(store, ids, salt)
    columns: dict[str, Callable[[Any], str]] = {"fingerprint": short, "architecture": str}
    columns |= {"kv_dtype": str, "tokens": str, "chunks": str, "bytes": size}
    at.say(found, table(found, columns, "the store has no chunk"))
    if not any(row["tokens"] for row in found):
        ctx.exit(1)


@group.command("tree")
@argument("session", "A session's id.")
@pass_where
def _tree(at: Where, session: str) -> None:
    """Draw the committed tree of a session.

    A line of it runs straight down, after the lines that leave it; * is its end.
    """
    from forkserve.store import admin

    with at.open() as store:
        rows = admin.tree_rows(store.catalog, session)
    at.say(rows, "\n".join(tree_lines(rows)))


@group.command("du")
@pass_where
def _du(at: Where) -> None:
    """Say what the store takes, as it counts and as the disk does."""
    from forkserve.store import admin

    with at.open() as store:
        found = admin.disk_usage(store)
    at.say(found, table(_du_rows(found), {"": str, "bytes": size, "what": str}, ""))


def _du_rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[tuple[str, int, str]] = []
    for place, row in found["places"].items():
        listed = f"{size(row['listed'])} in {counted(row['parts'], 'part')} listed"
        if row["used"] is None:
            rows.append((place, row["listed"], f"{listed}; not looked at"))
        else:
            rows.append((place, row["used"], f"{counted(row['files'], 'file')}; {listed}"))
        if row.get("leftovers"):
            what = counted(row["leftovers"], "unfinished file")
            rows.append((place, row["leftover_bytes"], what))
        if row.get("aside"):
            what = f"{counted(row['aside'], 'damaged file')} in quarantine"
            rows.append((place, row["aside_bytes"], what))
        if row.get("outside"):
            what = f"{counted(row['outside'], 'file')} outside of this store's folder"
            rows.append((place, 0, what))
        if row.get("waiting"):
            rows.append((place, 0, f"{counted(row['waiting'], 'chunk')} without a receipt yet"))
    rows.append(("catalog", found["catalog"], f"database of store {found['store']}"))
    return [dict(zip(("", "bytes", "what"), row, strict=True)) for row in rows]


class _Query(click.Command):
    """A query may begin with a comment, as those of docs/sql.md do; click would see an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        comment = re.compile(r"--\s")
        return super().parse_args(ctx, [f" {a}" if comment.match(a) else a for a in args])


@group.command("sql", cls=_Query)
@argument("query", "SQL that only reads.")
@pass_where
def _sql(at: Where, query: str) -> None:
    """Run a read-only QUERY; --json for JSON, else one line a row."""
    from forkserve.store import admin

    with at.open():
        rows = admin.query(at.folder, query)
    text = table(rows, dict.fromkeys(rows[0], str), "") if rows else "no row"
    at.say(rows, text)


# -------------------------------------------------------------------- checking


@group.command("verify")
@click.pass_context
def _verify(ctx: click.Context) -> None:
    """Hash every stored byte and check the database.  Exit code 1 if something is damaged.

    Damaged chunks are set aside; their rows are computed again when they are needed.
    """
    from forkserve.store.rebuild import verify

    at: Where = ctx.obj
    with at.open(write=True) as store, at.progress("verify") as show:
        report = verify(store.vault, show)
    found = {
        "checked": report.checked,
        "bytes": report.bytes,
        "damaged": [{"place": p, "content": c, "why": w} for p, c, w in report.faults],
        "missing": report.dangling,
        "orphans": report.orphans,
        "problems": report.problems,
        "clean": report.clean,
    }
    lines = checked(report)
    if report.orphans:
        lines.append(f"{counted(report.orphans, 'file')} that nothing names, for gc to take")
    at.say(found, "\n".join([*lines, *report.problems]))
    if not report.clean:
        ctx.exit(1)


@group.command("gc")
@click.option(
    "--grace", type=Amount(min=0), default=86400.0, show_default=True, help="s that garbage stays."
)
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@pass_where
def _gc(at: Where, grace: float, dry_run: bool) -> None:
    """Throw away what no name, pin or open session reaches.

    Leftovers of crashes go as well.
    """
    from dataclasses import asdict

    from forkserve.store.collect import collect

    with at.open(write=True) as store, at.progress("gc") as show:
        found = asdict(collect(store.vault, grace_s=grace, dry_run=dry_run, progress=show))
    text = f"{counted(found['chunks'], 'chunk')} ({size(found['bytes'])})"
    for what in ("orphan", "leftover", "pin", "session"):
        text += f", {counted(found[f'{what}s'], what)}"
    at.say({**found, "dry_run": dry_run}, text + (" would go" if dry_run else " are gone"))


# -------------------------------------------------------------------- keeping and moving


@group.command("pin")
@argument("what", "A name, a session or a chain id.")
@click.option("--ttl", type=Amount(min=0, min_open=True), help="s until it ends.  [default: never]")
@click.option("--owner", default="cli", show_default=True, help="Who pins.")
@pass_where
def _pin(at: Where, what: str, ttl: float | None, owner: str) -> None:
    """Keep the chunks behind a NAME, a SESSION or a chain id."""
    from forkserve.store import admin

    with at.open(write=True) as store:
        done = admin.pin(store.catalog, what, owner, ttl)
    until = "for good" if done["until"] is None else f"until {when(done['until'])}"
    at.say({**done, "owner": owner}, f"pinned {done['chain'][:16]} {until}")


@group.command("unpin")
@argument("what", "A name, a session or a chain id.")
@click.option("--owner", default="cli", show_default=True, help="Whose pin.")
@pass_where
def _unpin(at: Where, what: str, owner: str) -> None:
    """Take a pin away."""
    from forkserve.store import admin

    with at.open(write=True) as store:
        count = admin.unpin(store.catalog, what, owner)
    at.say({"removed": count}, f"{counted(count, 'pin')} removed")


@group.command("name")
@argument("name", "Name of a state.")
@click.option("--to", metavar="NEW", help="Rename it.")
@click.option("--remove", is_flag=True, help="Forget it; gc may take its chunks then.")
@pass_where
def _name(at: Where, name: str, to: str | None, remove: bool) -> None:
    """Rename or remove the name of a state.

    `Engine.publish` gives names.
    """
    from forkserve.store.records import remove_name, rename

    if (to is None) == (not remove):
        raise click.UsageError("give either --to or --remove")
    with at.open(write=True) as store:
        if remove:
            remove_name(store.catalog, name)
        else:
            assert to is not None
            rename(store.catalog, name, to, store.sealer)
    at.say(
        {"name": name, "to": to, "removed": remove}, f"{name} " + (f"-> {to}" if to else "removed")
    )


@group.command("export")
@argument("file", "File to write.", type=click.Path(path_type=Path, dir_okay=False))
@argument("what", "Names of states, ids of sessions; none: every named state.", nargs=-1)
@click.option("--session", "sessions", multiple=True, help="A session whose id is a name as well.")
@click.option("--force", is_flag=True, help="Overwrite FILE if it exists.")
@pass_where
def _export(
    at: Where, file: Path, what: tuple[str, ...], sessions: tuple[str, ...], force: bool
) -> None:
    """Write named states and whole sessions to one file.

    Their KV goes with them. Without WHAT it is every named state. A session goes with its tree, its
    commits and what was published of its rows.
    """
    from forkserve.store import admin
    from forkserve.store.bundle import export_bundle

    with at.open() as store, at.progress("export") as show:
        if os.path.lexists(file) and not force:
            raise StoreError(
                f"{file} exists and was left as it is: give another file, or --force to overwrite"
            )
        names, more = admin.sort_out(store.catalog, what)
        more += sessions
        done = export_bundle(store.vault, file, names, more, show, overwrite=force)
        left = admin.lossy_only(store.catalog, names, more)
    _say_bundle(at, done, "exported")
    if left:
        text = f"{counted(left, 'chunk')} left out: stored in a lossy format alone"
        click.echo(text, err=True)


@group.command("import")
@argument(
    "file",
    "A file that `export` wrote.",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
)
@click.option("--as", "as_session", metavar="NEWID", help="The id that its one session gets here.")
@pass_where
def _import(at: Where, file: Path, as_session: str | None) -> None:
    """Take in the states and sessions of a file.

    A changed or cut file is refused as a whole. Sessions are taken in while no engine owns the
    store.
    """
    from forkserve.store import Store, admin
    from forkserve.store.bundle import has_sessions, import_bundle

    role: Any = "owner" if has_sessions(file) else "shared"
    with (
        admin.making_room(at.folder),
        Store(at.folder, role, encrypt=at.key) as store,
        at.progress("import") as show,
    ):
        done = import_bundle(store.vault, file, show, as_session=as_session)
    _say_bundle(at, done, "imported")


def _say_bundle(at: Where, done: Any, verb: str) -> None:
    value = {"names": list(done.names), "sessions": list(done.sessions)}
    value |= {"chunks": done.chunks, "bytes": done.bytes}
    counts = {"state": len(done.names), "session": len(done.sessions), "chunk": done.chunks}
    text = ", ".join(counted(count, what) for what, count in counts.items())
    text = f"{verb} {text}, {size(done.bytes)}"
    at.say(value, text)
