"""Time on a device, and what the device can do at best: its copy bandwidth and product rate."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["Ceiling", "ceiling", "milliseconds"]


def milliseconds(run: Callable[[], object], device: torch.device, budget_s: float = 0.25) -> float:
    """Median time of `run` after warming up; caches are left warm between runs, data is not small.

    On a GPU by events around each run, on a CPU by the clock.
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
    pairs = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(count)
    ]
    for first, last in pairs:
        first.record()
        run()
        last.record()
    torch.cuda.synchronize(device)
    return statistics.median(first.elapsed_time(last) for first, last in pairs)


@dataclass(frozen=True, slots=True)
class Ceiling:
    """copy_gbs: bytes read and written by a copy, per second; gemm_tflops: a large bf16 product."""

    copy_gbs: float
    gemm_tflops: float


def ceiling(device: torch.device, scale: float = 1.0) -> Ceiling:
    """Measured now.  scale: below 1 for a trial run."""
    count = int(scale * (2 << 30))  # 2 GB each way: far more than any cache
    source = torch.empty(max(count, 1 << 16), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_ms = milliseconds(lambda: target.copy_(source), device)
    size = max(int(scale * 8192) // 16 * 16, 64)
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    gemm_ms = milliseconds(lambda: torch.matmul(a, b, out=product), device)
    return Ceiling(2 * source.numel() / copy_ms / 1e6, 2 * size**3 / gemm_ms / 1e9)
