"""How to sample, as clients of OpenAI and vLLM say it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forkserve.errors import ConfigError

__all__ = ["SAMPLING", "sampling_fields"]

# Their name -> field of `SamplingParams`.  The second half is vLLM's alone.
SAMPLING: dict[str, str] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "seed": "seed",
    "logit_bias": "logit_bias",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logprobs": "logprobs",
    "top_logprobs": "top_logprobs",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "stop_token_ids": "stop_ids",
    "ignore_eos": "ignore_eos",
}


def sampling_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `SamplingParams` from a request's; those that are not there or None keep defaults.

    A bias by JSON has its ids as text.  Raises ConfigError if one is no number.
    """
    fields = {
        ours: options[name] for name, ours in SAMPLING.items() if options.get(name) is not None
    }
    if "stop_ids" in fields:
        fields["stop_ids"] = tuple(fields["stop_ids"])
    if isinstance(bias := fields.get("logit_bias"), Mapping):
        try:
            fields["logit_bias"] = {int(token): value for token, value in bias.items()}
        except (TypeError, ValueError) as error:
            raise ConfigError(f"logit_bias has token ids as keys: {error}") from None
    return fields
