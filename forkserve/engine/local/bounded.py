"""A sandbox whose templates end: jinja2's keeps them off the machine, not off its time.

A chat template comes with a model that somebody downloaded.  Nested loops over ``range``, macros
that call themselves twice, ``9 ** 9999999999`` or a text that doubles itself would hold a thread
for ever, or take all memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["MAX_STEPS", "Bounded", "begin"]

MAX_STEPS = 10_000_000  # passes of loops and calls of one rendering: seconds, if each is short
MAX_SIZE = 1 << 26  # characters of a text, items of a list
MAX_BITS = 4096  # of a whole number

_rendering = threading.local()


def begin() -> None:
    """A rendering begins in this thread."""
    _rendering.steps = 0


class Bounded(ImmutableSandboxedEnvironment):
    """Templates that take more than `MAX_STEPS` steps fail, and sums, products, powers and joins by
    ``~`` that are too large, or paddings by methods.  What filters and ``%`` make is not measured.
    """

    intercepted_binops: ClassVar[frozenset[str]] = frozenset(("+", "*", "**"))  # type: ignore[misc]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.globals["lipsum"]  # no model's template has it, and one call may take hours
        self.filters["forkserve_counted"] = _counted
        self.filters["forkserve_sized"] = _sized

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Loops count their passes, and what is joined by ``~`` is measured."""
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = through(loop.iter, "forkserve_counted")
        for joined in list(tree.find_all(nodes.Concat)):
            whole = nodes.Concat(joined.nodes, lineno=joined.lineno)
            joined.nodes = [through(whole, "forkserve_sized")]
        return tree.set_environment(self)  # type: ignore[return-value]  # it is the tree

    # Arguments of a template may have any names: {{ render(function=tool.function) }}.
    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call; it is a step, and so are the passes of a loop that calls itself."""
        _step()
        if isinstance(function, LoopContext) and args:
            args = (_passes(args[0]), *args[1:])
        if isinstance(getattr(function, "__self__", None), str):  # 'x'.center(10 ** 10)
            for size in args:
                if isinstance(size, int):
                    _check(size, MAX_SIZE, "characters")
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """A sum, a product or a power, unless it would be too large."""
        if operator == "+":
            return _measured(super().call_binop(context, operator, left, right))
        for value, times in ((left, right), (right, left)):
            if isinstance(value, str | list | tuple) and isinstance(times, int):
                _check(len(value) * times, MAX_SIZE, "items")
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            bits = bits * right if operator == "**" else bits + right.bit_length()
            _check(bits, MAX_BITS, "bits")
        return super().call_binop(context, operator, left, right)


def through(node: nodes.Node, name: str) -> nodes.Filter:
    """The expression, put through a filter."""
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _check(size: int, limit: int, unit: str) -> None:
    if size > limit:
        raise SecurityError(f"it makes a value of more than {limit:,} {unit}")


def _step() -> None:
    _rendering.steps = steps = getattr(_rendering, "steps", 0) + 1
    if steps > MAX_STEPS:
        raise SecurityError(f"it takes more than {MAX_STEPS:,} steps")


def _passes(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _step()
        yield item


@pass_context  # or it would be called when the template is compiled
def _counted(_: Context, items: Iterable[Any]) -> Iterator[Any]:
    return _passes(items)


@pass_context
def _sized(_: Context, value: Any) -> Any:
    return _measured(value)


def _measured(value: Any) -> Any:
    if isinstance(value, str | list | tuple):
        _check(len(value), MAX_SIZE, "items")
    return value
