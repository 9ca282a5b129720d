"""Settings.  One frozen model, checked, with environment overrides."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from forkserve.errors import ConfigError
from forkserve.values import nearest

__all__ = ["ENV_PREFIX", "ForkServeConfig", "require_config"]

ENV_PREFIX = "FORKSERVE_"
# What is looked for here and is an argument elsewhere.
_ELSEWHERE = {
    "LocalBackend": ("model", "dtype", "kernels", "threads", "device", "kv", "debug"),
    "MockBackend": ("replies", "step_ms", "prefill_us", "vocab_size", "window", "clock"),
    "Store": ("budget_bytes", "memory_bytes", "device_bytes", "far", "lossy", "encrypt"),
    "Engine": ("store",),
}


class ForkServeConfig(BaseModel):
    """All settings of an engine.

    Precedence: argument, then environment (``FORKSERVE_PAGE_SIZE=32``), then default.  An unknown
    name is a `ConfigError` that names the nearest known one.  The unit stands in each field's
    description.  In brackets: the symbol of the formulas in `forkserve.control`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Pages
    page_size: int = Field(16, ge=1, le=256, description="tokens per KV page [P]")
    capacity_pages: int = Field(16384, ge=1, description="pages in the pool, fixed for its life")
    tail: Literal["auto", "pack", "freeze"] = Field(
        "auto",
        description="unaligned tails: copy the rows, share the page, or whichever is smaller",
    )
    lazy_abort: bool = Field(False, description="abort marks; drain_aborts reclaims")
    prefix_index: bool = Field(True, description="share committed pages between sessions by hash")

    # Batches
    max_batch_tokens: int = Field(8192, ge=1, description="tokens per tick, both classes [B_t]")
    max_batch_works: int = Field(256, ge=1, description="works per tick")
    prefill_chunk: int = Field(2048, ge=1, description="tokens of one committed prefill chunk")
    c_spec: int = Field(512, ge=1, description="tokens of one speculative chunk, at most [C_spec]")
    tick_ms: float = Field(8.0, gt=0, description="ms a tick is planned for [delta]")

    # Service levels
    tbt_slo_ms: float = Field(50.0, gt=0, description="ms between tokens of a generation")
    ttft_slo_ms: float = Field(200.0, gt=0, description="ms from observation to first token")
    tbt_weight: float = Field(
        4.0, ge=0, description="ms of first-token time that 1 ms of token time is worth [lambda]"
    )
    tbt_margin: float = Field(
        0.4, ge=0, le=1, description="share of tbt_slo_ms a speculative chunk may take [gamma]"
    )
    max_queue: int = Field(4096, ge=1, description="jobs waiting in the engine, at most")

    # Planner
    grammar_top_m: int = Field(3, ge=0, description="tool names forked from grammar mass, at most")
    branch_cap: int = Field(6, ge=1, description="speculating children of one node, at most [m]")
    q_min: float = Field(0.35, ge=0, le=1, description="least probability of a guess [q_min]")
    eta_partial: float = Field(
        0.5, gt=0, le=1, description="usefulness of a guess that is half right"
    )
    ngram_order: int = Field(3, ge=1, description="tokens of context of the residual predictor")
    ngram_tokens: int = Field(32, ge=0, description="tokens the residual predictor may guess")
    prior_width: int = Field(
        2048, ge=1, le=1 << 32, description="counters per row of the branch prior's sketch"
    )
    prior_depth: int = Field(4, ge=1, le=64, description="rows of the branch prior's sketch")
    prior_decay: float = Field(0.97, gt=0, le=1, description="factor on old counts per observation")
    idle_quantile: float = Field(
        0.25, gt=0, lt=1, description="quantile of tool times taken as T_idle"
    )
    exact_items: int = Field(
        12, ge=0, description="solve the knapsack exactly up to this many items"
    )

    # Fairness
    kappa: float = Field(0.25, ge=0, le=1, description="price of a speculative token when it runs")
    aging_ms: float = Field(
        1000.0, gt=0, description="ms of waiting that outweigh one tick of service"
    )

    # Retention
    ttl_max_s: float = Field(
        8.0, gt=0, description="s an idle residual keeps its KV, at most [tau_max]"
    )
    ttl_alpha: float = Field(1.2, ge=0, description="weight of the expected tool time in the TTL")
    ttl_beta: float = Field(1.0, ge=0, description="weight of recompute and queue time in the TTL")
    ttl_min_s: float = Field(0.05, ge=0, description="s an idle residual keeps its KV, at least")

    # Engine
    background: bool = Field(False, description="run the engine loop in a thread of its own")
    max_context: int | None = Field(
        None, ge=2, description="tokens; None takes the model's own limit"
    )
    split_special_tokens: bool = Field(
        True,
        description="control tokens named in chat messages, tools and documents are plain text; "
        "False lets contents write them",
    )
    shuffle_pages: bool = Field(False, description="hand pages out in random order (a test aid)")
    seed: int = Field(0, description="root of every random draw")

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_explain(error, type(self))) from None

    @model_validator(mode="before")
    @classmethod
    def _environment(cls, values: Any) -> Any:
        """Add FORKSERVE_* values for fields that were not given."""
        if not isinstance(values, Mapping):
            return values
        merged = dict(values)
        for key, text in os.environ.items():
            if not key.startswith(ENV_PREFIX):
                continue
            name = key[len(ENV_PREFIX) :].lower()
            if name in cls.model_fields:
                merged.setdefault(name, text)
        return merged

    @property
    def gamma_ms(self) -> float:
        """Head-room of token time that a speculative chunk may use, in ms [gamma]."""
        return self.tbt_margin * self.tbt_slo_ms

    def replace(self, **values: Any) -> ForkServeConfig:
        """A copy with some fields changed, checked like a new one."""
        return type(self)(**{**self.model_dump(), **values})


def require_config(config: object, backend: str) -> None:
    """Raise ConfigError for what stands in the place of a backend's config and is none."""
    if not isinstance(config, ForkServeConfig):
        raise ConfigError(
            f"config={config!r} is {type(config).__name__}; {backend} takes a ForkServeConfig "
            f"first: {backend}(ForkServeConfig(), ...)"
        )


def _explain(error: ValidationError, model: type[BaseModel]) -> str:
    """One line per fault, with the nearest known name for an unknown one."""
    lines = []
    for fault in error.errors():
        name = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            hint = _owner(name) or nearest(name, model.model_fields)
            lines.append(f"unknown setting '{name}'{hint}")
        else:
            lines.append(f"{name}={fault['input']!r}: {fault['msg']}")
    return "; ".join(lines)


def _owner(name: str) -> str:
    """What an error about a setting that is an argument elsewhere ends with."""
    owner = next((owner for owner, names in _ELSEWHERE.items() if name in names), "")
    return f"; {name} belongs to {owner}: {owner}(..., {name}=...)" if owner else ""
