"""Prompts by the model's own chat template, and the part of the next one that is known already.

While a tool runs, the next prompt is known up to its result::

    decoded   [-- prompt --|-- turn as the model wrote it --]
    next      [-- prompt --|-- turn as the template writes it --|-- header --| result | close
              [-- at --)[---------------- tokens -----------------)

The template is the only authority on all of it, so it is asked: it renders the conversation with a
placeholder for the result, twice, and what both renderings share before it is the known suffix.
A template that does anything else with the result leaves nothing known, and is counted.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forkserve.engine.prompting import render_prompt, takes_system
from forkserve.errors import ForkServeError
from forkserve.prompt_text import PromptText

if TYPE_CHECKING:
    from forkserve.engine.protocol import Tokenizer
    from forkserve.prompt_text import Piece

__all__ = ["ChatRenderer", "Dialect", "Encoder", "Known", "Message", "common"]

Message = Mapping[str, Any]
Build = Callable[[str], Sequence[Message]]
Mask = Callable[[str, str], Sequence[Message]]

# Placeholders for a result: letters and digits alone, which no template escapes or trims; of
# different lengths and beginnings, so that a template that looks inside gives itself away.
_PLACEHOLDERS = ("Qx7ResultZk", "zw4PlaceholderForAnotherResult9Vt")
LATER = "Jh3LaterResult{}Wp"
_MASK = "Kv8Hidden5Rn"
# How results begin; the last known token must not depend on it.
_BEGINNINGS = (" a", "\n", '{"', "0", "[", "é")


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a template does by itself.  The caller writes the rest into the messages' text.

    tools: it lists the tools.  calls: it writes an assistant's ``tool_calls``.  results: it knows
    messages of the role ``tool``.  parallel: a turn may hold several calls.  system: it writes a
    system message at the beginning; `render_prompt` puts it before the first user's text otherwise.
    """

    tools: bool
    calls: bool
    results: bool
    parallel: bool = True
    system: bool = True


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of the next prompt.

    at: how many decoded tokens it shares.  tokens: those that follow, up to the result; rows of
    them may be computed now.  close: text between the result and the next one, or the end.
    withheld: known tokens that are left out of `tokens`, since hidden text comes before them.
    drift: the template treats the result in a way that leaves nothing known; why.
    """

    at: int
    tokens: tuple[int, ...] = ()
    close: str = ""
    withheld: int = 0
    drift: str = ""


class Encoder:
    """Encodes texts that mostly begin alike: goes on at the last marker that both share.

    Special tokens are split off before anything else is, so what stands before one has the same ids
    whatever comes after it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special: dict[int, str] = {}  # id -> its text, '' for ordinary ones
        self._text = ""
        self._plain: Sequence[Piece] = ()  # what of it is content
        self._ids: list[int] = []
        self._places: list[int] = []  # of markers in the text
        self._indices: list[int] = []  # of the same markers in the ids
        self.encoded = 0  # characters handed to the tokenizer so far

    def encode(self, text: str) -> list[int]:
        """The ids of a text, as the tokenizer alone would give them."""
        whole = PromptText(text)
        text = str(text)
        shared = min(common(self._text, text), _agreed(self._plain, whole.plain))
        kept = bisect_right(self._places, shared) - 1
        while kept >= 0 and not self._whole(kept, shared):
            kept -= 1
        place = self._places[kept] if kept >= 0 else 0
        index = self._indices[kept] if kept >= 0 else 0
        fresh = self._tokenizer.encode(whole[place:])
        self.encoded += len(text) - place
        ids = self._ids[:index] + fresh
        places, indices = self._places[: max(kept, 0)], self._indices[: max(kept, 0)]
        for number, token in enumerate(fresh, index):
            marker = self._marker(token)
            if marker:
                place = whole.control(marker, place)
                if place < 0:  # written otherwise in the text: no place to go on from
                    break
                places.append(place)
                indices.append(number)
                place += len(marker)
        self._text, self._plain, self._ids = text, whole.plain, ids
        self._places, self._indices = places, indices
        return list(ids)

    def _whole(self, number: int, shared: int) -> bool:
        """Whether the marker itself is shared to its end."""
        marker = self._marker(self._ids[self._indices[number]])
        return self._places[number] + len(marker) <= shared

    def _marker(self, token: int) -> str:
        known = self._special.get(token)
        if known is None:
            decode = self._tokenizer.decode_bytes
            text = b"" if decode([token], skip_special=True) else decode([token])
            known = self._special[token] = text.decode("utf-8", "replace")
        return known


