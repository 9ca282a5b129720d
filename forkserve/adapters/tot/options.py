"""How a search is run: settings, checked."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, Literal, get_args

from forkserve.adapters.tot.places import Trunks
from forkserve.adapters.tot.records import Step
from forkserve.adapters.tot.task import Role, Task
from forkserve.api import Engine
from forkserve.errors import ConfigError
from forkserve.session import Session
from forkserve.types import SamplingParams

__all__ = ["Budget", "Options", "options"]

Mode = Literal["append", "template"]
Generate = Literal["propose", "sample"]
Evaluate = Literal["value", "vote", "score", "logprob"]

_WARM = SamplingParams(temperature=0.7)


@dataclass(frozen=True, slots=True)
class Budget:
    """Where a search stops at the latest; what it has by then is its result.

    max_nodes: thoughts, duplicates apart.  max_tokens: tokens that the model writes; replies that
    would go beyond it are cut there, and their step is dropped.  deadline_s: seconds from its
    begin; replies that are being written then are cut, and their step is dropped.
    """

    max_nodes: int | None = None
    max_tokens: int | None = None
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("max_nodes", 1), ("max_tokens", 1)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, Integral) or value < least):
                raise ConfigError(f"Budget.{name}={value!r} must be a whole number >= {least}")
        limit = self.deadline_s
        if limit is not None and not (isinstance(limit, Real) and 0 <= limit < math.inf):
            raise ConfigError(f"Budget.deadline_s={limit!r} must be seconds >= 0")


@dataclass(frozen=True)
class Options:
    """What all searches share.

    mode: "append" (a thought is a branch of the one before it) or "template" (every prompt is a
    fixed few-shot trunk and a short residual; see `Task`).
    generate: "propose" (several thoughts from one reply) or "sample" (a reply is a thought).
    n_generate: replies for each thought that is expanded; 1 proposal or 5 samples by default.
    evaluate: "value" (each state by itself), "vote" (all states of a step in one ballot), "score"
    (`Task.score`, without the model), "logprob" (of the sampled tokens, their mean).
    n_evaluate: replies for each evaluation, of which the mean counts; one when they are greedy and
    so would all be the same.
    unreadable: what an evaluation counts that cannot be read, or "raise" for UnreadableReply.
    depth: thoughts on a path, at most; `Task.depth` by default.
    params, max_tokens: how the model replies, for all roles or by role (missing ones: the default).
    seed: of the draws, unless params has one; the i-th request draws from ``derive_seed(seed, i)``.
    dedupe: drop thoughts with the key of an earlier one.  cache: in template mode, evaluate equal
    prompts once.  first: stop with the first answer that `Task.check` calls right.
    max_parallel: requests that decode together, at most.  budget: see `Budget`.
    trunks: for template mode, kept from search to search; by default the search has its own.
    session: for append mode, an open session to search from the end of.  The best path is committed
    to it (if it is still alive), and it stays open; by default the search opens one and closes it.
    on_step: called with each `Step`; what it raises ends the search.
    """

    mode: Mode = "append"
    generate: Generate = "propose"
    n_generate: int | None = None
    evaluate: Evaluate = "value"
    n_evaluate: int = 3
    unreadable: float | Literal["raise"] = 0.0
    depth: int | None = None
    params: SamplingParams | Mapping[Role, SamplingParams] = _WARM
    max_tokens: int | Mapping[Role, int] = 128
    seed: int = 0
    dedupe: bool = True
    cache: bool = True
    first: bool = True
    max_parallel: int = 64
    budget: Budget = field(default_factory=Budget)
    trunks: Trunks | None = None
    session: Session | None = None
    on_step: Callable[[Step], None] | None = None

    def __post_init__(self) -> None:
        for name, kinds in (("mode", Mode), ("generate", Generate), ("evaluate", Evaluate)):
            if getattr(self, name) not in get_args(kinds):
                wanted = " or ".join(repr(kind) for kind in get_args(kinds))
                raise ConfigError(f"{name}={getattr(self, name)!r} must be {wanted}")
        for name in ("n_generate", "n_evaluate", "depth", "max_parallel"):
            value = getattr(self, name)
            if value is None and name in ("n_generate", "depth"):
                continue
            if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r} must be a whole number >= 1")
        if not isinstance(self.budget, Budget):
            raise ConfigError(f"budget={self.budget!r} must be a Budget(max_nodes=, ...)")
        score = self.unreadable
        number = isinstance(score, Real) and not isinstance(score, bool) and math.isfinite(score)
        if score != "raise" and not number:
            raise ConfigError(f"unreadable={score!r} must be a finite number or 'raise'")
        roles = get_args(Role)
        for name in ("params", "max_tokens"):
            given = getattr(self, name)
            for key in given if isinstance(given, Mapping) else ():
                if key not in roles:
                    raise ConfigError(f"{name}: no role {key!r}; there are {', '.join(roles)}")
        for role in roles:
            self._check(role)
        self._agree()

    def _check(self, role: Role) -> None:
        """Sampling of a role."""
        params, tokens = self.sampling(role), self.tokens(role)
        if not isinstance(params, SamplingParams):
            raise ConfigError(f"params of {role} must be SamplingParams, not {params!r}")
        if not isinstance(tokens, Integral) or isinstance(tokens, bool) or tokens < 1:
            raise ConfigError(f"max_tokens={tokens!r} of {role} must be a whole number >= 1")

    def _agree(self) -> None:
        """Settings that exclude each other."""
        if self.evaluate == "logprob" and self.generate != "sample":
            raise ConfigError(
                "evaluate='logprob' needs generate='sample': a reply for each thought"
            )
        if self.trunks is not None and self.mode != "template":
            raise ConfigError("trunks are for mode='template'")
        if self.session is not None and self.mode != "append":
            raise ConfigError("session is for mode='append'")
        if (
            self.generate == "sample"
            and self.replies > 1
            and not self.sampling("sample").temperature
        ):
            raise ConfigError(
                f"n_generate={self.replies} samples at temperature 0 are all the same; give params "
                "with a temperature"
            )

    @property
    def replies(self) -> int:
        """Replies for each thought that is expanded."""
        return self.n_generate or (1 if self.generate == "propose" else 5)

    def sampling(self, role: Role) -> SamplingParams:
        """How replies in a role are sampled."""
        return self.params.get(role, _WARM) if isinstance(self.params, Mapping) else self.params

    def tokens(self, role: Role) -> int:
        """The longest reply in a role."""
        given = self.max_tokens
        return given.get(role, 128) if isinstance(given, Mapping) else given

    def evaluations(self, role: Role) -> int:
        """Replies for each evaluation."""
        return self.n_evaluate if self.sampling(role).temperature else 1


def options(engine: Engine, task: Task, given: Mapping[str, Any]) -> Options:
    """The settings of a search on an engine; raises ConfigError with the nearest known name."""
    known = [one.name for one in fields(Options)]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else f"; there are {', '.join(known)}"
            raise ConfigError(f"unknown option '{name}'{hint}")
    found = Options(**given)
    if not isinstance(task, Task):
        raise ConfigError(f"task={task!r} must be an instance of a subclass of Task")
    if found.trunks is not None:
        found.trunks.check(engine, task)
    if found.session is not None and found.session.engine is not engine:
        raise ConfigError("the session belongs to another engine")
    return found
