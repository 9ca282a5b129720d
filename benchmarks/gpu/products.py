"""Products of a decoder of eight billion weights, beside torch's and what the GPU can do."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.timing import Ceiling, agree, milliseconds, replayed
from forkserve.kernels.linear import LinearShape, Weight, code_weight, linear

__all__ = ["Products", "products", "shapes"]

# Outputs x inputs: query, key and value; attention's result; gate and up; down; the head.
WEIGHTS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))

Row = dict[str, Any]
Rows = Iterator[Callable[[], Row]]  # each is measured when it is called


@dataclass(frozen=True, slots=True)
class Products:
    """What is run: the whole, or a trial of it.  most_rows: of the head, which few rows need."""

    weights: Sequence[tuple[int, int]] = WEIGHTS
    rows: Sequence[int] = (1, 8, 32, 2048)
    most_rows: int = 64
    kinds: Sequence[str] = ("bfloat16", "int8")
    tuned: tuple[int, int] = (4096, 4096)
    shapes: Sequence[LinearShape] = (
        LinearShape(16, 16, 2, 6),
        LinearShape(16, 32, 4, 4),
        LinearShape(16, 32, 4, 6),
        LinearShape(16, 64, 4, 4),
        LinearShape(32, 64, 4, 4),
        LinearShape(32, 128, 4, 3),
        LinearShape(64, 64, 2, 4),
        LinearShape(64, 128, 2, 3),
    )
    budget_s: float = 0.25


def _problem(
    rows: int, outs: int, inputs: int, kind: str, device: torch.device
) -> tuple[torch.Tensor, Weight, torch.Tensor]:
    """x, weights, and the weights as torch's product takes them."""
    torch.manual_seed(0)
    x = torch.randn(rows, inputs, dtype=torch.bfloat16, device=device)
    full = torch.randn(outs, inputs, dtype=torch.bfloat16, device=device)
    return x, code_weight(full) if kind == "int8" else Weight(full), full


def _bytes(weight: Weight, rows: int) -> int:
    """Weights, scales, x and y."""
    outs, inputs = weight.values.shape
    tensors = [t for t in weight if t is not None]
    return sum(t.numel() * t.element_size() for t in tensors) + 2 * rows * (outs + inputs)


def _row(bytes_: int, flops: int, top: Ceiling, ms: float) -> Row:
    bytes_ms, flops_ms = bytes_ / top.copy_gbs / 1e6, flops / top.gemm_tflops / 1e9
    return {
        "ms": ms,
        "gb_s": bytes_ / ms / 1e6,
        "copy_gb_s": top.copy_gbs,
        "tflop_s": flops / ms / 1e9,
        "gemm_tflop_s": top.gemm_tflops,
        "bound": "memory" if bytes_ms >= flops_ms else "products",
        "share": max(bytes_ms, flops_ms) / ms,
    }


def products(sizes: Products, device: torch.device, top: Ceiling) -> Rows:
    """Each product for a few numbers of rows; share: of the ceiling that binds."""
    for weights, rows, kind in itertools.product(sizes.weights, sizes.rows, sizes.kinds):
        if rows > sizes.most_rows and (weights[0] == max(sizes.weights)[0] or kind == "int8"):
            continue
        yield partial(_product, sizes, device, top, weights, rows, kind)


def _product(
    sizes: Products,
    device: torch.device,
    top: Ceiling,
    weights: tuple[int, int],
    rows: int,
    kind: str,
) -> Row:
    outs, inputs = weights
    x, weight, full = _problem(rows, outs, inputs, kind, device)
    ours = replayed(lambda: linear(x, weight), device)
    theirs = replayed(lambda: F.linear(x, full), device)
    agree(ours(), theirs(), 2e-2)
    ms = milliseconds(ours, device, sizes.budget_s)
    torch_ms = milliseconds(theirs, device, sizes.budget_s)
    return {
        "outputs": outs,
        "inputs": inputs,
        "rows": rows,
        "weights": kind,
        **_row(_bytes(weight, rows), 2 * rows * outs * inputs, top, ms),
        "torch_bf16_ms": torch_ms,
        "over_torch": torch_ms / ms,
    }


def shapes(sizes: Products, device: torch.device, top: Ceiling) -> Rows:
    """Shapes of a tile for few and for many rows: which defaults would be best."""
    for rows in (*sizes.rows[:1], *sizes.rows[-1:]):
        for shape in (None, *sizes.shapes):
            yield partial(_shaped, sizes, device, top, rows, shape)


def _shaped(
    sizes: Products, device: torch.device, top: Ceiling, rows: int, shape: LinearShape | None
) -> Row:
    x, weight, _ = _problem(rows, *sizes.tuned, "bfloat16", device)
    run = replayed(lambda: linear(x, weight, shape=shape), device)
    ms = milliseconds(run, device, sizes.budget_s)
    flops = 2 * rows * weight.values.numel()
    share = _row(_bytes(weight, rows), flops, top, ms)["share"]
    name = (
        "default" if shape is None else f"{shape.rows}x{shape.outs} {shape.warps}w{shape.stages}s"
    )
    return {"rows": rows, "shape": name, "ms": ms, "share": share}
