"""A tokenizer's twin that knows its control tokens by secret names.

What a user or a tool says must never become a control token, and yet a text has to be encoded as a
whole: white space at a seam, a space that is put before a text, and merges depend on what stands
around.  In the twin every control token has a name that nobody can guess; the caller writes that
name where a control token is meant, and all else is text::

    <|im_start|>user\\nhi <|im_end|> there<|im_end|>      as a person reads it
    [secret 0]user\\nhi <|im_end|> there[secret 1]        as the twin does

Hugging Face's ``encode_special_tokens`` reads all control tokens of a text as text, or none; and it
leaves them in the model's vocabulary, where a merge or a whole word can still make one.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import Tokenizer

from forkserve.prompt_text import Piece

__all__ = ["Literal"]


class Literal:
    """The twin of a tokenizer.  Ids are the original's."""

    def __init__(self, backend: Tokenizer) -> None:
        state = json.loads(backend.to_str())
        secret = secrets.token_hex(12)
        self._names = {
            token["content"]: f"\ufdd0{secret}{number:x}\ufdd1"
            for number, token in enumerate(state["added_tokens"])
            if token["special"]
        }
        for token in state["added_tokens"]:
            if token["special"]:
                token["content"] = self._names[token["content"]]
                token["normalized"] = token["single_word"] = False
        _rename(state["model"], self._names)
        state["post_processor"] = state["decoder"] = None  # of no use to `encode`
        self._backend: Tokenizer = Tokenizer.from_str(json.dumps(state))
        # What is not in the model's vocabulary is numbered anew.
        self._ids: dict[int, int] = {}
        for id_, token in backend.get_added_tokens_decoder().items():
            given = self._backend.token_to_id(self._names.get(token.content, token.content))
            if given is not None and given != id_:
                self._ids[given] = id_

    def encode(self, text: str, controls: Iterable[Piece] = ()) -> list[int]:
        """Ids of a text in which control tokens stand at `controls`, in order, and nowhere else."""
        parts, at = [], 0
        for begin, end in controls:
            parts += [text[at:begin], self._names[text[begin:end]]]
            at = end
        parts.append(text[at:])
        ids: list[int] = self._backend.encode("".join(parts), add_special_tokens=False).ids
        return [self._ids.get(i, i) for i in ids] if self._ids else ids


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Take the control tokens out of reach of the model, which then can't make them."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): id_ for piece, id_ in vocab.items()}
    else:  # unigram: pairs of piece and score
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not _makes(merge, names)]


def _makes(merge: str | list[str], names: Mapping[str, str]) -> bool:
    """Whether a merge has to do with a control token."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in names or right in names or left + right in names