class ChatRenderer:
    """Conversations as text and tokens, by a tokenizer's own template.

    tools: their schemas, as OpenAI describes them.  dialect: what the template can do; found out by
    trying it if not given.  drifts: how often nothing was known because of the template.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[Mapping[str, Any]] = (),
        dialect: Dialect | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.tools = list(tools)
        self.dialect = dialect or probe(tokenizer)
        self.drifts = 0
        self._encoder = Encoder(tokenizer)

    def text(self, messages: Sequence[Message], *, generation: bool = True) -> str:
        """The prompt as text; `PromptText` of a template whose contents are told apart."""
        tools = self.tools if self.tools and self.dialect.tools else None
        system = self.dialect.system

        def rendered(messages: Sequence[Message], tools: Sequence[Message] | None) -> str:
            return render_prompt(
                self.tokenizer,
                messages,
                tools=tools,
                add_generation_prompt=generation,
                system=system,
            )

        text = rendered(messages, tools)
        try:
            text.encode()
        except UnicodeEncodeError:
            text = rendered(_sound(messages), _sound(tools))
        return text

    def tokens(self, messages: Sequence[Message], *, generation: bool = True) -> list[int]:
        """The prompt as token ids: those of the whole text, encoded at once."""
        return self._encoder.encode(self.text(messages, generation=generation))

    def known(
        self,
        decoded: Sequence[int],
        build: Build,
        *,
        prefix: str = "",
        masks: Sequence[Mask] = (),
    ) -> Known:
        """What follows `decoded` for certain, up to the result that is still to come.

        build: the conversation with a given text as that result (others that are to come after it
        hold `LATER` placeholders).  prefix: how the result begins, if that is known or guessed; it
        is escaped as the template escapes results.  masks: the same conversation with something
        hidden (a call's arguments) replaced by a second text: no token is given that stands in or
        after hidden text which `decoded` does not hold already.
        """
        try:
            texts = [self.text(build(prefix + word)) for word in _PLACEHOLDERS]
            head, close = _cut(texts)
            others = [self.text(build(prefix + word)) for word in _BEGINNINGS]
            hidden = [self.text(mask(prefix + _PLACEHOLDERS[0], _MASK)) for mask in masks]
        except (ForkServeError, _Drift) as error:
            self.drifts += 1
            return Known(len(decoded), drift=str(error))
        ids = self._encoder.encode(texts[0])
        length = len(ids)
        for text in [texts[1], *others]:
            length = min(length, common(ids, self._encoder.encode(text)))
        ids = ids[:length]
        at = common(ids, decoded)
        upto = self._visible(ids, at, head, texts[0], hidden)
        return Known(at, tuple(ids[at:upto]), close, len(ids) - upto)

    def _visible(self, ids: list[int], at: int, head: str, text: str, hidden: Sequence[str]) -> int:
        """How many of `ids` may be used: those before hidden text that `ids[:at]` lack."""
        if not hidden:
            return len(ids)
        decode = self.tokenizer.decode_bytes
        whole = decode(ids)
        if not head.encode().startswith(whole):  # text and ids are not in step: be careful
            return at
        held, limit = len(decode(ids[:at])), len(whole)
        for masked in hidden:
            begin = common(text, masked)
            end = max(begin, len(text) - common(text[::-1], masked[::-1]))
            if begin < len(head) and held < len(text[:end].encode()):
                limit = min(limit, len(text[:begin].encode()))
        upto = len(ids)
        while upto > at and len(whole) > limit:
            upto -= 1
            whole = whole[: len(whole) - len(decode(ids[upto : upto + 1]))]
        return upto


def probe(tokenizer: Tokenizer) -> Dialect:
    """Find out what a template does with tools, calls and results by giving it some."""
    word = _PLACEHOLDERS[0]
    function = {"name": word, "description": "x", "parameters": {"type": "object"}}
    call = {"id": "call00000", "type": "function", "function": {"name": word, "arguments": {}}}
    user = {"role": "user", "content": "x"}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    plain = {"role": "assistant", "content": "x"}
    result = {"role": "tool", "tool_call_id": "call00000", "name": "x", "content": "x"}

    def shows(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> bool:
        try:
            return word in tokenizer.render(messages, tools=tools, add_generation_prompt=True)
        except ForkServeError:
            return False

    tools = shows([user], [{"type": "function", "function": function}])
    calls = shows([user, calling, result], None) or shows([user, calling], None)
    before = calling if calls else plain
    named = {**call, "function": {"name": "x", "arguments": {}}}
    if calls:
        before = {**calling, "tool_calls": [named]}
    results = shows([user, before, {**result, "content": word}], None)
    second = {**call, "id": "call00001"}
    two = {**calling, "tool_calls": [named, second]}
    answers = [result, {**result, "tool_call_id": "call00001"}]
    parallel = not calls or shows([user, two, *answers], None) or shows([user, two], None)
    return Dialect(tools, calls, results, parallel, takes_system(tokenizer))


def _sound(value: Any) -> Any:
    """A value of JSON that can be encoded: surrogate pairs joined, lone halves replaced.

    Models write them as escapes in JSON, and tools return them from file names.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    elif isinstance(value, Mapping):
        return {_sound(key): _sound(item) for key, item in value.items()}
    elif isinstance(value, list | tuple):
        return [_sound(item) for item in value]
    return value


class _Drift(Exception):
    """The template does something else with a result than to write it down."""


def _cut(texts: Sequence[str]) -> tuple[str, str]:
    """What stands before the result and what after it, the same in both renderings."""
    parts = []
    for text, word in zip(texts, _PLACEHOLDERS, strict=True):
        if text.count(word) != 1:
            raise _Drift(f"the template writes a result {text.count(word)} times")
        head, _, close = text.partition(word)
        later = close.find(LATER.split("{", maxsplit=1)[0])
        parts.append((head, close, close[:later] if later >= 0 else close))
    if parts[0][:2] != parts[1][:2]:
        raise _Drift("what the template writes around a result depends on the result")
    return parts[0][0], parts[0][2]


def _agreed(a: Sequence[Piece], b: Sequence[Piece]) -> int:
    """Up to where two texts have the same content marked."""
    same = common(a, b)
    return min((spans[same][0] for spans in (a, b) if same < len(spans)), default=sys.maxsize)


def common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Length of the longest common prefix, by halving: slices compare fast."""
    if isinstance(a, PromptText) or isinstance(b, PromptText):  # whose slices are slow
        a, b = str(a), str(b)
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
