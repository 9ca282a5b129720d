"""Runs batches on a GPU: eager passes for prefill, replayed graphs for decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from forkserve.engine.local.checkpoint import Checkpoint
from forkserve.engine.local.decoder import Decoder
from forkserve.engine.local.gpu.device import Device, Graph, Recorder, on
from forkserve.engine.local.gpu.forward import DeviceDecoder, Numbers
from forkserve.engine.local.gpu.kv import DeviceKV
from forkserve.engine.local.kv import KVSize
from forkserve.engine.local.runner import Floats, Ints, Setup
from forkserve.engine.sampling import uniform
from forkserve.errors import BackendError, ConfigError
from forkserve.kernels.jit import next_power, triton
from forkserve.kernels.pieces import Tiling
from forkserve.kernels.plan import span_rows
from forkserve.kernels.quant import FORMATS
from forkserve.kernels.sample import draw
from forkserve.kernels.tile_attention import Partials
from forkserve.kernels.tile_plans import Capacity, DevicePlan, TilePlanner
from forkserve.kernels.tiles import TilePlan
from forkserve.kernels.write_kv import Guard
from forkserve.types import SampleSpec, Work

__all__ = ["DeviceRows", "GpuRunner"]

VERSION = "triton/v2"  # raise it when a bit of any result changes
_NUMBERS = {
    "float32": Numbers(torch.float32),
    "bfloat16": Numbers(torch.bfloat16),
    "int8": Numbers(torch.bfloat16, coded=True),
}
_GRAPH_ROWS = 256  # larger decode batches are busy enough to hide the launches


class DeviceRows:
    """Logits [m, V] that stay on the device until somebody reads a row."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at: Any) -> Any:
        rows = self._rows[at]
        return rows.cpu().numpy() if rows.dim() == 1 else DeviceRows(rows)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Floats:
        return np.asarray(self._rows.cpu().numpy(), dtype)


class GpuRunner:
    """Satisfies `Runner`.  drawn: tokens of the last run that were drawn on the device."""

    kernels = "triton"
    exact = True

    def __init__(self, source: Checkpoint, setup: Setup, device: Device) -> None:
        if setup.variant not in _NUMBERS:
            raise ConfigError(
                f"dtype '{setup.variant}' is not supported on a GPU; {', '.join(_NUMBERS)} are"
            )
        if setup.kv not in FORMATS:
            raise ConfigError(f"kv='{setup.kv}' is unknown; {', '.join(FORMATS)} are the choices")
        self.device = device
        # Another GPU, or another compiler, may round otherwise.
        self.version = f"{VERSION} {device.name} Triton {triton.__version__}"
        spec, numbers = source.spec, _NUMBERS[setup.variant]
        with torch.inference_mode():
            # Integers are made from the weights as they are in the file, not from rounded ones.
            cpu = Decoder(source, torch.float32 if numbers.coded else numbers.dtype, setup.context)
            self._decoder: DeviceDecoder | None = DeviceDecoder(cpu, device.torch, numbers)
        self.kv = DeviceKV(KVSize.of(spec, setup, numbers.dtype), setup.kv, device.torch)
        self._spec = spec
        group = spec.heads // spec.kv_heads
        tilings = {
            w: Tiling(setup.page_size, group, w, kv_heads=spec.kv_heads)
            for w in dict.fromkeys(spec.windows)
        }
        self._planner = TilePlanner(tilings, self.kv.capacity_rows)
        self._guard = Guard(self.kv.dump + 1, device.torch) if setup.debug else None
        self._steps: dict[int, _Step] = {}  # recorded decode passes, by rows
        self.recorder = Recorder(device)
        self.drawn: Mapping[int, tuple[int, float]] = {}
        self.replayed = 0

    def run(
        self, works: Sequence[Work], ids: Ints, wanted: Sequence[int], keep: bool
    ) -> tuple[Any, Ints]:
        """See `Runner`.  The logits are `DeviceRows`, whatever `keep` says a copy if read."""
        decoder = self._decoder
        if decoder is None:
            raise BackendError("this backend is closed")
        with torch.inference_mode(), on(self.device.torch):
            plans = self._planner.plan(works)
            self._seal(works)
            if len(works) == len(ids) <= _GRAPH_ROWS and self._guard is None:
                rows = self._replay(decoder, plans, ids)[list(wanted)]
            else:
                hidden = self._forward(decoder, plans, ids)
                rows = decoder.logits(hidden[list(wanted)])
            self._refuse()
            self.drawn = {}
            top = self._draw(works, wanted, rows) if wanted else np.empty(0, np.int32)
            if self.device.graphs:  # rows are written when this returns, and faults show here
                torch.cuda.current_stream(self.device.torch).synchronize()
            return DeviceRows(rows), top

    def close(self) -> None:
        """See `Runner`."""
        self._decoder = None
        self._steps = {}
        self.kv.close()

    # -- passes ----------------------------------------------------------------------------

    def _forward(
        self, decoder: DeviceDecoder, plans: Mapping[int, TilePlan], ids: Ints
    ) -> torch.Tensor:
        """One pass with tables of its own."""
        device = self.device.torch
        sent = {window: DevicePlan.exact(plan, device) for window, plan in plans.items()}
        slots = max(plan.rows.size for plan in plans.values())
        partials = Partials(slots, self._spec.heads, self._spec.head_dim, device)
        tokens = torch.from_numpy(ids).to(device, torch.int64)
        return decoder.forward(tokens, sent, self.kv.layers, partials, self._guard)

    def _replay(
        self, decoder: DeviceDecoder, plans: Mapping[int, TilePlan], ids: Ints
    ) -> torch.Tensor:
        """Logits [n, V] of a decode pass, recorded for this many rows or now."""
        bucket = next_power(len(ids))
        step = self._steps.get(bucket)
        if step is None or not step.holds(plans):
            step = _Step(self, decoder, plans, bucket, step)
            step.load(plans, ids)
            step.record()
            self._steps[bucket] = step  # last: if anything failed there is none
        else:
            step.load(plans, ids)
            step.replay()
            self.replayed += 1
        return step.logits[: len(ids)]

    # -- sampling --------------------------------------------------------------------------

    def _draw(self, works: Sequence[Work], wanted: Sequence[int], rows: torch.Tensor) -> Ints:
        """Ids of the largest logits; `drawn` gets what a plain request draws."""
        place = {row: index for index, row in enumerate(wanted)}
        temperatures, points = np.zeros(len(wanted), np.float32), np.zeros(len(wanted))
        plain: list[int] = []
        end = 0
        for work in works:
            end += len(work.tokens)
            if work.sample is not None and _plain(work.sample):
                at = place[end - 1]
                plain.append(at)
                temperatures[at] = work.sample.params.temperature
                if temperatures[at]:
                    points[at] = uniform(work.sample.seed, work.sample.position)
        device = rows.device
        tokens, log_p = draw(
            rows, torch.from_numpy(temperatures).to(device), torch.from_numpy(points).to(device)
        )
        top, chances = tokens.cpu().numpy(), log_p.cpu().numpy()
        broken = np.flatnonzero(top < 0)
        self.drawn = {at: (int(top[at]), float(chances[at])) for at in plain if top[at] >= 0}
        for at in broken.tolist():  # nothing finite: the sampler says so, if anybody samples
            top[at] = int(rows[at].cpu().numpy().argmax())
        return top.astype(np.int32)

    # -- debugging -------------------------------------------------------------------------

    def _seal(self, works: Sequence[Work]) -> None:
        """Of the pool's rows only those may be written that works name, and none that is read."""
        guard, size = self._guard, self.kv.page_size
        if guard is None:
            return
        guard.sealed.zero_()  # scratch rows stay so
        guard.sealed[: self.kv.capacity_rows] = 1
        for work in works:
            if work.write is not None:
                guard.seal(torch.from_numpy(span_rows(work.write, size)), False)
        for work in works:
            for span in work.context:
                guard.seal(torch.from_numpy(span_rows(span, size)))

    def _refuse(self) -> None:
        row = self._guard.refused() if self._guard is not None else None
        if row is not None:
            page, slot = divmod(row, self.kv.page_size)
            raise BackendError(
                f"a kernel wanted to write slot {slot} of page {page}, which no work names, or "
                "which another work of its batch reads; the row was left as it was"
            )


