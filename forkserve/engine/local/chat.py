"""Chat templates, rendered as Hugging Face renders them, in a sandbox.

A prompt knows which of its control tokens the template wrote (`forkserve.prompt_text`): those that
stand in what users, tools and models said are marked as content.
"""

from __future__ import annotations

import datetime
import json
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from forkserve.engine.local.bounded import Bounded, begin
from forkserve.engine.local.provenance import (
    Follower,
    Mask,
    Openings,
    mapped,
    movable,
    read,
    reveal,
    shadow,
    shadow_messages,
    texts,
)
from forkserve.errors import ModelError
from forkserve.prompt_text import PromptText, pattern_of

__all__ = ["ChatTemplate"]


_Arguments = dict[str, Any]
_CONTENTS = ("messages", "tools", "documents")


class ChatTemplate:
    """A compiled template.

    tokens: what it may name, such as bos_token.  markers: names of the tokenizer's control tokens.
    """

    def __init__(
        self, source: str, tokens: Mapping[str, str], where: str, markers: Iterable[str] = ()
    ) -> None:
        self._source = source
        self._tokens = dict(tokens)
        self._where = where
        names = [name for name in markers if movable(name)]
        self._pattern = pattern_of(names)
        try:
            environment = Bounded(**_OPTIONS)
            environment.filters["tojson"] = _tojson
            self._template = _prepared(environment).from_string(source)
            self._openings = Openings(environment.parse(source), tokens.values(), names)
        except jinja2.TemplateError as error:
            raise ModelError(f"{where}: the chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        documents: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        *,
        split_special_tokens: bool = True,
    ) -> PromptText:
        """The conversation as text.

        split_special_tokens: what looks like a control token in messages, tools and documents is
        content, and is split into plain tokens.  Where a template can't be followed, such names are
        broken by a space before it sees them; if even that can't tell, it is a ModelError.

        An assistant's message may lack its content, as OpenAI's do that only call tools: where the
        template fails at that or writes "None", the content is "".
        """
        given: _Arguments = {
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._written(given)
        if self._pattern is None or not split_special_tokens:
            return PromptText(text, ())
        if self._openings.none(*(given[name] for name in _CONTENTS)):
            return PromptText(text, ())
        found = self._marked(text, given)
        if found is not None:
            return found
        broken = {**given, **{name: self._broken(given[name]) for name in _CONTENTS}}
        text = self._run(self._template, broken)
        found = self._marked(text, broken)
        if found is None:
            raise ModelError(
                f"{self._where}: the chat template changes what it is given in a way that hides "
                "which control tokens are its own; leave names of control tokens out of the "
                "messages, or trust them with split_special_tokens=False"
            )
        return found

    def _written(self, given: _Arguments) -> str:
        """The text; `given` gets the messages that it was written from.

        Content that lacks is filled in only where that is better: by "none" some templates tell
        that a message calls tools (DeepSeek V3's does).
        """
        messages = [_filled(message) for message in given["messages"]]
        if all(map(operator.is_, messages, given["messages"])):
            return self._run(self._template, given)
        bare = None
        with suppress(ModelError):
            bare = self._run(self._template, given)
        try:
            text = self._run(self._template, {**given, "messages": messages})
        except ModelError:
            if bare is None:
                raise
            return bare
        if bare is not None and bare.count("None") <= text.count("None"):
            return bare
        given["messages"] = messages
        return text

    def _run(self, template: jinja2.Template, given: _Arguments) -> str:
        begin()
        try:
            return template.render(**given, **self._tokens)
        except Exception as error:  # a template is a program, and may fail in any way
            why = str(error)
            if not why or not isinstance(error, jinja2.TemplateError):
                why = f"{type(error).__name__}: {why}".rstrip(": ")
            raise ModelError(
                f"{self._where}: the chat template refused {len(given['messages'])} messages: {why}"
            ) from error

    # -- which control tokens are the template's own -----------------------------------------

    @cached_property
    def _follower(self) -> jinja2.Template:
        """The same template, for input in the shadow alphabet."""
        return _prepared(Follower(_tojson, **_OPTIONS)).from_string(self._source)

    def _marked(self, text: str, given: _Arguments) -> PromptText | None:
        """A rendered text with its content marked; None if that can't be told."""
        try:
            moved = {**given, "messages": shadow_messages(given["messages"])}
            moved |= {name: shadow(given[name]) for name in ("tools", "documents")}
            seen, mask = reveal(self._run(self._follower, moved))
        except ModelError:  # it minds the shadow: only what it was given is left to look at
            return None if self._names(given) else PromptText(text, ())
        if seen == read(text):  # which has private-use characters of its own at times
            return PromptText(text, [piece for _, piece in self._scan(text, mask) if piece])
        ours = [name for name, piece in self._scan(seen, mask) if not piece]
        # As many in the same order: content has added none.
        return PromptText(text, ()) if ours == self._in(text) else None

    def _scan(self, text: str, mask: Mask) -> list[tuple[str, tuple[int, int] | None]]:
        """Control tokens by name, and the span of what of each is content, if anything is."""
        assert self._pattern is not None
        found: list[tuple[str, tuple[int, int] | None]] = []
        touched, at = mask.tobytes(), 0
        while match := self._pattern.search(text, at):
            begin, end = match.span()
            first = touched.find(1, begin, end)
            if first >= 0:
                found.append((match[0], (first, touched.rfind(1, begin, end) + 1)))
                at = begin + 1  # another one may begin in it
            else:
                found.append((match[0], None))
                at = end
        return found

    def _in(self, text: str) -> list[str]:
        assert self._pattern is not None
        return self._pattern.findall(text)

    def _names(self, given: _Arguments) -> bool:
        """Whether any text that was given holds the name of a control token."""
        return any(self._in(text) for name in _CONTENTS for text in texts(given[name]))

    def _broken(self, value: Any) -> Any:
        """A value of JSON whose texts name no control token: ``< |im_end|>``."""
        return mapped(value, self._break, self._break)

    def _break(self, text: str) -> str:
        assert self._pattern is not None
        before = None
        while text != before:  # what was broken may leave another one
            before, text = text, self._pattern.sub(_spaced, text)
        return text


class _Generation(Extension):
    """``{% generation %}`` marks what an assistant wrote, for training; here it is just written."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own interface)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_OPTIONS: dict[str, Any] = {
    "trim_blocks": True,
    "lstrip_blocks": True,
    "extensions": [loopcontrols, _Generation],
}


def _filled(message: Any) -> Any:
    """The message itself, or that of an assistant without content with an empty one."""
    if not isinstance(message, Mapping) or message.get("role") != "assistant":
        return message
    return message if message.get("content") is not None else {**message, "content": ""}


def _spaced(found: re.Match[str]) -> str:
    name = found[0]
    return f"{name[0]} {name[1:]}" if len(name) > 1 else ""


def _prepared(environment: Bounded) -> Bounded:
    """With what Hugging Face gives to templates."""
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
