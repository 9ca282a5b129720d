"""Trees of thoughts replayed: live pages and prefilled tokens beside clones and a prefix cache."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from benchmarks.measure import Options, Report, Target
from benchmarks.plot import Chart
from benchmarks.recordings import absent, load
from examples.game24 import PUZZLES, Game24, player, scripted
from forkserve import Engine, ForkServeConfig, SamplingParams
from forkserve.adapters.tot import beam, mcts, tot_bfs, tot_dfs
from forkserve.control.generation import Generation
from forkserve.engine import MockBackend
from forkserve.types import Batch

P = 16
SETS = ("docmerge", "keyword")
FREE = SamplingParams(ignore_eos=True)
SEARCHES: dict[str, tuple[Any, dict[str, Any]]] = {
    "bfs": (tot_bfs, {"beam": 3}),
    "beam": (beam, {"width": 3}),
    "dfs": (tot_dfs, {"prune": 1.0}),
    "mcts": (mcts, {"iterations": 20}),
}


@dataclass
class Level:
    """Branches that leave one thought: tokens of each, and the one that is built on."""

    lengths: list[int]
    winner: int | None


@dataclass
class Cost:
    """prefilled: rows.  pages: live at each pass; of a formula, at each token of the branches."""

    prefilled: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def peak(self) -> int:
        return max(self.pages)

    @property
    def mean(self) -> float:
        return fmean(self.pages)


def run(options: Options) -> Report:
    report = Report("trees", f"trees of thoughts, pages of {P} tokens, counted on the mock backend")
    tokens = report.table(
        "recorded trees, prefilled tokens: a level decodes together, one thought is built on",
        *("set", "trees", "branches", "decoded", "forkserve", "prefix cache [formula]"),
        *("cache/fs", "clone [formula]", "clone/fs"),
    )
    held = report.table(
        "recorded trees, live pages: losers go when their level has ended; means over the trees",
        *("set", "peak forkserve", "peak prefix cache [formula]", "peak clone [formula]"),
        *("clone/fs", "mean forkserve", "mean prefix cache", "mean clone"),
    )
    for name in ("made up",) if options.quick else SETS:
        trees = made_up() if options.quick else load(f"tot_trees_{name}")
        if trees is None:
            report.notes.append(absent(f"tot_trees_{name}"))
            continue
        if empty := sum(not tree["nodes"] for tree in trees):
            report.notes.append(f"{name}: {empty} of {len(trees)} recordings are empty")
        trees = [tree for tree in trees if tree["nodes"]]
        rows = [measure(tree) for tree in trees]
        ours, cache, clone = ([row[i] for row in rows] for i in range(3))
        sums = [sum(cost.prefilled for cost in costs) for costs in (ours, cache, clone)]
        peaks = [fmean(cost.peak for cost in costs) for costs in (ours, cache, clone)]
        means = [fmean(cost.mean for cost in costs) for costs in (ours, cache, clone)]
        nodes = [node for tree in trees for node in tree["nodes"][1:]]
        tokens.add(
            *(name, len(trees), len(nodes), sum(node["tokens"] for node in nodes)),
            *(sums[0], sums[1], sums[1] / sums[0], sums[2], sums[2] / sums[0]),
        )
        held.add(name, *peaks, peaks[2] / peaks[0], *means)
    if not tokens.rows:
        report.tables.clear()
    else:
        checked = formulas_are_runs()
        what = "rows and peak pages of the clone formula that differ from a run with sharing off"
        report.targets.append(Target(what, "0", len(checked), not checked, "; ".join(checked)))
        searches(report, PUZZLES[:1] if options.quick else PUZZLES)
    report.notes += [
        "clone: a session for each branch with nothing shared, prompt and path prefilled anew",
        "prefix cache: every full page of what was computed before is there, and shared; the tail "
        "of a page is computed again by each branch. It forgets nothing and one request finds what "
        "the one before it wrote: the best such a cache can do, while ten that arrive together "
        "miss each other's trunk",
        "recorded trees decode the recorded number of tokens; which tokens makes no difference",
    ]
    return report


# --- recorded trees ------------------------------------------------------------------------------


def made_up() -> list[dict[str, Any]]:
    """Two small trees in the form of the recordings."""
    trees = []
    for trunk in (70, 96):
        nodes: list[dict[str, Any]] = [{"id": 0, "tokens": trunk, "children": [1, 2, 3]}]
        nodes += [{"id": i, "tokens": 10 + 3 * i, "children": []} for i in (1, 2, 3, 4, 5)]
        nodes[2]["children"] = [4, 5]
        trees.append({"nodes": nodes})
    return trees


def levels(tree: Mapping[str, Any]) -> tuple[int, list[Level]]:
    """Tokens of the trunk, and the levels from the first one down."""
    nodes = {node["id"]: node for node in tree["nodes"]}
    found, at = [], nodes[0]
    while at["children"]:
        children = [nodes[i] for i in at["children"]]
        winner = next((i for i, child in enumerate(children) if child["children"]), None)
        found.append(Level([child["tokens"] for child in children], winner))
        at = children[winner] if winner is not None else children[0]
    return nodes[0]["tokens"], found


def measure(tree: Mapping[str, Any]) -> tuple[Cost, Cost, Cost]:
    """ForkServe as it runs; prefix cache and clone by formula."""
    trunk, found = levels(tree)
    return forked(trunk, found), cached(trunk, found), cloned(trunk, found)


def pages(rows: int) -> int:
    return -(-rows // P)


def backend(
    trunk: int, found: Sequence[Level], cost: Cost, **changes: Any
) -> tuple[Engine, list[int]]:
    """An engine that notes its live pages at every pass, and the tokens of the trunk."""
    depth = trunk + sum(max(level.lengths) for level in found)
    capacity = max(len(level.lengths) for level in found) * (pages(depth) + 2) + pages(depth)
    config = ForkServeConfig(capacity_pages=capacity, tbt_slo_ms=1_000, **changes)

    def note(batch: Batch) -> None:
        cost.prefilled += sum(len(work.tokens) for work in batch.works if work.write is not None)
        if any(work.sample is not None for work in batch.works):
            cost.pages.append(engine._core.pool.live_pages)

    # Of a branch all rows but that of its last token are decoded ones.
    cost.prefilled = -sum(count - 1 for level in found for count in level.lengths)
    engine = Engine(MockBackend(config, on_batch=note))
    return engine, random.Random(trunk).choices(range(256), k=trunk)


def finish(running: Sequence[Generation]) -> None:
    for generation in running:
        generation.result()


def forked(trunk: int, found: Sequence[Level]) -> Cost:
    """Forks of the thought that is built on; losers are aborted when a level has ended."""
    cost = Cost()
    engine, tokens = backend(trunk, found, cost, prefix_index=False)
    with engine, engine.session(tokens) as session:
        parent = session.tip
        for level in found:
            branches = [parent.fork() for _ in level.lengths]
            finish(
                [
                    engine.start(session.id, count, node=branch.attempt().tip, params=FREE)
                    for branch, count in zip(branches, level.lengths, strict=True)
                ]
            )
            for index, branch in enumerate(branches):
                if index != level.winner:
                    branch.abort()
            if level.winner is not None:
                parent = branches[level.winner]
        engine.check()
    return cost


def ticks(level: Level) -> Iterator[list[int]]:
    """Rows that each branch has of its own at each token; the last token's row is never made."""
    for tick in range(max(level.lengths)):
        yield [min(tick, count - 1) for count in level.lengths]


