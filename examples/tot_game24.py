"""The Game of 24 by a tree of thoughts, and what sharing the prompts saved.

Run it:  python examples/tot_game24.py                    (the mock, which knows the rules)
         python examples/tot_game24.py smollm2            (needs the `engine` extra)
         python examples/tot_game24.py mock "2 7 8 9" dfs (bfs, dfs, beam or mcts)

SmolLM2-135M cannot play this game. A grammar lets it write legal steps only, so every path is a
correct derivation; which of them it tries, and how it judges them, is hardly better than chance.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

try:
    from examples.game24 import Game24, player, scripted, solves
except ImportError:  # run as a program: its own folder is on the path
    from game24 import Game24, player, scripted, solves  # type: ignore[import-not-found, no-redef]

from forkserve import Engine, ForkServeConfig, SamplingParams
from forkserve.adapters.tot import ToTResult, beam, mcts, tot_bfs, tot_dfs

SEARCHES: dict[str, tuple[Callable[..., ToTResult], dict[str, Any]]] = {
    "bfs": (tot_bfs, {"beam": 3}),
    "dfs": (tot_dfs, {"prune": 1.0, "branch": 3}),
    "beam": (beam, {"width": 3}),
    "mcts": (mcts, {"iterations": 20}),
}


def make_engine(name: str) -> Engine:
    """The mock with a scripted player, or SmolLM2-135M."""
    config = ForkServeConfig(capacity_pages=2048)
    if name == "mock":
        return scripted(player, config)
    from forkserve.engine import LocalBackend

    return Engine(LocalBackend(config, name))


def main(name: str = "mock", puzzle: str = "2 3 5 12", search: str = "bfs") -> ToTResult:
    """One puzzle; prints the steps of the search, its outcome and its cost."""
    with make_engine(name) as engine:
        model = name != "mock"
        find, options = SEARCHES[search]
        result = find(
            engine,
            Game24(engine.backend if model else None),
            puzzle,
            mode="template",
            # Under the grammar one reply is one step: ask for several. The player lists them.
            generate="sample" if model else "propose",
            n_generate=3 if model else 1,
            n_evaluate=1 if model else 3,
            params=SamplingParams(temperature=1.0),
            max_tokens=400,
            **options,
        )
        for step in result.trace:
            best = max((score for score in step.scores if score is not None), default=None)
            print(
                f"step {step.number}: {len(step.parents)} expanded, "
                f"{len(step.candidates)} thoughts, {len(step.selected)} kept, "
                f"{len(step.aborted)} aborted, best {best}, {step.live_pages} pages"
            )
        if result.best is not None:
            print("\n".join(f"  {line}" for line in result.best.state.thoughts))
            print("solved" if solves(puzzle, result.best.state.thoughts) else "not solved")
        report(result)
        return result


def report(result: ToTResult) -> None:
    """What the search computed of its prompts, and what it would have without a tree."""
    usage = result.usage
    print(f"{usage.requests} requests, {usage.decoded} tokens decoded")
    print(
        f"{usage.prefilled} prompt tokens prefilled; {usage.prompt} without reuse, "
        f"{usage.prefix_cache} with an ideal prefix cache"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
