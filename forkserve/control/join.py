"""Join: several branches become one committed continuation.

KV of a join is not a function of the inputs' KV: every row depends on all rows before it.  What can
be reused is the trunk, and as many further tokens as the new text shares with one input from its
start on; the rest is prefilled.

=========  =============================================  ==================
policy     body after the scaffold                        other inputs
=========  =============================================  ==================
all        blend, or all residuals in order               stay
concat     all residuals in order                         stay
kofn       blend, or the first k residuals                aborted
summary    blend (required)                               stay
first      residual of the first input                    aborted
winner     residual of the chosen input (``k`` counts     aborted
           from 0 into the inputs)
=========  =============================================  ==================

`first` and `winner` without a scaffold are a commit of that input: it becomes the committed node
itself, and every speculative sibling is aborted, named in the call or not.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from forkserve.errors import ConfigError, NodeError
from forkserve.tree.node import Node
from forkserve.tree.tree import ContextTree
from forkserve.types import JoinPolicy, Tokens
from forkserve.values import whole

__all__ = ["JoinPlan", "JoinResult", "plan_join"]


@dataclass(frozen=True, slots=True)
class JoinResult:
    """node: the new tip.  reused_prefix: positions whose rows were there.  tail: tokens after them.

    winners: inputs whose text is in the body.  aborted: nodes that are dead now.
    """

    node: int
    reused_prefix: int
    tail: int
    policy: JoinPolicy
    winners: tuple[int, ...]
    aborted: tuple[int, ...]


@dataclass(slots=True)
class JoinPlan:
    """What a join is going to do: tokens to put after `parent`, and who wins and loses.

    adopts: the text is one input's own, to its end: that input can become the committed node.
    """

    parent: Node
    tokens: array[int]
    winners: list[Node]
    losers: list[Node]
    adopts: bool


def plan_join(
    tree: ContextTree,
    children: Sequence[int],
    policy: JoinPolicy | str,
    scaffold: Tokens,
    blend: Tokens | None,
    k: int | None,
    parent: int | None,
) -> JoinPlan:
    """Check a join and build its text; changes nothing."""
    try:
        policy = JoinPolicy(policy)
    except ValueError:
        names = ", ".join(p.value for p in JoinPolicy)
        raise ConfigError(f"unknown join policy {policy!r}; use one of {names}") from None
    if not children:
        raise ConfigError("join needs at least one child")
    inputs = [tree.get(child) for child in children]
    if len(set(inputs)) != len(inputs):
        raise ConfigError(f"join got a child twice: {list(children)}")
    trunk = tree.get(parent) if parent is not None else _common_parent(inputs)
    residuals = [_residual(tree, trunk, node) for node in inputs]
    winners = inputs
    losers: list[Node] = []
    if policy in (JoinPolicy.FIRST, JoinPolicy.WINNER, JoinPolicy.KOFN):
        winners, losers = _split(policy, inputs, k)
    chosen = [residuals[inputs.index(node)] for node in winners]
    body = array("i", scaffold)
    blended = policy in (JoinPolicy.ALL, JoinPolicy.KOFN, JoinPolicy.SUMMARY)
    if blend is not None and not blended:
        raise ConfigError(
            f"join policy '{policy.value}' takes its text from the inputs, not a blend"
        )
    if policy is JoinPolicy.SUMMARY and blend is None:
        raise ConfigError("join policy 'summary' needs the summary's tokens as blend=")
    if blend is not None:
        body.extend(blend)
    else:
        for residual in chosen:
            body.extend(residual)
    if not body:
        raise ConfigError(
            "the join would add no token: the inputs are empty and there is no scaffold"
        )
    adopts = len(winners) == 1 and not scaffold and blend is None
    return JoinPlan(trunk, body, winners, losers, adopts)


def _split(policy: JoinPolicy, inputs: list[Node], k: int | None) -> tuple[list[Node], list[Node]]:
    """Winners and losers of the policies that drop inputs."""
    if policy is JoinPolicy.FIRST:
        return inputs[:1], inputs[1:]
    if k is None:
        raise ConfigError(f"join policy '{policy.value}' needs k")
    k = whole("k", k)
    if policy is JoinPolicy.KOFN:
        if not 1 <= k <= len(inputs):
            raise ConfigError(f"k={k} of {len(inputs)} inputs")
        return inputs[:k], inputs[k:]
    if not 0 <= k < len(inputs):
        raise ConfigError(f"winner k={k} is not one of the {len(inputs)} inputs (counted from 0)")
    return [inputs[k]], [node for node in inputs if node is not inputs[k]]


def _common_parent(inputs: list[Node]) -> Node:
    parents = {id(node.parent): node.parent for node in inputs}
    (first, *others) = parents.values()
    if others or first is None:
        raise NodeError("the inputs of a join have no common parent; name one with parent=")
    return first


def _residual(tree: ContextTree, trunk: Node, node: Node) -> array[int]:
    """Tokens of the input after the place where it left the trunk."""
    below: Node | None = node
    while below is not None and below.parent is not trunk:
        below = below.parent
    if below is None:
        raise NodeError(f"node {node.id} is not below node {trunk.id}")
    return tree.tokens(node, below.alias_len)
