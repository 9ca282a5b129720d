"""The contract between the control plane and whatever runs the model.

A backend owns tensors indexed by page id and nothing else: which page is live, shared or free is
the pool's business (`forkserve.tree.pool`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from forkserve.clock import Clock
from forkserve.config import ForkServeConfig
from forkserve.errors import ConfigError
from forkserve.types import Batch, BatchResult, ModelInfo, Span

__all__ = ["Backend", "Portable", "Refilling", "Tokenizer", "require_backend"]

_ATTRIBUTES = ("config", "info", "tokenizer", "clock", "execute", "predict_ms", "discard", "close")


@runtime_checkable
class Tokenizer(Protocol):
    """Text to ids and back.  Ids are the truth; text is a view.

    A tokenizer with an attribute `begin_ids` has these put before a text with which a session
    begins (`forkserve.engine.prompting.opening_ids`).
    """

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of `text`; markers such as ``<|im_start|>`` become single ids unless special=False.

        In a `forkserve.prompt_text.PromptText` those that touch content become plain ids.
        Adds nothing at either end (no begin-of-text).
        Raises ConfigError for half of a surrogate pair, which is no text."""
        ...

    def decode_bytes(self, ids: Sequence[int], *, skip_special: bool = False) -> bytes:
        """The exact bytes of `ids`.  Concatenates: bytes(a + b) == bytes(a) + bytes(b)."""
        ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Chat messages as text, by the model's own template.

        A `PromptText`, unless contents are trusted: what messages and tools say is content."""
        ...


class Backend(Protocol):
    """Runs batches over paged KV.

    A backend with a true attribute `debug` gets the rows that stand with every batch
    (`Batch.standing`) and refuses to write them.
    """

    config: ForkServeConfig
    info: ModelInfo
    tokenizer: Tokenizer
    clock: Clock

    def execute(self, batch: Batch) -> BatchResult:
        """Do the copies, then one forward pass.  Called from one thread at a time.

        Either all rows of the batch are written or an exception is raised, after which the rows
        the batch would have written hold anything; no other row has changed.
        """
        ...

    def predict_ms(self, new_tokens: int, context_tokens: int = 0) -> float:
        """Predicted time of a pass over `new_tokens` rows that attend to `context_tokens` each."""
        ...

    def discard(self, pages: Sequence[int]) -> None:
        """These pages are free now; their rows are never read again before being written."""
        ...

    def close(self) -> None:
        """Give back tensors and threads.  Idempotent."""
        ...


@runtime_checkable
class Portable(Protocol):
    """What a backend offers beyond `Backend` so that its KV can be stored and brought back.

    Rows travel as bytes in the order of ``identity()["layout"]``: for n tokens the layers, then K
    and V heads, then the n rows of each.  Both methods may run beside `execute`, on pages that no
    batch writes.
    """

    def identity(self, weights: Callable[[Sequence[Path]], str]) -> Mapping[str, Any]:
        """Everything that can change a KV byte or its meaning; see `forkserve.store.identity`.

        weights: turns the files of the weights into their identity.
        """
        ...

    def read_rows(self, spans: Sequence[Span]) -> bytearray:
        """The rows of consecutive spans, as one run."""
        ...

    def write_rows(self, span: Span, rows: bytes | bytearray | memoryview, at: int) -> None:
        """Write ``span.length`` rows: those from row `at` on of a run such as `read_rows` gives."""
        ...


@runtime_checkable
class Refilling(Protocol):
    """An optional method of a `Portable` backend that saves new memory for every run of rows."""

    def read_rows_into(
        self,
        spans: Sequence[Span],
        out: bytearray | memoryview,
        rest: Callable[[], None] | None = None,
    ) -> None:
        """`Portable.read_rows` into a buffer of exactly the right length.

        rest: called now and then, where the backend reads in pieces, by a thread that is not to
        keep a core for long.
        """
        ...


def require_backend(given: object) -> None:
    """Raise ConfigError for what is no `Backend`: its class, the name of a model, a config."""
    if isinstance(given, type):
        raise ConfigError(f"Engine takes a backend, not a class: Engine({given.__name__}(...))")
    missing = [name for name in _ATTRIBUTES if not hasattr(given, name)]
    if missing:
        raise ConfigError(
            f"Engine takes a backend, such as LocalBackend(ForkServeConfig(), 'smollm2'); "
            f"{type(given).__name__} has no {', '.join(missing)}"
        )
