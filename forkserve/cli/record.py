"""The tree of the last run, kept as a small JSON file for `forkserve tree`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forkserve.cli.words import one_line, shortened
from forkserve.errors import ConfigError

if TYPE_CHECKING:
    from forkserve.engine.protocol import Tokenizer
    from forkserve.tree.node import Node
    from forkserve.tree.tree import ContextTree

__all__ = ["Recorder", "RunNode", "load_run", "pages_of", "save_run", "state_path", "widths"]

_FORMAT = 1
_SNIPPET = 72  # characters of a node's own text


@dataclass(slots=True)
class RunNode:
    """A node as it was last seen.

    outcome: "committed", "aborted", "won" (an attempt that was adopted) or "lost".  tokens and
    pages: its own, without its ancestors'.
    """

    id: int
    parent: int | None
    branch: str
    outcome: str
    tokens: int
    pages: int
    text: str


@dataclass(slots=True)
class Recorder:
    """Collects nodes before they die; dead ones leave the engine's tree at once."""

    tokenizer: Tokenizer
    nodes: dict[int, RunNode] = field(default_factory=dict)
    outcomes: dict[int, str] = field(default_factory=dict)

    def see(self, tree: ContextTree) -> None:
        """Note every node as it is now."""
        for node in list(tree.nodes.values()):
            self.nodes[node.id] = self._record(node)

    def mark(self, nodes: Sequence[int], outcome: str) -> None:
        """Say what became of nodes."""
        self.outcomes.update(dict.fromkeys(nodes, outcome))

    def finish(self) -> list[RunNode]:
        """All nodes in the order of their making, each with its outcome."""
        for number, outcome in self.outcomes.items():
            if number in self.nodes:
                self.nodes[number].outcome = outcome
        return [self.nodes[number] for number in sorted(self.nodes)]

    def _record(self, node: Node) -> RunNode:
        ids = node.tokens.tolist()
        text = self.tokenizer.decode_bytes(ids[:400], skip_special=True).decode("utf-8", "replace")
        return RunNode(
            id=node.id,
            parent=node.parent.id if node.parent is not None else None,
            branch=node.branch or "trunk",
            outcome="committed",
            tokens=len(ids),
            pages=sum(len(segment.pages) for segment in node.segments),
            text=shortened(one_line(text), _SNIPPET),
        )


def pages_of(tree: ContextTree) -> int:
    """Different pages that a tree's live nodes have on their tables."""
    nodes = list(tree.nodes.values())
    return len({page for node in nodes for segment in node.segments for page in segment.pages})


def widths(tree: ContextTree, page_size: int) -> int:
    """Pages if every live branch had a copy of its whole sequence."""
    leaves = [node for node in tree.nodes.values() if not node.children]
    return sum(-(-leaf.kv_end // page_size) for leaf in leaves)


def state_path() -> Path:
    """Where the last run is kept: $FORKSERVE_STATE, else under $XDG_STATE_HOME."""
    if chosen := os.environ.get("FORKSERVE_STATE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "forkserve" / "last-run.json"


def save_run(head: dict[str, Any], nodes: Sequence[RunNode]) -> Path | None:
    """Write the run; None when the place cannot be written, which spoils nothing."""
    path = state_path()
    record = {"format": _FORMAT, **head, "nodes": [asdict(node) for node in nodes]}
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(record, indent=1), encoding="utf-8")
        draft.replace(path)
    except (OSError, RuntimeError):
        return None
    return path


def load_run() -> tuple[dict[str, Any], list[RunNode]]:
    """The last run.  ConfigError when there is none, or it is not readable."""
    path = state_path()
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        nodes = [RunNode(**node) for node in record.pop("nodes")]
        if record["format"] != _FORMAT or not nodes:
            raise ValueError(f"format {record['format']}")
    except FileNotFoundError:
        raise ConfigError(f"there is no run yet ({path}); run first: forkserve demo") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not a run that this version can read ({error}); run again: forkserve demo"
        ) from error
    return record, nodes
