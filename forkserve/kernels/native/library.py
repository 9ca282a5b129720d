"""Find, choose and load the native library: one file per instruction set, bound with ctypes."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
from pathlib import Path

from forkserve.errors import BackendError, ConfigError

__all__ = ["ABI", "Library", "available", "load", "supported"]

ABI = 4  # raised with every change of an exported function or structure
_FOLDER = Path(__file__).parent
# Best first: what the processor must have, by the names of /proc/cpuinfo.
_AVX512 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"}
_NEEDS = {
    "amx": {*_AVX512, "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"},
    "avx512": _AVX512,
    "avx2": {"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"},
    "neon": {"asimd"},
}
# Linux's names, of x86-64: SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA.
_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA = 158, 0x1023, 18


class Library(ctypes.CDLL):
    """A loaded library.  isa: the instruction set it was compiled for."""

    isa: str


def supported() -> list[str]:
    """Instruction sets that this processor has and that a library was built for, best first."""
    flags = _cpu_flags()
    return [
        isa
        for isa, needs in _NEEDS.items()
        if needs <= flags and _file(isa).exists() and (isa != "amx" or _tiles_granted())
    ]


def available() -> str | None:
    """None if the library can be loaded, else why it cannot, in words for a person."""
    try:
        load()
    except (BackendError, ConfigError) as error:
        return str(error)
    return None


def load(isa: str | None = None) -> Library:
    """The library for `isa`, by default FORKSERVE_ISA's, else the best.

    Every instruction set gives the same bits.  Raises `ConfigError` for a name that is unknown or
    that this processor lacks, `BackendError` if there is no library or it is of another version.
    """
    wish = isa or os.environ.get("FORKSERVE_ISA") or None
    if wish is not None and wish not in _NEEDS:
        raise ConfigError(
            f"instruction set '{wish}' is unknown; {', '.join(_NEEDS)} are the names "
            "(argument or FORKSERVE_ISA)"
        )
    found = supported()
    if wish is None and not found:
        raise BackendError(_absent())
    if wish is not None and wish not in found:
        have = ", ".join(found) or "none"
        raise ConfigError(
            f"there is no native library for instruction set '{wish}' that this processor can "
            f"run; usable here: {have}"
        )
    return _open(wish or found[0])


@functools.cache
def _open(isa: str) -> Library:
    try:
        library = Library(str(_file(isa)))
    except OSError as error:
        raise BackendError(f"cannot load the native kernels: {error}; build them again") from error
    library.fs_abi.restype = ctypes.c_int
    if library.fs_abi() != ABI:
        raise BackendError(
            f"{_file(isa)} has version {library.fs_abi()}, this package needs {ABI}; "
            "build it again: python hatch_build.py, or reinstall the package"
        )
    library.isa = isa
    return library


def _file(isa: str) -> Path:
    return _FOLDER / f"libforkserve-{isa}.so"


def _absent() -> str:
    built = sorted(_FOLDER.glob("libforkserve-*.so"))
    if built:
        names = ", ".join(path.stem.partition("-")[2] for path in built)
        return (
            f"this processor has none of the instruction sets the kernels were built for: {names}"
        )
    why = "nothing says why"
    with contextlib.suppress(OSError):  # what hatch_build.py left
        why = (_FOLDER / "not_built.txt").read_text(encoding="utf-8").strip()
    return (
        f"the native kernels were not built when the package was installed ({why}); "
        "reinstall it, or run python hatch_build.py in a checkout"
    )


@functools.cache
def _tiles_granted() -> bool:
    """Ask Linux for AMX's tiles, once for all threads and forks of this process.

    A process must: their state is 8 KiB in every signal frame.  It may be refused, in a sandbox or
    where a thread's alternate signal stack is too small.
    """
    try:
        arch_prctl = ctypes.CDLL(None, use_errno=True).syscall
    except (AttributeError, OSError):
        return False
    arch_prctl.argtypes = [ctypes.c_long] * 3
    return bool(arch_prctl(_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA) == 0)


@functools.cache
def _cpu_flags() -> frozenset[str]:
    """Features of this processor, by Linux's names."""
    if platform.machine().lower() in ("arm64", "aarch64"):
        return frozenset({"asimd"})  # all have it; under emulation /proc/cpuinfo is the host's
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "flags":
                return frozenset(value.split())
    return frozenset()
