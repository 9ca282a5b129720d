"""Which characters of a rendered prompt come from the conversation, and which from the template.

A chat template is a program that yields one string.  To see what became of its input, the input is
written in a *shadow* alphabet: every character but white space, quotes and the like is moved up by
U+100000, one for one::

    content   h i ,   < | i m _ e n d | >       rendered   < | i m _ e n d | >  h i ,   < | i ...
    shadow    H I ;   [ : I M _ E N D : ]       shadow     < | i m _ e n d | >  H I ;   [ : I ...

Whatever joins, slices, trims, formats or loops carries the shadow along, since lengths and places
are the same.  What compares or searches is told to read through it (`Follower`).  The result, read
back, must be what the template yields without all this; if it is not, the template did something
that can't be followed, and the caller knows.  Characters that look moved without having been count
as content: there is nothing to forge.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from jinja2 import nodes
from jinja2.runtime import Context

from forkserve.engine.local.bounded import Bounded, through
from forkserve.errors import ModelError
from forkserve.prompt_text import PromptText

__all__ = [
    "Follower",
    "Mask",
    "Openings",
    "mapped",
    "movable",
    "read",
    "reveal",
    "shadow",
    "shadow_messages",
    "texts",
]

Mask = npt.NDArray[np.bool_]

_UP = 0x100000
_CODEC = "utf-32-le"
# Roles that templates spell control tokens with: '<|' + message.role + '|>'.
_ROLES = frozenset(
    ("system", "developer", "user", "assistant", "tool", "function", "ipython", "environment")
)


def _movable() -> Mask:
    """By code point: JSON and repr escape some characters, and trimming asks for others."""
    table = np.zeros(0x10000, np.bool_)
    for code in range(0x21, 0xFFFE):
        char = chr(code)
        table[code] = not (char.isspace() or char in "\"'\\" or 0xD800 <= code < 0xE000)
    return table


_MOVES = _movable()


def movable(text: str) -> bool:
    """Whether a character of the text would be seen to be content."""
    return any(ord(char) < 0x10000 and bool(_MOVES[ord(char)]) for char in text)


def _codes(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode(_CODEC, "surrogatepass"), np.uint32).copy()


def _text(codes: npt.NDArray[np.uint32]) -> str:
    return codes.tobytes().decode(_CODEC, "surrogatepass")


def _moved(text: str, where: Mask | None = None) -> str:
    """The text in the shadow alphabet, all of it or where the mask says."""
    codes = _codes(text)
    moves = _MOVES[np.minimum(codes, 0xFFFF)]
    codes[moves if where is None else moves & where] += np.uint32(_UP)
    return _text(codes)


def reveal(text: str) -> tuple[str, Mask]:
    """Shadow text as it is read, and which of its characters were moved."""
    codes = _codes(text)
    mask = (codes >= _UP) & (codes < _UP + 0xFFFE)
    codes[mask] -= np.uint32(_UP)
    return _text(codes), mask


def read(value: Any) -> Any:
    """A value without its shadow: text, or a list or tuple of it."""
    if isinstance(value, str):
        return value if value.isascii() else reveal(value)[0]
    if type(value) in (list, tuple):
        return type(value)(read(item) for item in value)
    return value


class _Key(str):
    """A key of a mapping: shadow when it is written, itself when it is looked up or sorted."""

    raw: str

    def __new__(cls, raw: str) -> _Key:
        made = super().__new__(cls, _moved(raw))
        made.raw = raw
        return made

    def __hash__(self) -> int:
        return hash(self.raw)

    def __eq__(self, other: object) -> bool:
        return self.raw == (other.raw if isinstance(other, _Key) else read(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: str) -> bool:
        return self.raw < (other.raw if isinstance(other, _Key) else str(read(other)))


_key = functools.lru_cache(4096)(_Key)
_again = functools.lru_cache(512)(_moved)
_SHORT = 4096  # characters of a text that is remembered: 8 MB of them at most


def mapped(value: Any, change: Callable[[str], str], key: Callable[[str], str]) -> Any:
    """A value of JSON with its texts and keys changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            key(name) if isinstance(name, str) else name: mapped(item, change, key)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        items = [mapped(item, change, key) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if value is None or isinstance(value, bool | int | float):
        return value
    raise ModelError(
        f"a conversation holds JSON, and here an object of type {type(value).__name__}, whose text "
        "can't be told from the template's; give its text"
    )


def texts(value: Any) -> Iterator[str]:
    """All texts in a value, its keys too; of what is no JSON, how it would be written."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield str(name)
            yield from texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts(item)
    elif value is not None:
        yield str(value)


def shadow(value: Any) -> Any:
    """A value of JSON in the shadow alphabet.  Of `PromptText` only what is marked as content."""
    return mapped(value, _shadow, _key)


def shadow_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages in the shadow alphabet, but for roles that are well known."""
    made: list[dict[str, Any]] = []
    for message in messages:
        one: dict[str, Any] = shadow(message)
        if isinstance(message, Mapping) and str(message.get("role")) in _ROLES:
            one["role"] = message["role"]
        made.append(one)
    return made


def _shadow(text: str) -> str:
    if not isinstance(text, PromptText):  # a conversation is rendered again and again
        return _again(text) if len(text) <= _SHORT else _moved(text)
    where = np.zeros(len(text), np.bool_)
    for begin, end in text.plain:
        where[begin:end] = True
    return _moved(text, where)


# -- methods and filters of text that search in it -------------------------------------------


def _split(text: str, sep: str | None = None, maxsplit: int = -1, *, right: bool = False) -> Any:
    if sep is None:
        return text.rsplit(None, maxsplit) if right else text.split(None, maxsplit)
    raw, sep = read(text), read(sep)
    parts, at = [], 0
    for part in raw.rsplit(sep, maxsplit) if right else raw.split(sep, maxsplit):
        parts.append(text[at : at + len(part)])
        at += len(part) + len(sep)
    return parts


def _rsplit(text: str, sep: str | None = None, maxsplit: int = -1) -> Any:
    return _split(text, sep, maxsplit, right=True)


def _partition(text: str, sep: str) -> tuple[str, str, str]:
    at, size = read(text).find(read(sep)), len(sep)
    return (text, "", "") if at < 0 else (text[:at], text[at : at + size], text[at + size :])


def _rpartition(text: str, sep: str) -> tuple[str, str, str]:
    at, size = read(text).rfind(read(sep)), len(sep)
    return ("", "", text) if at < 0 else (text[:at], text[at : at + size], text[at + size :])


def _lstrip(text: str, chars: str | None = None) -> str:
    raw = read(text)
    return text[len(raw) - len(raw.lstrip(read(chars))) :]


def _rstrip(text: str, chars: str | None = None) -> str:
    return text[: len(read(text).rstrip(read(chars)))]


def _strip(text: Any, chars: str | None = None) -> str:
    return _lstrip(_rstrip(str(text), chars), chars)


def _removeprefix(text: str, prefix: str) -> str:
    return text[len(prefix) :] if read(text).startswith(read(prefix)) else text


def _removesuffix(text: str, suffix: str) -> str:
    return text[: len(text) - len(suffix)] if read(text).endswith(read(suffix)) else text


def _replace(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    whole, by = str(text), str(new)
    times = -1 if count is None else count
    if not str(old):
        return whole.replace("", by, times)
    return by.join(_split(whole, str(old), times))


def _cased(change: Callable[[str], str]) -> Callable[..., str]:
    """A change of every letter; all is content where the length changes with it."""

    def method(text: str) -> str:
        raw, mask = reveal(str(text))
        made = change(raw)
        return _moved(made, mask if len(made) == len(raw) else None) if mask.any() else made

    return method


def _asked(name: str) -> Callable[..., Any]:
    """A question about the text."""
    return lambda text, *args: getattr(read(text), name)(*map(read, args))


_CASES = ("upper", "lower", "title", "capitalize", "swapcase", "casefold")
_QUESTIONS = (
    *("startswith", "endswith", "find", "rfind", "index", "rindex", "count"),
    *("isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower"),
    *("isnumeric", "isprintable", "isspace", "istitle", "isupper"),
)
_METHODS: dict[str, Callable[..., Any]] = {
    "split": _split,
    "rsplit": _rsplit,
    "partition": _partition,
    "rpartition": _rpartition,
    "strip": _strip,
    "lstrip": _lstrip,
    "rstrip": _rstrip,
    "removeprefix": _removeprefix,
    "removesuffix": _removesuffix,
    "replace": _replace,
    **{name: _cased(getattr(str, name)) for name in _CASES},
    **{name: _asked(name) for name in _QUESTIONS},
}


def _read_first(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or test that is given its arguments without their shadow."""

    @functools.wraps(function)
    def reading(*args: Any, **kwargs: Any) -> Any:
        return function(*map(read, args), **kwargs)

    return reading


def _tojson(dump: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(dump)
    def dumped(value: Any, ensure_ascii: bool = False, *args: Any, **options: Any) -> str:
        if ensure_ascii:  # the shadow itself would be escaped
            bare = json.loads(json.dumps(value), object_pairs_hook=_bare)
            return _moved(dump(read(bare), ensure_ascii, *args, **options))
        return dump(value, ensure_ascii, *args, **options)

    return dumped


def _bare(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {read(name): read(item) for name, item in pairs}


class Follower(Bounded):
    """An environment whose templates read through the shadow where they compare or search.

    dump: the filter ``tojson``.
    """

    def __init__(self, dump: Callable[..., str], **options: Any) -> None:
        super().__init__(**options)
        self.filters["forkserve_read"] = read
        self.filters["trim"] = _strip
        self.filters["replace"] = _replace
        self.filters["tojson"] = _tojson(dump)
        filters: dict[str, Any] = self.filters
        for name in ("upper", "lower", "title", "capitalize"):
            self.filters[name] = _cased(filters[name])
        for name in ("int", "float", "wordcount"):
            self.filters[name] = _read_first(filters[name])
        tests: dict[str, Any] = self.tests
        self.tests = {name: _read_first(test) for name, test in tests.items()}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Both sides of a comparison are read."""
        tree = super()._parse(source, name, filename)
        for compare in list(tree.find_all(nodes.Compare)):
            compare.expr = through(compare.expr, "forkserve_read")
            for operand in compare.ops:
                operand.expr = through(operand.expr, "forkserve_read")
        return tree.set_environment(self)  # type: ignore[return-value]  # it is the tree

    def getitem(self, obj: Any, argument: Any) -> Any:
        """`obj[argument]`, by the argument's own name."""
        return super().getitem(obj, read(argument) if isinstance(argument, str) else argument)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call; methods of text search in what the text says."""
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str) and (method := _METHODS.get(function.__name__)) is not None:
            function = functools.partial(method, owner)
        return super().call(context, function, *args, **kwargs)


# -- what can't happen -----------------------------------------------------------------------

_JSON = frozenset("{}[],:\"\\'")
_MARKUP = {"striptags", "urlize", "xmlattr"}  # filters that write or read HTML


class Openings:
    """Tells quickly that no content of a conversation can be part of a control token.

    A control token that content has a part in begins in content, which then holds the character
    that it begins with, or at the end of something that the template writes, which then ends with
    the beginning of a name.  A template that has no such end leaves the first case alone.
    """

    def __init__(self, tree: nodes.Template, tokens: Iterable[str], markers: Sequence[str]) -> None:
        """tokens: texts that the template may name, such as bos_token."""
        self._first = {name[0] for name in markers}
        chunks = [*tokens, *(node.data for node in tree.find_all(nodes.TemplateData))]
        chunks += [c.value for c in tree.find_all(nodes.Const) if isinstance(c.value, str)]
        ends = tuple(name[:n] for name in markers for n in range(1, len(name)))
        made = {node.name for node in tree.find_all(nodes.Filter)} & _MARKUP
        # JSON, numbers and changes of letters make such characters out of anything.
        plain = not any(c.isalnum() or c.isspace() or c in _JSON for c in self._first)
        self._closed = plain and not made and not any(chunk.endswith(ends) for chunk in chunks)

    def none(self, *values: Any) -> bool:
        """Whether that is so for these values of JSON."""
        return self._closed and not any(
            first in text for value in values for text in texts(value) for first in self._first
        )
