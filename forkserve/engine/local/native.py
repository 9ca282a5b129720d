"""The forward pass on the native kernels: weights from a checkpoint, KV in their layout."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import torch

from forkserve.engine.local.checkpoint import Checkpoint
from forkserve.engine.local.kv import KVSize, PagedKV, runs_of
from forkserve.engine.local.rotary import Rope, Turns
from forkserve.engine.local.runner import Floats, Ints, Setup
from forkserve.engine.local.spec import FAMILIES
from forkserve.errors import BackendError
from forkserve.kernels.native import attention, library
from forkserve.kernels.native.attention import AttentionPlan, Pool
from forkserve.kernels.native.forward import Forward, LayerWeights, Shape
from forkserve.kernels.native.grown_tables import TablePlanner
from forkserve.kernels.native.linear import PackedLinear, pack
from forkserve.types import RowCopy, Span, Work

__all__ = ["NativeRunner"]

# Of the results of each variant: raise it when a bit of any changes.
VERSIONS = {
    "float32": "native/v1",
    "bfloat16": "native/v2",
    "int8": "native/v1",
    "w8a16": "native/v1",
}
_KV_DTYPES = dict.fromkeys(VERSIONS, torch.bfloat16) | {"float32": torch.float32}
_PAIRED = ("bfloat16", "w8a16")  # attention rounds its operands to bfloat16


class NativeRunner:
    """Satisfies `Runner`."""

    kernels = "native"
    exact = True

    def __init__(self, source: Checkpoint, setup: Setup) -> None:
        spec = source.spec
        self.version = VERSIONS[setup.variant]
        self._library = library.load()
        self.isa = self._library.isa
        loader = _Loader(source, setup, self._library)
        self._turns = [loader.rope(table) for table in spec.ropes]
        self._forward: Forward | None = loader.forward(self._turns)
        size = KVSize.of(spec, setup, _KV_DTYPES[setup.variant])
        self.kv = NativeKV(self._library, size, paired=setup.variant in _PAIRED)
        plans = {
            window: AttentionPlan(
                self._library,
                kv_heads=spec.kv_heads,
                group=spec.heads // spec.kv_heads,
                head_dim=spec.head_dim,
                page_size=setup.page_size,
                pages=setup.capacity_pages + self.kv.scratch_rows // setup.page_size,
                scratch_page=setup.capacity_pages,
                threads=setup.threads,
                window=window,
            )
            for window in set(spec.windows)
        }
        self._distinct = list(plans.values())
        self._plans = [plans[window] for window in spec.windows]
        self._tables = TablePlanner(setup.page_size, spec.window)
        self._buffer = np.empty((0, spec.vocab), np.float32)

    def run(
        self, works: Sequence[Work], ids: Ints, wanted: Sequence[int], keep: bool
    ) -> tuple[Floats, Ints]:
        """See `Runner`."""
        if self._forward is None:
            raise BackendError("this backend is closed")
        end = max(work.start + len(work.tokens) for work in works)
        for turns in self._turns:
            turns.reach(end)
        tables = self._tables.tables(works)
        for plan in self._distinct:
            plan.build(tables)
        rows = np.array(wanted, np.int32)
        logits = self._logits(len(rows), keep)
        return logits, self._forward.run(ids, self._plans, self.kv.pool, rows, logits)

    def _logits(self, count: int, keep: bool) -> Floats:
        """Memory for the logits; what nobody keeps is reused, which saves its page faults."""
        if keep:
            return np.empty((count, self._buffer.shape[1]), np.float32)
        if len(self._buffer) < count:
            self._buffer = np.empty((count, self._buffer.shape[1]), np.float32)
        return self._buffer[:count]

    def close(self) -> None:
        """See `Runner`."""
        if self._forward is not None:
            self._forward.close()
            for plan in self._distinct:
                plan.close()
        self._forward = None
        self.kv.close()


class NativeKV(PagedKV):
    """The same memory with K transposed inside its pages; rows travel in the common order.

    paired: attention rounds queries and weights to bfloat16 as well.
    """

    def __init__(self, native: ctypes.CDLL, size: KVSize, *, paired: bool) -> None:
        super().__init__(size)
        self._library = native
        layers, heads, rows, dim = self._shape
        bf16 = size.dtype == torch.bfloat16
        at = self.rows.data_ptr()
        self.pool = Pool(at, layers, heads // 2, dim, self.page_size, rows, bf16, paired)

    def copy(self, copies: Sequence[RowCopy]) -> None:
        """See `PagedKV`."""
        page = self.page_size
        for c in copies:
            self._check([(c.src_page * page + c.src_row, c.rows)])
            self._check([(c.dst_page * page + c.dst_row, c.rows)])
        if copies:
            attention.copy_rows(self._library, self.pool, copies)

    def read_into(
        self,
        spans: Sequence[Span],
        out: bytearray | memoryview,
        rest: Callable[[], None] | None = None,
    ) -> None:
        """See `PagedKV`."""
        runs = [run for span in spans for run in runs_of(span, self.page_size)]
        self._check(runs)
        if rest is None:
            attention.read_rows(self._library, self.pool, runs, out)
            return
        view, layers = memoryview(out), self._shape[0]
        size = len(out) // layers
        for layer in range(layers):
            part = view[layer * size : (layer + 1) * size]
            attention.read_rows(self._library, self._layer(layer), runs, part)
            rest()

    def _layer(self, number: int) -> Pool:
        """The pool of one layer alone."""
        whole = self.pool
        base = self.rows[number].data_ptr()
        return Pool(base, 1, whole.kv_heads, whole.dim, whole.page, whole.rows, whole.bf16)

    def write(self, span: Span, rows: bytes | bytearray | memoryview, at: int) -> None:
        """See `PagedKV`."""
        runs = list(runs_of(span, self.page_size))
        self._check(runs)
        attention.write_rows(self._library, self.pool, runs, rows, at)

    def _check(self, runs: Sequence[tuple[int, int]]) -> None:
        """Refuse what lies outside the pool, where C++ would read or write anything."""
        for first, count in runs:
            if first < 0 or count < 0 or first + count > self.capacity_rows:
                raise BackendError(
                    f"KV rows {first}..{first + count - 1} lie outside the pool of "
                    f"{self.capacity_rows} rows"
                )


class _Loader:
    """Reads tensors as float32, one at a time, and packs them."""

    def __init__(self, source: Checkpoint, setup: Setup, native: ctypes.CDLL) -> None:
        self.source = source
        self.setup = setup
        self.library = native

    def forward(self, turns: Sequence[Turns]) -> Forward:
        spec, setup = self.source.spec, self.setup
        shape = Shape(
            hidden=spec.hidden,
            ffn=spec.ffn,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            vocab=spec.vocab,
            eps=spec.eps,
            attn_scale=spec.attn_scale,
            act=spec.act,
            embed_scale=spec.embed_scale,
            attn_softcap=spec.attn_softcap,
            final_softcap=spec.final_softcap,
        )
        tied = not self.source.has("head")
        return Forward(
            self.library,
            shape,
            [self.layer(i, turns[spec.rope_of[i]]) for i in range(spec.layers)],
            final_norm=self.tensor("final_norm", spec.hidden),
            head=self.pack(self.tensor("embed" if tied else "head", spec.vocab, spec.hidden)),
            embed=None if tied else self.embed(),
            threads=setup.threads,
        )

    def rope(self, table: Rope) -> Turns:
        """cos, sin [context, D/2] of float32 angles, the same on every machine.

        Vector units differ in the last bit of a float32 cosine; rounded from float64 it is one.
        """
        dim, factors = self.source.spec.head_dim, None
        if self.source.has("rope_factors"):
            factors = torch.from_numpy(self.tensor("rope_factors", dim // 2))
        freq, magnitude = table.inv_freq(dim, factors).numpy(), table.magnitude

        def rows(begin: int, end: int) -> tuple[Floats, Floats]:
            positions = np.arange(begin, end, dtype=np.float32)
            angle = np.outer(positions, freq).astype(np.float64)
            cos, sin = np.cos(angle) * magnitude, np.sin(angle) * magnitude
            return cos.astype(np.float32), sin.astype(np.float32)

        shape = (self.setup.context, dim // 2)
        return Turns(np.empty(shape, np.float32), np.empty(shape, np.float32), rows)

    def tensor(self, name: str, *shape: int) -> Floats:
        out = np.empty(shape, np.float32)
        self.source.read(name, torch.from_numpy(out))
        return out

    def embed(self) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16 | np.float32]]:
        """Rows of the embedding, which are read one by one: int8 would save nothing."""
        rows = self.tensor("embed", self.source.spec.vocab, self.source.spec.hidden)
        if self.setup.variant == "float32":
            return rows
        return torch.from_numpy(rows).bfloat16().view(torch.uint16).numpy()

    def pack(self, weight: Floats, bias: Floats | None = None) -> PackedLinear:
        return pack(self.library, weight, bias, self.setup.variant, self.setup.threads)

    def linear(self, i: int, sizes: dict[str, int], k: int, bias: bool | None) -> PackedLinear:
        """The named products of layer i as one; bias None: if the checkpoint has one."""
        names = [f"{i}.{name}" for name in sizes]
        if bias is None:
            bias = self.source.has(f"{names[0]}.bias")
        weight = np.empty((sum(sizes.values()), k), np.float32)
        shift = np.empty(len(weight), np.float32) if bias else None
        low = 0
        for name, size in zip(names, sizes.values(), strict=True):
            self.source.read(name, torch.from_numpy(weight[low : low + size]))
            if shift is not None:
                self.source.read(f"{name}.bias", torch.from_numpy(shift[low : low + size]))
            low += size
        return self.pack(weight, shift)

    def layer(self, i: int, turns: Turns) -> LayerWeights:
        spec, family = self.source.spec, FAMILIES[self.source.spec.family]
        q, k = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        e, f = spec.hidden, spec.ffn
        return LayerWeights(
            attn_norm=self.tensor(f"{i}.attn_norm", e),
            qkv=self.linear(i, {"q": q, "k": k, "v": k}, e, family.qkv_bias),
            out=self.linear(i, {"o": e}, q, None),
            ffn_norm=self.tensor(f"{i}.ffn_norm", e),
            gate=self.linear(i, {"gate": f}, e, None),
            up=self.linear(i, {"up": f}, e, None),
            down=self.linear(i, {"down": e}, f, None),
            cos=turns.cos,
            sin=turns.sin,
            q_norm=self.tensor(f"{i}.q_norm", spec.head_dim) if family.qk_norm else None,
            k_norm=self.tensor(f"{i}.k_norm", spec.head_dim) if family.qk_norm else None,
            post_attn_norm=self.tensor(f"{i}.post_attn_norm", e) if spec.post_norms else None,
            post_ffn_norm=self.tensor(f"{i}.post_ffn_norm", e) if spec.post_norms else None,
        )