class _Step:
    """A decode pass over at most `rows` rows, with everything it touches at fixed addresses."""

    def __init__(
        self,
        runner: GpuRunner,
        decoder: DeviceDecoder,
        plans: Mapping[int, TilePlan],
        rows: int,
        before: _Step | None = None,
    ) -> None:
        """before: the one that was too small.  What that held fits too: batches may alternate."""
        device, kv = runner.device.torch, runner.kv
        spec = decoder.spec
        self._recorder = runner.recorder
        rooms = {window: Capacity.rounded(plan, rows) for window, plan in plans.items()}
        if before is not None:
            rooms = {w: room.joined(before._plans[w].capacity) for w, room in rooms.items()}
        self._plans: dict[int, DevicePlan] = {
            w: DevicePlan(room, device, kv.dump) for w, room in rooms.items()
        }
        slots = max(plan.capacity.results for plan in self._plans.values())
        heads, dim = spec.heads, spec.head_dim
        out = torch.zeros(rows, heads, dim, dtype=decoder.dtype, device=device)  # padding: 0
        self._partials = Partials(slots, heads, dim, device, out)
        self._ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self.logits = torch.zeros(rows, spec.vocab, dtype=torch.float32, device=device)
        self._decoder, self._kv = decoder, kv.layers
        self._graph: Graph | None = None

    def holds(self, plans: Mapping[int, TilePlan]) -> bool:
        """Whether the tables are large enough."""
        return all(
            self._plans[window].capacity.holds(Capacity.of(plan)) for window, plan in plans.items()
        )

    def load(self, plans: Mapping[int, TilePlan], ids: Ints) -> None:
        """Send a batch's tables and tokens."""
        for window, plan in plans.items():
            self._plans[window].load(plan)
        self._ids[: len(ids)].copy_(torch.from_numpy(ids))

    def record(self) -> None:
        """Run and record the pass."""
        self._graph = self._recorder.record(self._run)

    def replay(self) -> None:
        """Run the pass again, over what was loaded."""
        assert self._graph is not None
        self._graph.replay()

    def _run(self) -> None:
        hidden = self._decoder.forward(self._ids, self._plans, self._kv, self._partials)
        self.logits.copy_(self._decoder.logits(hidden))


def _plain(spec: SampleSpec) -> bool:
    """Whether the device's draw is the request's: temperature alone, nothing changed or filtered.

    Lists of the likeliest ids are made on the host.
    """
    params = spec.params
    filtered = params.top_k or params.top_p < 1 or params.min_p
    changed = params.logit_bias or params.counts_tokens
    return spec.allowed is None and not (filtered or changed or params.top_logprobs)
