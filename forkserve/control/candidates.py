"""Where speculation comes from: declared suffixes, grammar mass, and a per-tool n-gram.

Branch ids come from the caller or from the tool names of a grammar; nothing here invents one, and
no text is ever drafted by the model.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite
from sys import float_info

from forkserve.errors import ConfigError
from forkserve.types import Tokens
from forkserve.values import number, string

__all__ = ["OTHER", "Candidate", "GrammarBranch", "NGramResidual", "grammar_branches"]

OTHER = "other"

_SAMPLES = 32  # outputs kept per tool
_TOOLS = 64  # tools kept per session
_END = -1  # stands behind the last token of an output that was shorter than the window


@dataclass(frozen=True, slots=True)
class Candidate:
    """A branch that could be prefilled while its parent waits.

    known: tokens that are certain if the branch is taken and have no KV yet.
    guess: guessed tokens after them, without KV.
    p: probability that the branch is taken; for a declared branch, the caller's priority.
    q: probability that the whole guess is a prefix of the real text.
    schema_stable: the text after `known` has a fixed shape (JSON, XML, a diff); a guess of free
    text is never admitted.
    t_idle_ms: ms that the parent is expected to wait still.
    context: tokens on the path before the first new one.
    declared: named by the harness, rather than by a grammar's mass.
    """

    session: str
    node: int
    parent: int
    branch: str
    generation: int
    tenant: str
    known: int
    guess: int
    p: float
    q: float
    schema_stable: bool
    t_idle_ms: float
    context: int
    declared: bool = True

    def __post_init__(self) -> None:
        for name, low, high in (
            ("known", 0, inf),
            ("guess", 0, inf),
            ("p", 0, 1),
            ("q", 0, 1),
            ("t_idle_ms", 0, inf),
            ("context", 0, inf),
        ):
            value = getattr(self, name)
            if not low <= value <= high:  # also false for NaN
                raise ConfigError(
                    f"candidate {self.branch!r} (node {self.node} of session {self.session!r}): "
                    f"{name}={value!r} is outside [{low}, {high}]"
                )


@dataclass(frozen=True, slots=True)
class GrammarBranch:
    """One branch read off a grammar's mass: its id, its wrapper, its probability."""

    branch: str
    tokens: Tokens
    p: float


def grammar_branches(
    masses: Mapping[str, float], wrappers: Mapping[str, Tokens], generic: Tokens, top_m: int
) -> list[GrammarBranch]:
    """The `top_m` likeliest tools, and one branch `other` for all the rest.

    masses: unnormalised mass per tool name, from constrained decoding.  wrappers: known tokens of
    each tool's call.  A tool of the top without a wrapper, and a tool that is itself called
    `other`, go to the rest, whose wrapper is `generic`.  Heaviest first, `other` last; the p sum
    to 1.  Equal masses go by name, so that the result doesn't depend on the mapping's order.
    """
    if top_m < 0:
        raise ConfigError(f"top_m={top_m} is negative")
    masses = {
        string("the name of a tool", name): number(f"the mass of '{name}'", mass, 0, float_info.max)
        for name, mass in masses.items()
    }
    total = sum(masses.values())
    if not isfinite(total) or total <= 0:
        raise ConfigError(f"the masses of {len(masses)} tools sum to {total}; nothing to rank")
    order = sorted(masses, key=lambda name: (-masses[name], name))
    top = [n for n in order[:top_m] if n in wrappers and n != OTHER and masses[n] > 0]
    branches = [GrammarBranch(n, tuple(wrappers[n]), masses[n] / total) for n in top]
    kept = set(top)
    rest = sum(mass for name, mass in masses.items() if name not in kept)
    if rest > 0:
        branches.append(GrammarBranch(OTHER, tuple(generic), rest / total))
    return branches


class NGramResidual:
    """Guesses how a tool's next output begins, from the outputs of this session alone.

    One object per session: it holds tool output, which must not cross sessions or tenants.
    order: tokens of context.  tokens: first tokens of an output that are learned and guessed.
    q_min: a guess grows while its probability stays at or above this.
    Memory: at most 64 tools with 32 outputs of `tokens` tokens each, oldest out first.
    """

    def __init__(self, order: int, tokens: int, q_min: float) -> None:
        if order < 1 or tokens < 0 or not 0 <= q_min <= 1:
            raise ConfigError(
                f"n-gram order={order} must be >= 1, tokens={tokens} >= 0, q_min={q_min} in [0, 1]"
            )
        self._order = order
        self.tokens = tokens
        self._q_min = q_min
        self._tools: OrderedDict[str, deque[tuple[int, ...]]] = OrderedDict()

    def observe(self, tool: str, tokens: Tokens, *, schema_stable: bool = True) -> None:
        """Learn one output.  A free-form one makes the predictor forget that tool."""
        if not schema_stable:
            self._tools.pop(tool, None)
            return
        head = tuple(tokens[: self.tokens])
        if len(head) < self.tokens:
            head = (*head, _END)
        self._tools.setdefault(tool, deque(maxlen=_SAMPLES)).append(head)
        self._tools.move_to_end(tool)
        if len(self._tools) > _TOOLS:
            self._tools.popitem(last=False)

    def predict(self, tool: str) -> tuple[tuple[int, ...], float]:
        """The likeliest beginning and the probability q that it is right; ((), 0) if unknown.

        q is the product of the n-gram shares along the guess, times N/(N+1) for N outputs seen:
        one sighting is worth 1/2, not certainty.
        """
        samples = self._tools.get(tool)
        if not samples:
            return (), 0.0
        follow = self._follow(samples)
        q = len(samples) / (len(samples) + 1)
        guess: list[int] = []
        while len(guess) < self.tokens:
            counts = follow.get(tuple(guess[-self._order :]))
            if counts is None:
                break
            token, count = max(counts.items(), key=lambda item: (item[1], -item[0]))
            share = count / counts.total()
            if token == _END or q * share < self._q_min:
                break
            guess.append(token)
            q *= share
        return (tuple(guess), q) if guess else ((), 0.0)

    def _follow(self, samples: deque[tuple[int, ...]]) -> dict[tuple[int, ...], Counter[int]]:
        """Counts of the token after each context; a context shorter than `order` is a start."""
        follow: dict[tuple[int, ...], Counter[int]] = {}
        for sample in samples:
            for i, token in enumerate(sample):
                context = sample[max(0, i - self._order) : i]
                follow.setdefault(context, Counter())[token] += 1
        return follow
