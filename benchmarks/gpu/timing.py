"""Time on a device, and what the device can do at best: its copy bandwidth and product rate."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["Ceiling", "agree", "ceiling", "milliseconds", "replayed"]

_FLUSH = 128 << 20  # numbers of 4 bytes: several times the largest cache


def replayed(run: Callable[[], torch.Tensor], device: torch.device) -> Callable[[], torch.Tensor]:
    """`run` recorded as a CUDA graph, as the engine's decode steps are: launches cost no host time.

    Without a GPU `run` itself.
    """
    if device.type != "cuda":
        return run
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        result = run()

    def again() -> torch.Tensor:
        graph.replay()
        return result

    return again


def agree(a: torch.Tensor, b: torch.Tensor, tolerance: float = 2e-2) -> None:
    """The two ways of computing it agree, or their times mean nothing."""
    error = float((a.flatten().float() - b.flatten().float()).norm() / b.float().norm())
    if not error < tolerance:
        raise RuntimeError(f"results differ by {error:.3g} of their norm")


def milliseconds(run: Callable[[], object], device: torch.device, budget_s: float = 0.25) -> float:
    """Median time of `run` after warming up, with cold caches.

    On a GPU by events around each run, with the caches filled with something else before it (which
    also keeps the GPU busy while the host sends the run); on a CPU by the clock.  What fills them
    is read, not written: lines that were written would go to memory while the run is timed.
    """
    if device.type != "cuda":
        times: list[float] = []
        end = time.perf_counter() + budget_s
        while not times or time.perf_counter() < end:
            begin = time.perf_counter()
            run()
            times.append((time.perf_counter() - begin) * 1e3)
        return statistics.median(times)
    for _ in range(3):
        run()
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize(device)
    once = max(time.perf_counter() - begin, 1e-5)
    count = max(5, min(200, int(budget_s / once)))
    other = torch.zeros(_FLUSH, dtype=torch.float32, device=device)
    total = torch.empty((), dtype=torch.float32, device=device)
    pairs = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(count)
    ]
    for first, last in pairs:
        torch.sum(other, dim=0, out=total)
        first.record()
        run()
        last.record()
    torch.cuda.synchronize(device)
    return statistics.median(first.elapsed_time(last) for first, last in pairs)


@dataclass(frozen=True, slots=True)
class Ceiling:
    """copy_gbs: bytes read and written by a copy, per second; gemm_tflops: a large bf16 product.

    launch_ms: the time of two kernels that do nothing, the second after the first, as attention and
    its merge are at least.
    """

    copy_gbs: float
    gemm_tflops: float
    launch_ms: float


def ceiling(device: torch.device, scale: float = 1.0) -> Ceiling:
    """Measured now.  scale: below 1 for a trial run."""
    count = int(scale * (2 << 30))  # 2 GB each way: far more than any cache
    source = torch.empty(max(count, 1 << 16), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_ms = milliseconds(lambda: target.copy_(source), device, 0.5)
    size = max(int(scale * 8192) // 16 * 16, 64)
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    gemm_ms = milliseconds(lambda: torch.matmul(a, b, out=product), device, 0.5)
    one = torch.zeros(1, device=device)
    launch_ms = milliseconds(replayed(lambda: one.add_(1).add_(1), device), device, 0.5)
    return Ceiling(2 * source.numel() / copy_ms / 1e6, 2 * size**3 / gemm_ms / 1e9, launch_ms)
