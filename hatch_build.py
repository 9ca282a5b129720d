"""Compile the native kernels: one shared library per instruction set.

Hatchling calls the hook for wheels and editable installs; ``python hatch_build.py`` builds in place
without pip.  FORKSERVE_NATIVE=require makes a missing compiler or a failed build an error, =off
builds nothing; otherwise the package is left pure Python when there is no compiler, with the reason
in it (pip shows no output of a build that ends well).
CXX names the compiler, with arguments if need be; one that is not there is always an error.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
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
    # The first of the 64-bit ones: a newer one would buy nothing, and not run on a Cortex-A72.
    "aarch64": {"neon": ("-march=armv8-a",)},
}
# What a compiler or assembler may be too old for: without them a library is left out.
NEWER = {
    "amx": "#include <immintrin.h>\nvoid f() { _tile_dpbf16ps(0, 1, 2); _tile_dpbusd(3, 1, 2); }\n",
}
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
ADVICE = "set CXX to g++ 11 or clang 14 or newer, or FORKSERVE_NATIVE=off"
# Why a package has no libraries; library.py reads it.
REASON = SOURCES / "not_built.txt"


class BuildError(RuntimeError):
    """The compiler is missing or refused the sources.  The text is one line."""


class SettingError(BuildError):
    """A variable asks for what cannot be had: never a reason to build without kernels."""


def build(folder: Path | None = None, machine: str = "") -> list[Path]:
    """Compile what is out of date and return the libraries.  `BuildError` if that fails.

    machine: that they are for, by the names of `platform.machine`; the default is this one.  CXX
    must be a compiler for it.
    """
    machine = (machine or platform.machine()).lower()
    targets = TARGETS.get(MACHINES.get(machine, machine), {})
    system = platform.system()
    if not targets or (system == "Darwin" and "neon" not in targets):
        raise BuildError(f"there are no native kernels for the processor '{machine}' on {system}")
    compiler = _compiler()
    targets = {isa: flags for isa, flags in targets.items() if _compiles(compiler, isa, flags)}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        works = [pool.submit(_compile, compiler, isa, targets[isa], folder) for isa in targets]
        libraries = [work.result() for work in works]
    if folder is None:
        REASON.unlink(missing_ok=True)
    return libraries


def _compiler() -> list[str]:
    """The command that compiles: CXX, or the system's."""
    wish = shlex.split(os.environ.get("CXX", ""))
    if wish:
        found = shutil.which(wish[0])
        if found is None:
            raise SettingError(f"CXX names the compiler '{wish[0]}', which is not there; {ADVICE}")
        return [found, *wish[1:]]
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return [found]
    raise BuildError(f"there is no C++ compiler; {ADVICE}")


def _macos() -> int:
    """The oldest macOS, 11 or newer, that Python is for; 0 on another system."""
    system, _, rest = sysconfig.get_platform().partition("-")
    return max(11, int(rest.partition(".")[0])) if system == "macosx" else 0


def platform_tag() -> str:
    """Of a wheel that holds the libraries of this machine."""
    if oldest := _macos():  # Python may be for two kinds of processors, a library is for this one
        return f"macosx_{oldest}_0_{platform.machine()}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def _compiles(compiler: list[str], isa: str, flags: tuple[str, ...]) -> bool:
    """Whether a compiler is new enough for an instruction set."""
    if isa not in NEWER:
        return True
    command = [*compiler, *flags, "-x", "c++", "-c", "-", "-o", os.devnull]
    done = subprocess.run(command, input=NEWER[isa], capture_output=True, text=True, check=False)
    return not done.returncode


def _compile(compiler: list[str], isa: str, flags: tuple[str, ...], folder: Path | None) -> Path:
    """One library: objects whose content and flags are known are taken as they are."""
    library = (folder or SOURCES) / f"libforkserve-{isa}.so"
    if oldest := _macos():
        compiler = [*compiler, f"-mmacosx-version-min={oldest}.0"]
    headers = b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.h")))
    objects = []
    cache = ROOT / "build" / "native" / isa
    cache.mkdir(parents=True, exist_ok=True)
    for source in sorted(SOURCES.glob("*.cpp")):
        command = [*compiler, *FLAGS, *flags, "-c", str(source)]
        key = hashlib.sha256(repr(command).encode() + headers + source.read_bytes())
        target = cache / f"{source.stem}-{key.hexdigest()[:16]}.o"
        if not target.exists():
            _run([*command, "-o"], target)
            for old in cache.glob(f"{source.stem}-*.o"):
                if old.name[len(source.stem) + 1 : -2] != target.name[len(source.stem) + 1 : -2]:
                    old.unlink(missing_ok=True)
        objects.append(str(target))
    _run([*compiler, "-shared", "-pthread", *objects, "-o"], library)
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
    _folder: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        wish = os.environ.get("FORKSERVE_NATIVE") or "auto"
        if wish not in ("auto", "require", "off"):
            self.app.abort(f"FORKSERVE_NATIVE={wish} is unknown; auto, require and off are known")
        if wish == "off":
            self._leave_out("FORKSERVE_NATIVE=off", version, build_data)
            return
        try:
            libraries = build()
        except BuildError as error:
            if wish == "require" or isinstance(error, SettingError):
                self.app.abort(str(error))  # ends the build; a traceback would bury the line
            self.app.display_warning(f"built without native kernels: {error}")
            self._leave_out(str(error), version, build_data)
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag()}"
        build_data["artifacts"] += [f"/{path.relative_to(ROOT)}" for path in libraries]

    def _leave_out(self, why: str, version: str, build_data: dict[str, Any]) -> None:
        """Let the package say why it has no libraries: in the tree if that is what is installed."""
        if version == "editable":
            REASON.write_text(f"{why}\n", encoding="utf-8")
            return
        self._folder = tempfile.TemporaryDirectory()
        reason = Path(self._folder.name) / REASON.name
        reason.write_text(f"{why}\n", encoding="utf-8")
        build_data["force_include"][str(reason)] = str(REASON.relative_to(ROOT))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._folder:
            self._folder.cleanup()


if __name__ == "__main__":
    try:
        for path in build():
            print(path.relative_to(ROOT))
    except BuildError as error:
        sys.exit(str(error))
