"""What the model thinks of given texts: their logits from one pass, and the mass of each.

A probe writes no row of the tree: its works replay the last token of a committed node, with a text
behind it, for the logits at its end (``write=None``).  Nothing is sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from forkserve.errors import ConfigError
from forkserve.types import FloatArray

__all__ = ["Probe", "choice_mass", "forks"]

Text = tuple[int, ...]


class Probe:
    """Texts behind the first `at` tokens of a path; rows[i] are the logits [V] after text i.

    saved: tokens that it was granted and has not used.
    """

    def __init__(self, texts: Sequence[Text], at: int) -> None:
        self.texts = list(texts)
        self.at = at
        self.saved = 0
        self.rows: dict[int, FloatArray] = {}

    def pending(self) -> list[int]:
        """Numbers of the texts that still have to run."""
        return [i for i in range(len(self.texts)) if i not in self.rows]

    def tokens_left(self) -> int:
        """Tokens of passes that they take, the replayed ones included."""
        return sum(len(self.texts[i]) + 1 for i in self.pending())


def forks(texts: Mapping[str, Sequence[int]]) -> list[Text]:
    """What must be run to choose among the texts: each cut where no other agrees any more.

    Raises ConfigError for none, an empty one, or two that are equal.
    """
    if not texts:
        raise ConfigError("there is nothing to choose from: no text was given")
    every = [tuple(text) for text in texts.values()]
    if not all(every) or len(set(every)) < len(every):
        raise ConfigError("the texts to choose from must differ, and none may be empty")
    shared = {text[:i] for text in every for i in range(len(text) + 1)}
    following = dict.fromkeys(shared, 0)
    for text in shared:
        if text:
            following[text[:-1]] += 1
    ends = set(every)
    # After these the texts part ways, or one ends where another goes on.
    return sorted(p for p in shared if following[p] > 1 or (following[p] and p in ends))


def choice_mass(
    texts: Mapping[str, Sequence[int]], logits: Mapping[Text, FloatArray]
) -> dict[str, float]:
    """Probability of each text if the model must say one of them, token by token.

    logits: the row [V] after each of `forks`.  At each fork the tokens that lead on share what the
    model gives to them alone, as a mask on sampling would have it; a text that ends where another
    goes on gets what the model gives to anything else.
    """
    spelled = {name: tuple(text) for name, text in texts.items()}
    ends = set(spelled.values())
    share: dict[Text, float] = {}  # of each step behind a fork, given that the fork was reached
    stay: dict[Text, float] = {}  # of ending at a fork
    for fork, row in logits.items():
        depth = len(fork)
        onward = {t[depth] for t in ends if len(t) > depth and t[:depth] == fork}
        values = row.astype(np.float64)
        # Against the largest that counts: what all of them are far below must not make them 0.
        counts = values if fork in ends else values[list(onward)]
        p = np.exp(np.minimum(values - counts.max(), 0.0))
        led = {token: float(p[token]) for token in onward}
        rest = max(float(p.sum()) - sum(led.values()), 0.0) if fork in ends else 0.0
        whole = sum(led.values()) + rest
        stay[fork] = rest / whole
        share.update({(*fork, token): value / whole for token, value in led.items()})
    return {
        name: stay.get(text, 1.0) * prod(share.get(text[: i + 1], 1.0) for i in range(len(text)))
        for name, text in spelled.items()
    }
