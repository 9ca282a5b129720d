"""The functional API: tasks are branches, an entrypoint is a trunk or a join."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.types import Command, RetryPolicy, interrupt

from forkserve.adapters.langgraph import Branch, ForkServe
from forkserve.errors import AdapterError

from .graphs import PROMPT, THREAD, Boom

INPUT: Any = {"prompt": PROMPT}


def drafts(fs: ForkServe, act: Any = lambda i, run: None, **options: Any) -> Any:
    """A task that writes a draft; `act(number, how often it ran before)` may raise."""
    runs: Counter[int] = Counter()

    @task(**options)
    @fs.node
    def draft(number: int, fork: Branch):
        assert fork.role == "branch"
        fork.append(f"draft {number}. ")
        runs[number] += 1
        act(number, runs[number] - 1)
        return fork.generate(3).text, fork.ref

    return draft


def prefilled(fs: ForkServe) -> int:
    return int(fs.engine.stats().prefilled_tokens.committed)


def spine_only(fs: ForkServe, session: str) -> None:
    tree = fs.engine.tree(session)
    assert set(tree.nodes.values()) == set(tree.spine())
    assert fs.stats["undecided"] == 0


def test_tasks_and_entrypoints_render_nothing_again(fs: ForkServe) -> None:
    @task
    @fs.node(render=True)
    def draft(fork: Branch):
        return fork.generate(3).text

    @entrypoint(checkpointer=InMemorySaver())
    @fs.node
    def calls(given: Any):
        return draft().result()

    @entrypoint(checkpointer=InMemorySaver())
    @fs.node(render=True)
    def renders(given: Any):
        return None

    for graph, kind in ((calls, "task 'draft'"), (renders, "entrypoint 'renders'")):
        with pytest.raises(AdapterError, match=f"{kind} has render=True, which is for nodes"):
            fs.bind(graph).invoke(INPUT, THREAD)


def test_tasks_share_the_prompt_of_their_entrypoint(fs: ForkServe) -> None:
    """k tasks fork from it; as a join it keeps the text of one of them."""
    draft = drafts(fs)

    @entrypoint(checkpointer=InMemorySaver())
    @fs.node(role="join")
    def work(given: Any):
        found = [future.result() for future in [draft(i) for i in range(4)]]
        return {"texts": [text for text, _ in found], **fs.commit_winner([r for _, r in found], 2)}

    out = fs.bind(work).invoke(INPUT, THREAD)
    assert fs.stats["opened"] == 1
    assert fs.stats["forks"] == 1 + 4
    assert prefilled(fs) <= len(PROMPT) + 4 * (len("draft 0. ") + 3)
    assert fs.text(out["fork_tip"]) == f"{PROMPT}draft 2. {out['texts'][2]}"
    spine_only(fs, out["fork_tip"]["session"])
    assert fs.stats["committed"] == 1


async def test_async_tasks(fs: ForkServe) -> None:
    @task
    @fs.node
    async def draft(number: int, *, fork: Branch):
        fork.append(f"draft {number}. ")
        await fork.agenerate(3)
        return {"ref": fork.ref, "at": fork.base["node"], "index": fork.index}

    @entrypoint(checkpointer=InMemorySaver())
    @fs.node(role="join")
    async def work(given: Any):
        found = await asyncio.gather(*(draft(i) for i in range(5)))
        assert len({one["at"] for one in found}) == 1
        assert [one["index"] for one in found] == [0, 1, 2, 3, 4]
        return fs.commit_winner([one["ref"] for one in found], -1)

    out = await fs.bind(work).ainvoke(INPUT, THREAD)
    assert "draft 4. " in fs.text(out["fork_tip"])
    spine_only(fs, out["fork_tip"]["session"])


def test_an_entrypoint_goes_on_where_it_saved(fs: ForkServe) -> None:
    """`fork_tip` comes back in `previous`; values of tasks and entrypoints are their own."""

    @task
    @fs.node(role="branch")
    def look(fork: Branch):
        fork.append("aside. ")
        return "seen"

    @entrypoint(checkpointer=InMemorySaver())
    @fs.node
    def work(given: Any, *, previous: Any = None, fork: Branch):
        assert fork.role == "trunk"
        fork.append(f"turn {(previous or {}).get('turn', 0)}. ")
        assert look().result() == "seen"
        fork.append("on. ")
        saved = {"turn": (previous or {}).get("turn", 0) + 1}
        return entrypoint.final(value=fork.full_text, save=saved)

    graph = fs.bind(work)
    assert graph.invoke(INPUT, THREAD) == f"{PROMPT}turn 0. on. "
    was = prefilled(fs)
    assert graph.invoke(INPUT, THREAD) == f"{PROMPT}turn 0. on. turn 1. on. "
    assert prefilled(fs) - was <= len("aside. turn 1. on. ")
    assert fs.stats["opened"] == 1
    (live,) = fs._registry.sessions.values()
    spine_only(fs, live.session.id)


def test_a_ref_among_the_arguments_is_where_a_task_leaves_from(fs: ForkServe) -> None:
    """A chain of tasks, a task in a task, and a task that decides."""

    @task
    @fs.node
    def step(word: str, before: Any = None, *, fork: Branch):
        fork.append(f"{word}. ")
        return fork.ref

    @task
    @fs.node
    def twice(word: str, fork: Branch):
        fork.append(f"{word}: ")
        return [step(f"{word}{n}").result() for n in range(2)]

    @task
    @fs.node(role="join")
    def pick(refs: list[Any], best: int):
        return fs.commit_winner(refs, best)

    @entrypoint()
    @fs.node
    def work(given: Any):
        one = step("one").result()
        two = step("two", before=one).result()
        inner = twice("in").result()
        assert fs.text(two) == f"{PROMPT}one. two. "
        assert [fs.text(ref) for ref in inner] == [f"{PROMPT}in: in0. ", f"{PROMPT}in: in1. "]
        tip = pick([one, two, *inner], 1).result()["fork_tip"]
        return fs.text(step("three", tip).result())

    assert fs.bind(work).invoke(INPUT) == f"{PROMPT}one. two. three. "
    assert not fs.engine.sessions()  # a run without a thread takes its session along


def test_a_trunk_that_a_task_decided_on_is_kept(fs: ForkServe) -> None:
    draft = drafts(fs)

    @task
    @fs.node(role="join")
    def pick(refs: list[Any]):
        return fs.commit_winner(refs, 0)

    @entrypoint(checkpointer=InMemorySaver())
    @fs.node
    def work(given: Any, fork: Branch, previous: Any = None):
        fork.append("plan. ")
        refs = [future.result()[1] for future in [draft(i) for i in range(2)]]
        pick(refs).result()
        return entrypoint.final(value=None, save={})

    graph = fs.bind(work)
    graph.invoke(INPUT, THREAD)
    (live,) = fs._registry.sessions.values()
    assert live.session.text.startswith(f"{PROMPT}plan. draft 0. ")
    spine_only(fs, live.session.id)
    graph.invoke(INPUT, THREAD)
    assert live.session.text.count("plan. draft 0. ") == 2
    assert fs.stats["opened"] == 1


def test_a_task_is_tried_again_on_a_fresh_branch(fs: ForkServe) -> None:
    def act(number: int, run: int) -> None:
        if number == 1 and run == 0:
            raise ConnectionError("once")

    draft = drafts(fs, act, retry_policy=RetryPolicy(initial_interval=0.01, jitter=False))

    @entrypoint(checkpointer=InMemorySaver())
    @fs.node(role="join")
    def work(given: Any):
        found = [future.result() for future in [draft(i) for i in range(3)]]
        return fs.commit_winner([ref for _, ref in found], 1)

    out = fs.bind(work).invoke(INPUT, THREAD)
    assert fs.text(out["fork_tip"]).count("draft 1. ") == 1
    spine_only(fs, out["fork_tip"]["session"])


@pytest.mark.parametrize("thread", [THREAD, {}])
def test_a_task_that_fails_ends_the_run(fs: ForkServe, thread: Any) -> None:
    def act(number: int, run: int) -> None:
        if number == 1 and run == 0:
            raise Boom("no")

    draft = drafts(fs, act)

    @entrypoint(checkpointer=InMemorySaver() if thread else None)
    @fs.node(role="join")
    def work(given: Any):
        found = [draft(i).result() for i in range(3)]
        return fs.commit_winner([ref for _, ref in found], 0)

    graph = fs.bind(work)
    with pytest.raises(Boom):
        graph.invoke(INPUT, thread)
    if thread:  # what the first task wrote is kept, and not written again
        kept = fs.stats["forks"]
        out = graph.invoke(None, thread)
        assert fs.stats["forks"] - kept == 1 + 2
        assert "draft 0. " in fs.text(out["fork_tip"])
        spine_only(fs, out["fork_tip"]["session"])


def test_an_entrypoint_waits_and_goes_on(fs: ForkServe) -> None:
    """Tasks are not run again; their branches are kept while somebody decides."""
    draft = drafts(fs)

    @entrypoint(checkpointer=InMemorySaver())
    @fs.node(role="join")
    def work(given: Any):
        found = [future.result() for future in [draft(i) for i in range(3)]]
        best = interrupt([text for text, _ in found])
        return fs.commit_winner([ref for _, ref in found], best)

    graph = fs.bind(work)
    assert graph.invoke(INPUT, THREAD)["__interrupt__"]
    was, forks = prefilled(fs), fs.stats["forks"]
    out = graph.invoke(Command(resume=1), THREAD)
    assert fs.stats["forks"] - forks == 1  # its own
    assert prefilled(fs) == was
    assert "draft 1. " in fs.text(out["fork_tip"])
    assert fs.stats["reopened"] == 0
    spine_only(fs, out["fork_tip"]["session"])


def test_what_nobody_chose_goes_with_the_run(fs: ForkServe) -> None:
    draft = drafts(fs)

    @entrypoint(checkpointer=InMemorySaver())
    @fs.node
    def work(given: Any, fork: Branch):
        fork.append("plan. ")
        return [future.result()[0] for future in [draft(i) for i in range(3)]]

    fs.bind(work).invoke(INPUT, THREAD)
    (live,) = fs._registry.sessions.values()
    assert live.session.text == f"{PROMPT}plan. "
    spine_only(fs, live.session.id)
    assert fs.stats["swept"] == 3


def test_tasks_of_a_node_and_of_a_plain_entrypoint(fs: ForkServe) -> None:
    """A task that nobody's branch calls opens a session with what it is given."""

    @task
    @fs.node
    def say(given: Any, fork: Branch):
        return fork.full_text

    @entrypoint()
    def work(given: Any):
        return [say(given).result(), say(given=given).result()]

    assert fs.bind(work).invoke(INPUT) == [PROMPT, PROMPT]
    assert fs.stats["opened"] == 1

    @entrypoint()
    def nothing(given: Any):
        return say(1).result()

    with pytest.raises(AdapterError, match="neither 'messages' nor 'prompt'"):
        fs.bind(nothing).invoke(INPUT)
    with pytest.raises(AdapterError, match="not bound"):
        work.invoke(INPUT)


def test_many_runs_leave_nothing(fs: ForkServe) -> None:
    def act(number: int, run: int) -> None:
        if number == 2 and run % 3 == 0:
            raise Boom("now and then")

    draft = drafts(fs, act)

    @entrypoint()
    @fs.node(role="join")
    def work(given: Any):
        found = [future.result() for future in [draft(i) for i in range(3)]]
        return fs.commit_winner([ref for _, ref in found], 0)

    graph = fs.bind(work)
    for _ in range(30):
        try:
            graph.invoke(INPUT)
        except Boom:
            continue
    stats = fs.stats
    assert (stats["sessions"], stats["undecided"], stats["running"]) == (0, 0, 0)
    fs.engine.check()
