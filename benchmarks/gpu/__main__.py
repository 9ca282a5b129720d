"""``python -m benchmarks.gpu``: kernel tests on the GPU, then benchmarks, within eight minutes.

Uses the interpreter it is started with and what is installed there: torch, Triton, numpy, rich and
pytest.  Where the engine's dependencies are installed too, the engine's tests run as well.  Without
a CUDA GPU it says so and does nothing else.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
LIMIT_S = 480.0
LATE_S = 470.0  # when it ends in any case
PATIENCE = 3  # rows of a table that may fail
SHARES = 8  # processes that the tests are spread over: compiling takes them most of the time
NO_TESTS = 5  # pytest's status where a share has none
NEEDED = ("torch", "triton", "numpy", "rich", "pytest")


def probe() -> dict[str, Any] | None:
    """The GPU that torch sees, or None."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "torch_device": "cuda",
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gb": round(properties.total_memory / 1e9, 1),
        "multiprocessors": properties.multi_processor_count,
        "driver": _driver(),
        "runtime": f"ROCm {torch.version.hip}" if torch.version.hip else torch.version.cuda,
    }


def _driver() -> str:
    """The driver's version; "unknown" where nvidia-smi is not there or finds no GPU."""
    try:
        call = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(call, check=False, capture_output=True, text=True)
    except OSError:
        return "unknown"
    found = done.stdout.strip().split("\n")[0] if done.returncode == 0 else ""
    return found or "unknown"


def kernel_tests(seconds: float, *chosen: str) -> dict[str, Any]:
    """The tests under tests/kernels/device, in processes of their own that share them out.

    chosen: arguments for pytest, by default those that leave the whole grid of attention out.
    """
    call = [sys.executable, "-m", "pytest", "-q", "-c", "benchmarks/gpu/pytest.ini"]
    call += ["--rootdir", str(ROOT), "--confcutdir", "tests/kernels", "tests/kernels/device"]
    call += chosen or ("-m", "not long")
    shares = min(SHARES, os.cpu_count() or 1)
    begin = time.perf_counter()
    shared = [{"KERNEL_TESTS_SHARE": f"{i}/{shares}"} for i in range(shares)]
    results = _within(seconds, call, shared)
    passed = any(status == 0 for _, status in results)
    lines = []
    for output, status in results:
        lines.append((output.strip().splitlines() or ["no output"])[-1])
        if status not in (0, NO_TESTS):
            passed = False
            print("\n".join(output.strip().splitlines()[-40:]), file=sys.stderr)
    wall = round(time.perf_counter() - begin, 1)
    return {"passed": passed, "summary": summed(lines), "wall_s": wall}


def summed(lines: list[str]) -> str:
    """Last lines of pytest's shares as one.

    Modules that need what is not there are skipped in each share: the most of any is said.
    """
    counts: Counter[str] = Counter()
    rest = []
    for line in lines:
        found = re.findall(r"(\d+) (failed|passed|skipped|errors?|xfailed|xpassed)\b", line)
        if not found and "no tests ran" not in line and "deselected" not in line:
            rest.append(line)
        for number, what in found:
            what = what.removesuffix("s") if what == "errors" else what
            one = int(number)
            counts[what] = max(counts[what], one) if what == "skipped" else counts[what] + one
    said = [
        f"{counts[what]} {what}"
        for what in ("failed", "error", "passed", "xfailed", "xpassed")
        if counts[what]
    ]
    said += [f"{counts['skipped']} skipped"] if counts["skipped"] else []
    return ", ".join([*said, *dict.fromkeys(rest)]) or "no tests ran"


