"""`forkserve tree`: the last run, drawn."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from forkserve.cli.record import RunNode, load_run
from forkserve.cli.words import one_line
from forkserve.values import counted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text
    from rich.tree import Tree

__all__ = ["run_tree"]

_STYLES = {"committed": "green", "won": "bold green", "aborted": "red", "lost": "red"}
_NO_WIDTH = 400


def run_tree(*, as_json: bool) -> None:
    """Print the tree of the last run."""
    head, nodes = load_run()
    if as_json:
        print(json.dumps({**head, "nodes": [asdict(node) for node in nodes]}))
        return
    from rich.text import Text

    console = _console()
    dead = [node for node in nodes if node.outcome in ("aborted", "lost")]
    console.print(
        Text(
            f"{head.get('model')} on {head.get('device')}, {head.get('document')}: "
            f"{len(nodes)} nodes, {len(dead)} aborted"
        )
    )
    console.print(draw(nodes))


def _console() -> Console:
    """The screen; a file or a pipe has no width, so lines there are as long as they come."""
    from forkserve.cli.screen import Screen

    console = Screen(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _NO_WIDTH
    return console


def draw(nodes: Sequence[RunNode]) -> Tree:
    """A rich tree, a line for a node.

    The committed line runs straight down; branches hang beside it.
    A node's committed child is drawn below it on the same level: an agent's line is long, and an
    indent for each turn would leave the screen.
    """
    from rich.tree import Tree

    children: dict[int | None, list[RunNode]] = {}
    for node in nodes:
        children.setdefault(node.parent, []).append(node)
    root = children[None][0]
    top = Tree(_label(root), guide_style="dim")
    spine: RunNode | None = root
    while spine is not None:
        following = None
        below = children.get(spine.id, [])
        for node in sorted(below, key=lambda n: (n.outcome in ("committed", "won"), n.id)):
            if node.outcome in ("committed", "won") and following is None:
                following = node
            else:
                _hang(top, node, children)
        if following is not None:
            top.add(_label(following))
        spine = following
    return top


def _hang(above: Tree, node: RunNode, children: dict[int | None, list[RunNode]]) -> None:
    here = above.add(_label(node))
    for child in children.get(node.id, []):
        _hang(here, child, children)


def _label(node: RunNode) -> Text:
    from rich.text import Text

    style = _STYLES.get(node.outcome, "")
    mark = {"aborted": "✗ ", "lost": "✗ ", "won": "★ "}.get(node.outcome, "● ")
    cost = f"{counted(node.tokens, 'token')}, {counted(node.pages, 'page')}"
    text = f"  “{one_line(node.text)}”" if node.text else ""
    return Text.assemble(
        (mark, style),
        (one_line(node.branch), "bold"),
        (f"  {node.outcome}", style),
        (f"  {cost}", "dim"),
        (text, "italic"),
        no_wrap=True,
        overflow="ellipsis",
    )
