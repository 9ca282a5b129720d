"""How good thoughts are: values, votes, scores of the program, log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from forkserve.adapters.tot.records import Thought
from forkserve.adapters.tot.run import Asking, Request, Run
from forkserve.adapters.tot.task import Role, UnreadableReply
from forkserve.types import Tokens

__all__ = ["evaluate"]


def evaluate(run: Run, candidates: Sequence[Thought]) -> Asking[None]:
    """Give each candidate its value and score, but not duplicates and answers known to be wrong."""
    todo = [c for c in candidates if c.alive and c.right is not False]
    kind = run.options.evaluate
    if kind == "score":
        for thought in todo:
            thought.values = (run.reader.score(thought.state),)
    elif kind == "logprob":
        for thought in todo:
            thought.values = (thought.logprob,)
    elif kind == "vote":
        yield from _vote(run, todo)
    else:
        yield from _value(run, todo)
    for thought in todo:
        thought.value = thought.score = _mean(run, thought.values)


def _value(run: Run, todo: Sequence[Thought]) -> Asking[None]:
    """Each state by itself, all in one batch; equal prompts of template mode once."""
    role: Role = "value"
    times, trunks = run.options.evaluations(role), run.trunks
    groups: dict[object, list[Thought]] = {}
    prompts: dict[object, str | Tokens] = {}
    for thought in todo:
        prompt = run.reader.prompt(role, thought.state)
        key: object = thought
        if trunks is not None and run.options.cache:
            how = replace(run.options.sampling(role), constraint=None)
            text = prompt if isinstance(prompt, str) else tuple(prompt)
            key = (text, times, how, run.options.tokens(role))
        groups.setdefault(key, []).append(thought)
        prompts[key] = prompt
    known = trunks.values if trunks is not None else {}
    fresh = [key for key in groups if key not in known]
    hits = sum(len(group) for group in groups.values()) - len(fresh)
    run.usage = replace(run.usage, cached=run.usage.cached + hits * times)
    requests = []
    for key in fresh:
        thought = groups[key][0]
        for branch in run.fan(run.trunk(role, thought), prompts[key], times):
            requests.append(Request(branch, role, (thought.state,)))
    replies = yield from run.ask(requests)
    for number, key in enumerate(fresh):
        state = groups[key][0].state
        values: list[float | None] = []
        for reply in replies[number * times : (number + 1) * times]:
            value = run.reader.value(state, reply.text)
            if value is None:
                _unreadable(run, role, reply.text)
            values.append(value)
        for thought in groups[key]:
            thought.values = tuple(values)
        if trunks is not None and run.options.cache:
            trunks.values[key] = tuple(values)
    for key in groups.keys() - set(fresh):
        for thought in groups[key]:
            thought.values = known[key]


def _vote(run: Run, todo: Sequence[Thought]) -> Asking[None]:
    """One ballot over all; a value is the share of the votes.  One candidate has them all."""
    role: Role = "vote"
    if len(todo) < 2:
        for thought in todo:
            thought.values = (1.0,)
        return
    states = [thought.state for thought in todo]
    times = run.options.evaluations(role)
    branches = run.fan(run.trunk(role, run.root), run.reader.ballot(states), times)
    replies = yield from run.ask([Request(branch, role, states) for branch in branches])
    votes = [0] * len(todo)
    for reply in replies:
        choice = run.reader.vote(states, reply.text)
        if choice is None:
            _unreadable(run, role, reply.text)
        else:
            votes[choice] += 1
    for thought, count in zip(todo, votes, strict=True):
        thought.values = (count / times,)


def _unreadable(run: Run, role: Role, reply: str) -> None:
    """Count an evaluation that cannot be read, or raise."""
    if run.options.unreadable == "raise":
        raise UnreadableReply(f"the model's {role} cannot be read: {reply!r:.200}")
    run.unreadable += 1


def _mean(run: Run, values: Sequence[float | None]) -> float:
    """Exactly rounded, so that the order of equal values does not matter."""
    other = run.options.unreadable
    worth = 0.0 if other == "raise" else float(other)
    return math.fsum(worth if value is None else value for value in values) / len(values)
