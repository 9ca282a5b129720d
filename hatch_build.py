"""Compile the native kernels: one shared library per instruction set.

Hatchling calls the hook for wheels and editable installs; ``python hatch_build.py`` builds in place
without pip.  FORKSERVE_NATIVE=require makes a missing compiler or a failed build an error, =off
builds nothing; otherwise the package is left pure Python when there is no compiler.
CXX names the compiler.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # in-place builds need no hatchling
    BuildHookInterface = object  # type: ignore[assignment, misc]

ROOT = Path(__file__).resolve().parent
SOURCES = ROOT / "forkserve" / "kernels" / "native"
# Every instruction set gives the same bits; see docs/engine.md.  No -ffast-math, no contraction:
# a sum has one order, and only an explicit fma is fused.  (gcc warns of uninitialised values in its
# own AVX-512 header.)
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-pthread",
         "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-uninitialized",
         "-Wno-maybe-uninitialized", "-Wno-unknown-warning-option")  # fmt: skip
_AVX512 = ("-march=x86-64-v4", "-mavx512vnni", "-mprefer-vector-width=512")
TARGETS = {
    "x86_64": {
        "avx2": ("-march=x86-64-v3",),
        "avx512": _AVX512,
        "amx": (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    },
    "aarch64": {"neon": ("-march=armv8.2-a",)},
}
# What a compiler or assembler may be too old for: without them a library is left out.
NEWER = {
    "amx": "#include <immintrin.h>\nvoid f() { _tile_dpbf16ps(0, 1, 2); _tile_dpbusd(3, 1, 2); }\n",
}
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
ADVICE = "set CXX to g++ 11 or clang 14 or newer, or FORKSERVE_NATIVE=off"


class BuildError(RuntimeError):
    """The compiler is missing or refused the sources.  The text is one line."""


def build(folder: Path | None = None) -> list[Path]:
    """Compile what is out of date and return the libraries.  `BuildError` if that fails."""
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    machine = platform.machine().lower()
    targets = TARGETS.get(MACHINES.get(machine, machine), {})
    if compiler is None:
        raise BuildError(f"there is no C++ compiler; {ADVICE}")
    if not targets:
        raise BuildError(f"there are no native kernels for the processor '{machine}'")
    targets = {isa: flags for isa, flags in targets.items() if _compiles(compiler, isa, flags)}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        works = [pool.submit(_compile, compiler, isa, targets[isa], folder) for isa in targets]
        return [work.result() for work in works]


def _compiles(compiler: str, isa: str, flags: tuple[str, ...]) -> bool:
    """Whether a compiler is new enough for an instruction set."""
    if isa not in NEWER:
        return True
    command = [compiler, *flags, "-x", "c++", "-c", "-", "-o", os.devnull]
    done = subprocess.run(command, input=NEWER[isa], capture_output=True, text=True, check=False)
    return not done.returncode


def _compile(compiler: str, isa: str, flags: tuple[str, ...], folder: Path | None) -> Path:
    """One library: objects whose content and flags are known are taken as they are."""
    library = (folder or SOURCES) / f"libforkserve-{isa}.so"
    headers = b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.h")))
    objects = []
    cache = ROOT / "build" / "native" / isa
    cache.mkdir(parents=True, exist_ok=True)
    for source in sorted(SOURCES.glob("*.cpp")):
        command = [compiler, *FLAGS, *flags, f'-DFS_ISA="{isa}"', "-c", str(source)]
        key = hashlib.sha256(repr(command).encode() + headers + source.read_bytes())
        target = cache / f"{source.stem}-{key.hexdigest()[:16]}.o"
        if not target.exists():
            _run([*command, "-o"], target)
            for old in cache.glob(f"{source.stem}-*.o"):
                if old.name[len(source.stem) + 1 : -2] != target.name[len(source.stem) + 1 : -2]:
                    old.unlink(missing_ok=True)
        objects.append(str(target))
    _run([compiler, "-shared", "-pthread", *objects, "-o"], library)
    return library


def _run(command: list[str], target: Path) -> None:
    """Run `command` with a temporary output that then takes the place of `target`."""
    scratch = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    done = subprocess.run([*command, str(scratch)], capture_output=True, text=True, check=False)
    if done.returncode:
        scratch.unlink(missing_ok=True)
        sys.stderr.write(f"{' '.join(command)}\n{done.stderr}")
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        told = next((line for line in lines if "error" in line), lines[0] if lines else "")
        told = told or f"exit code {done.returncode}"
        raise BuildError(f"compiler {command[0]} failed: {told}; {ADVICE}")
    if done.stderr:
        sys.stderr.write(done.stderr)
    os.replace(scratch, target)  # a program that has the old one loaded keeps it


class NativeHook(BuildHookInterface):  # type: ignore[misc, type-arg, unused-ignore]
    """Adds the libraries to the wheel, which is then one for this platform."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        wish = os.environ.get("FORKSERVE_NATIVE") or "auto"
        if wish not in ("auto", "require", "off"):
            self.app.abort(f"FORKSERVE_NATIVE={wish} is unknown; auto, require and off are known")
        if wish == "off":
            return
        try:
            libraries = build()
        except BuildError as error:
            if wish == "require":
                self.app.abort(str(error))  # ends the build; a traceback would bury the line
            self.app.display_warning(f"built without native kernels: {error}")
            return
        build_data["pure_python"] = False
        tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{tag}"
        build_data["artifacts"] += [f"/{path.relative_to(ROOT)}" for path in libraries]


if __name__ == "__main__":
    try:
        for path in build():
            print(path.relative_to(ROOT))
    except BuildError as error:
        sys.exit(str(error))