def _within(
    seconds: float, call: list[str], environments: Sequence[dict[str, str]]
) -> list[tuple[str, int]]:
    """What a command says in each environment, the summary last, and its status.

    They run at once; what is late is ended with its workers.
    """
    end = time.perf_counter() + seconds
    carried = filter(None, [os.environ.get("PYTHONPATH")])  # packages that somebody brought along
    common = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), *carried))}
    results = []
    with ExitStack() as stack:
        running = []
        for more in environments:
            out, err = (stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2))
            process = subprocess.Popen(
                call,
                cwd=ROOT,
                env={**common, **more},
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            stack.callback(_end, process)
            running.append((process, out, err))
        for process, out, err in running:
            late = ""
            try:
                status = process.wait(max(end - time.perf_counter(), 0.0))
            except subprocess.TimeoutExpired:
                _end(process)
                late, status = f"\nstopped after {seconds:.0f} s", 1
            out.seek(0)
            err.seek(0)
            results.append((f"{err.read()}{out.read()}{late}", status))
    return results


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process with its workers, if it runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def benchmarks(
    found: dict[str, Any], end: float, sizes: Any, scale: float, tables: dict[str, Any]
) -> None:
    """Every table, row by row while there is time; what was left out or failed is said.

    A table is left at its third failure: a GPU that has met a fault answers nothing any more.
    They go to `tables` as they come.
    """
    import torch

    from benchmarks.gpu import attention, products
    from benchmarks.gpu.timing import ceiling

    device = torch.device(found["torch_device"])
    with torch.inference_mode():
        top = ceiling(device, scale)
        tables["ceiling"] = {
            "copy_gb_s": top.copy_gbs,
            "gemm_bf16_tflop_s": top.gemm_tflops,
            "launches_us": top.launch_ms * 1e3,
        }
        jobs: dict[str, Iterator[Callable[[], dict[str, Any]]]] = {
            "paged": attention.paged(sizes, device, top),
            "trees": attention.trees(sizes, device, top),
            "products": products.products(sizes.products, device, top),
            "tuning": attention.tuning(sizes, device, top),
            "shapes": products.shapes(sizes.products, device, top),
            "levels": attention.levels(sizes, device, top),
        }
        for name, rows in jobs.items():
            tables[name], failed = [], 0
            for number, row in enumerate(rows, 1):
                try:
                    tables[name].append(row())
                except Exception as error:  # the rest is worth having
                    traceback.print_exc()
                    why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                    tables["failed"].append(f"{name}, row {number}: {why}")
                    failed += 1
                if failed == PATIENCE or time.perf_counter() > end:
                    tables["left_out"].append(f"{name} after {number} rows")
                    break


def goals(tables: dict[str, Any]) -> list[dict[str, Any]]:
    """The goals of the GPU row, and what was reached."""
    paged = [row for row in tables.get("paged", ()) if row["goal"]]
    trees = [row for row in tables.get("trees", ()) if row["goal"]]
    wide = [row for row in tables.get("trees", ()) if row["k"] >= 4]
    beside = [min(r["over_flat"], r["over_sdpa"] or r["over_flat"]) for r in wide]
    rows = [
        ("paged decode, least share of copy bandwidth", 0.8, [r["share"] for r in paged]),
        ("tree decode where memory-bound, least share of ideal", 0.7, [r["share"] for r in trees]),
        ("k >= 4: least speed-up over flat paging and over SDPA", 1.0, beside),
    ]
    return [
        {
            "what": what,
            "goal": goal,
            "value": min(values),
            "met": min(values) >= goal,
            "rows": len(values),
            "rows_that_meet_it": sum(value >= goal for value in values),
            "median": statistics.median(values),
        }
        for what, goal, values in rows
        if values
    ]


def show(result: dict[str, Any]) -> None:
    """Tables on the terminal."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 170)
    for name in ("paged", "trees", "products", "tuning", "shapes", "levels", "goals"):
        rows = result.get(name) or []
        if not rows:
            continue
        table = Table(title=name)
        for column in rows[0]:
            table.add_column(column)
        for row in rows:
            cells = (f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values())
            table.add_row(*cells)
        console.print(table)
    console.print(result["ceiling"], result["tests"])
    for what in result["failed"]:
        console.print(f"failed: {what}", markup=False)


def main(
    *,
    sizes: Any = None,
    scale: float = 1.0,
    results: Path = RESULTS,
    tests: tuple[str, ...] = (),
) -> int:
    """0 if there is no GPU, or if the tests pass and no table fails; a missed goal is a result.

    sizes, scale, tests: smaller, for a trial of the program itself.
    """
    begin = time.perf_counter()
    found = probe()
    if found is None and _driver() != "unknown":
        wrong = f"nvidia-smi lists a GPU, but {sys.executable} has no torch that sees it"
        print(f"{wrong}; run `make gpu PYTHON=...` with one that has.", file=sys.stderr)
        return 1
    if found is None:
        print("No CUDA GPU found (nvidia-smi and torch see none): nothing was run.")
        return 0
    if os.environ.get("TRITON_INTERPRET") == "1" and found["torch_device"] != "cpu":
        print("TRITON_INTERPRET=1 is set: kernels would not run on the GPU.", file=sys.stderr)
        return 1
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"`make gpu` needs {', '.join(missing)} beside {sys.executable}.", file=sys.stderr)
        return 1
    import torch
    import triton

    from benchmarks.gpu.attention import Sizes
    from benchmarks.machine import commit

    print(f"{found['device']}: kernel tests", flush=True)
    tested = kernel_tests(LIMIT_S / 2, *tests)
    print("benchmarks", flush=True)
    tables: dict[str, Any] = {"left_out": [], "failed": [], "ceiling": {}}
    result = {
        **found,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": "make gpu",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
        },
        "tests": tested,
    }

    def keep() -> dict[str, Any]:
        wall = round(time.perf_counter() - begin, 1)
        made = {**result, **tables, "goals": goals(tables), "wall_s": wall}
        results.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^a-z0-9]+", "-", found["device"].lower()).strip("-")
        place = results / f"{name}.json"
        place.write_text(json.dumps(made, indent=1) + "\n")
        print(f"kept in {place}", flush=True)
        return made

    def stop() -> None:
        """A kernel that never ends, or a row that takes too long: what there is is kept."""
        try:
            tables["failed"].append(f"{[*tables][-1]} did not end in time")
            keep()
        finally:
            os._exit(1)

    late = threading.Timer(LATE_S - (time.perf_counter() - begin), stop)
    late.daemon = True
    late.start()
    try:
        # A row that has begun is finished, and kernels compile: a margin of a tenth.
        benchmarks(found, begin + 0.9 * LIMIT_S, sizes or Sizes(), scale, tables)
    finally:
        late.cancel()
    show(keep())
    return 0 if tested["passed"] and not tables["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
