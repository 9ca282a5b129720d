"""`forkserve tree`: the last run, drawn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from forkserve.cli.record import RunNode, load_run

if TYPE_CHECKING:
    from rich.tree import Tree

__all__ = ["run_tree"]

_STYLES = {"committed": "green", "won": "bold green", "aborted": "red", "lost": "red"}


def run_tree(*, as_json: bool) -> None:
    """Print the tree of the last run."""
    head, nodes = load_run()
    if as_json:
        print(json.dumps({**head, "nodes": [asdict(node) for node in nodes]}))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console()
    dead = [node for node in nodes if node.outcome in ("aborted", "lost")]
    console.print(
        Text(
            f"{head.get('model')} on {head.get('device')}, {head.get('document')}: "
            f"{len(nodes)} nodes, {len(dead)} aborted"
        )
    )
    console.print(draw(nodes))


def draw(nodes: Sequence[RunNode]) -> Tree:
    """A rich tree.  The committed line runs straight down; branches hang beside it.

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


def _label(node: RunNode) -> Any:
    from rich.text import Text

    style = _STYLES.get(node.outcome, "")
    mark = {"aborted": "✗ ", "lost": "✗ ", "won": "★ "}.get(node.outcome, "● ")
    return Text.assemble(
        (mark, style),
        (node.branch, "bold"),
        (f"  {node.outcome}", style),
        (f"  {node.tokens:,} tokens, {node.pages:,} pages  ", "dim"),
        (repr(node.text) if node.text else "", "italic"),
    )
