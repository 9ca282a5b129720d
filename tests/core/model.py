"""A second, naive account of what the verbs do to the tokens: whole sequences, no pages.

Every node keeps its full sequence, so nothing is shared and nothing can go wrong by sharing.
"""

from __future__ import annotations

from dataclasses import dataclass

MAIN = 0


@dataclass
class ModelNode:
    """One node: `full` is root to end, `base` how much of it was there before the node."""

    id: int
    parent: int | None
    branch: str
    full: list[int]
    base: int
    mode: str
    line: int = MAIN
    known: int = 0
    generation: int = 0


def lcp(a: list[int], b: list[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


class TreeModel:
    """Tokens, modes, lines and generations of one session."""

    def __init__(self, prompt: list[int]) -> None:
        self.nodes = {1: ModelNode(1, None, "root", list(prompt), 0, "commit", known=len(prompt))}
        self.parents: dict[int, int | None] = {1: None}  # of dead nodes too
        self.tips = {MAIN: 1}
        self.next_id, self.next_line = 2, 1

    # ---------------------------------------------------------------- looking

    def children(self, node: int) -> list[ModelNode]:
        return [n for n in self.nodes.values() if n.parent == node]

    def subtree(self, node: int) -> list[int]:
        found = [node]
        for child in self.children(node):
            found += self.subtree(child.id)
        return found

    def committed(self, node: int) -> bool:
        return self.nodes[node].mode in ("commit", "idle")

    def path(self, node: int) -> list[int]:
        """node, parent, ..., root."""
        out = [node]
        while (above := self.nodes[out[-1]].parent) is not None:
            out.append(above)
        return out

    def tip_nodes(self) -> list[int]:
        return sorted(self.tips.values())

    def runnable_tips(self) -> list[int]:
        return [n for n in self.tip_nodes() if self.nodes[n].mode == "commit"]

    # ---------------------------------------------------------------- verbs

    def owner(self, node: int, length: int) -> int:
        """The node on the path to `node` that holds its token number `length`."""
        while self.nodes[node].parent is not None and length <= self.nodes[node].base:
            node = self.parents[node] or 1
        return node

    def fork(
        self,
        parent: int,
        branch: str,
        tokens: list[int],
        mode: str = "spec",
        at: int | None = None,
    ) -> int:
        base = len(self.nodes[parent].full) if at is None else at
        if base < len(self.nodes[parent].full):
            parent = self.owner(parent, base)
        above = self.nodes[parent]
        full = above.full[:base] + list(tokens)
        node = ModelNode(self.next_id, parent, branch, full, base, mode, above.line, len(full))
        node.generation = above.generation
        self.nodes[node.id] = node
        self.parents[node.id] = parent
        self.next_id += 1
        return node.id

    def append(self, node: int, tokens: list[int], *, known: bool = True) -> None:
        target = self.nodes[node]
        target.full = target.full + list(tokens)
        if known:
            target.known = len(target.full)

    def attempt(self, node: int) -> None:
        target = self.nodes[node]
        if target.mode == "spec":
            target.mode, target.line = "commit", self.next_line
            self.tips[self.next_line] = node
            self.next_line += 1

    def kill(self, ids: list[int]) -> None:
        """Take nodes out; a line whose tip died goes back to its nearest live node, or ends."""
        for node in ids:
            self.nodes.pop(node, None)
        for line, tip in list(self.tips.items()):
            if tip in self.nodes:
                continue
            at: int | None = tip
            while at is not None and at not in self.nodes:
                at = self.parents[at]
            if at is not None and self.nodes[at].line == line and self.committed(at):
                self.tips[line] = at
            else:
                del self.tips[line]

    def abort(self, node: int, *, cascade: bool = True) -> None:
        above = self.nodes[node].parent
        self.kill(self.subtree(node))
        while (
            cascade
            and above is not None
            and self.nodes[above].mode == "spec"
            and not self.children(above)
        ):
            orphan, above = above, self.nodes[above].parent
            self.kill([orphan])

    def abortable(self, node: int) -> bool:
        return not any(self.nodes[n].line == MAIN and self.committed(n) for n in self.subtree(node))

    def _move_tip(self, line: int, node: int) -> None:
        old = self.nodes[node].line
        if old != line and self.tips.get(old) == node:
            del self.tips[old]
        self.nodes[node].line = line
        self.tips[line] = node

    def after(self, tip: int, length: int) -> list[int]:
        """What hangs on a line after its first `length` tokens."""
        if length == len(self.nodes[tip].full):
            return []
        owner = self.owner(tip, length)
        top = self.nodes[owner]
        return [
            node
            for child in self.children(owner)
            if child.base > length or (child.line == top.line and self.committed(child.id))
            for node in self.subtree(child.id)
        ]

    def retract(self, tip: int, length: int) -> int:
        """Take a line back to `length` tokens; returns its new tip."""
        if length == len(self.nodes[tip].full):
            return tip
        owner = self.owner(tip, length)
        top = self.nodes[owner]
        self.kill(self.after(tip, length))
        top.full = top.full[:length]
        top.known = min(top.known, length)
        return owner

    def commit(self, at: int, observed: list[int], branch: str | None) -> tuple[int, int, set[int]]:
        """Returns (winner, lcp, aborted)."""
        top = self.nodes[at]
        target = top.full + list(observed)
        chain, done = self.chain(at, target, branch)
        picked = any(self.committed(n) for n in chain)
        losers: list[int] = []
        for level, kept in zip([at, *chain], [*chain, None], strict=True):
            for child in self.children(level):
                if child.id == kept:
                    continue
                if kept is None and chain:
                    lost = child.base > done
                elif kept is None:
                    lost = child.mode == "spec"
                else:
                    lost = child.mode == "spec" or (picked and child.line != top.line)
                if lost:
                    losers.append(child.id)
        dead = {n for loser in losers for n in self.subtree(loser)}
        for member in chain:
            self.nodes[member].mode = "commit"
            self._move_tip(top.line, member)
        if chain:
            winner = chain[-1]
            self.nodes[winner].full = target
        else:
            winner = self.fork(at, branch or "commit", observed, "commit")
            self._move_tip(top.line, winner)
        self.nodes[winner].known = len(target)
        top.mode = "commit"
        top.generation += 1
        self.kill(sorted(dead))
        return winner, done, dead

    def chain(self, at: int, target: list[int], branch: str | None) -> tuple[list[int], int]:
        """The nodes the observation runs through, and how far it was there already."""
        chain: list[int] = []
        current, done = at, len(self.nodes[at].full)
        while done < len(target):
            fits = [
                (lcp(c.full, target), c.branch == branch, -c.id)
                for c in self.children(current)
                if lcp(c.full, target) > done
            ]
            if not fits:
                break
            done, _, negative = max(fits)
            current = -negative
            chain.append(current)
            if len(self.nodes[current].full) != done:
                break
        return chain, done

    def promote(self, node: int) -> None:
        fresh: list[int] = []
        base = node
        while self.nodes[base].line != MAIN or not self.committed(base):
            fresh.append(base)
            above = self.nodes[base].parent
            assert above is not None
            base = above
        self._split_main_below(base)
        for member in [base, *reversed(fresh)]:
            self.nodes[member].mode = "commit"
            self._move_tip(MAIN, member)

    def _split_main_below(self, base: int) -> None:
        """What the main line held after `base` becomes an idle line of its own."""
        below = base
        line, self.next_line = self.next_line, self.next_line + 1
        moved = False
        while True:
            following = [c for c in self.children(below) if c.line == MAIN and self.committed(c.id)]
            if not following:
                break
            below, moved = following[0].id, True
            self.nodes[below].line, self.nodes[below].mode = line, "idle"
            self.tips[line] = below
        if not moved:
            self.next_line -= 1

    def join(
        self, parent: int, inputs: list[int], losers: list[int], text: list[int], branch: str
    ) -> tuple[int, set[int]]:
        """A new committed node after `parent`; the losing inputs die.  Returns (node, aborted)."""
        node = self.fork(parent, branch, text, "commit")
        dead = {n for loser in losers for n in self.subtree(loser)}
        self._move_tip(self.nodes[parent].line, node)
        self.nodes[parent].mode = "commit"
        self.nodes[parent].generation += 1
        self.kill(sorted(dead))
        return node, dead