def cached(trunk: int, found: Sequence[Level]) -> Cost:
    """The published pages of the path are shared; each branch computes its tail again."""
    cost, length, known = Cost(), trunk, 0
    for level in found:
        # The first of the requests publishes what the others find; one token is always computed.
        first = length - min(known, (length - 1) // P * P)
        full = (length - 1) // P * P
        cost.prefilled += first + (len(level.lengths) - 1) * (length - full)
        for rows in ticks(level):
            cost.pages.append(full // P + sum(pages(length - full + own) for own in rows))
        if level.winner is not None:
            length += level.lengths[level.winner]
            known = (length - 1) // P * P
    return cost


def cloned(trunk: int, found: Sequence[Level]) -> Cost:
    """Each branch has the whole path for itself."""
    cost, length = Cost(), trunk
    for level in found:
        cost.prefilled += len(level.lengths) * length
        cost.pages += [sum(pages(length + own) for own in rows) for rows in ticks(level)]
        if level.winner is not None:
            length += level.lengths[level.winner]
    return cost


def formulas_are_runs() -> list[str]:
    """Where formulas and runs of the made-up trees differ: sessions with sharing off."""
    wrong = []
    for tree in made_up():
        trunk, found = levels(tree)
        cost = Cost()
        engine, tokens = backend(trunk, found, cost, prefix_index=False)
        with engine:
            path = list(tokens)
            for level in found:
                sessions = [engine.session(path) for _ in level.lengths]
                finish(
                    [
                        engine.start(session.id, count, params=FREE)
                        for session, count in zip(sessions, level.lengths, strict=True)
                    ]
                )
                if level.winner is not None:
                    path = sessions[level.winner].tokens
                for session in sessions:
                    session.close()
        formula = cloned(trunk, found)
        for what, one, two in (
            ("prefilled", cost.prefilled, formula.prefilled),
            ("peak pages", cost.peak, formula.peak),
        ):
            if one != two:
                wrong.append(f"{what} {one}, by formula {two}")
    return wrong


# --- searches of the adapter ---------------------------------------------------------------------


def searches(report: Report, puzzles: Sequence[str]) -> None:
    """The Game of 24 with a scripted model: prompts that are trunks and short residuals."""
    table = report.table(
        f"searches of the adapter: {len(puzzles)} puzzles of the Game of 24, a scripted model",
        *("search", "mode", "requests", "decoded", "no reuse", "prefix cache", "forkserve"),
        *("cache/fs", "none/fs", "peak pages", "solved"),
    )
    worse = []
    for name, (search, own) in SEARCHES.items():
        for mode in ("template", "append"):
            with scripted(player, ForkServeConfig(prefix_index=False)) as engine:
                peak, execute = [0], engine.backend.execute

                def note(batch: Batch, engine: Engine = engine, execute: Any = execute) -> Any:
                    peak[0] = max(peak[0], engine._core.pool.live_pages)  # noqa: B023
                    return execute(batch)

                engine.backend.execute = note  # type: ignore[method-assign]
                task = Game24()
                found = [search(engine, task, x, mode=mode, max_tokens=400, **own) for x in puzzles]
            names = ("requests", "decoded", "prompt", "prefix_cache", "prefilled")
            total = {n: sum(getattr(one.usage, n) for one in found) for n in names}
            ours, cache = total["prefilled"], total["prefix_cache"]
            solved = sum(one.solved for one in found)
            table.add(
                *(name, mode, *total.values(), cache / ours, total["prompt"] / ours),
                *(peak[0], f"{solved} of {len(puzzles)}"),
            )
            worse += [f"{name} {mode}: {ours} > {cache}"] if ours > cache else []
    what = "searches that prefill more than an ideal prefix cache would"
    report.targets.append(Target(what, "0", len(worse), not worse, "; ".join(worse)))


CHARTS = (
    Chart("recorded trees, prefilled tokens", ("set",), ("forkserve", "prefix cache", "clone")),
    Chart("recorded trees, live pages", ("set",), ("peak forkserve", "peak prefix", "peak clone")),
    Chart("searches of the adapter", ("search", "mode"), ("forkserve", "prefix cache", "no reuse")),
)
