"""Compile every Triton kernel ahead of time, without a GPU.

``python -m forkserve.kernels.compile``

Prints registers, shared memory and spills per kernel, configuration and target.  Ends with 1 if
something does not compile, spills registers, or asks for more shared memory than the target has.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forkserve.kernels as package
from forkserve.errors import BackendError
from forkserve.kernels.jit import INTERPRETED, TRITON, Case, triton

__all__ = ["TARGETS", "Built", "Kernel", "build", "build_all", "kernels", "main", "modules"]


@dataclass(frozen=True, slots=True)
class Target:
    """A processor: Triton's names, and the shared memory of one block in bytes."""

    backend: str
    arch: int | str
    warp: int
    shared: int


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 163 * 1024),
    "sm_90": Target("cuda", 90, 32, 227 * 1024),
    "gfx942": Target("hip", "gfx942", 64, 64 * 1024),
}


@dataclass(frozen=True, slots=True)
class Kernel:
    """An entry point (a jitted function called ``*_kernel``) and what it is compiled for."""

    module: str
    name: str
    function: Any
    cases: tuple[Case, ...]


@dataclass(frozen=True, slots=True)
class Built:
    """What came out.  registers and spilled are None where they could not be read.

    spilled: bytes of local memory on NVIDIA, registers on AMD.  shared: bytes.
    """

    kernel: str
    case: Case
    target: str
    registers: int | None
    spilled: int | None
    shared: int
    seconds: float
    asm: str

    @property
    def fault(self) -> str:
        """What is wrong with it, or nothing."""
        limit = TARGETS[self.target].shared
        if self.shared > limit:
            return f"needs {self.shared} bytes of shared memory, {self.target} has {limit}"
        if self.spilled:
            return f"spills {self.spilled}"
        return ""


def modules() -> list[str]:
    """Names of the package's modules, by their files: compiled libraries lie beside them."""
    root = Path(package.__path__[0])
    paths = sorted(p.relative_to(root).with_suffix("") for p in root.rglob("*.py"))
    return [".".join((package.__name__, *p.parts)) for p in paths if p.name != "__init__"]


def kernels() -> list[Kernel]:
    """Every kernel of the package, found by scanning it."""
    found = []
    for place in modules():
        module = importlib.import_module(place)
        cases = getattr(module, "CASES", {})
        for name, value in vars(module).items():
            function = getattr(value, "fn", value)
            if name.endswith("_kernel") and getattr(function, "__module__", "") == place:
                found.append(Kernel(place, name, value, tuple(cases.get(name, ()))))
    return found


def build(kernel: Kernel, case: Case, target: str) -> Built:
    """Compile one case.  Raises what Triton raises."""
    if not TRITON or INTERPRETED:
        raise BackendError("compiling needs Triton, and TRITON_INTERPRET unset")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.function.arg_names
    unknown = {*case.types, *case.constants} ^ set(names)
    if unknown:
        raise BackendError(f"{kernel.name} '{case.name}': arguments {sorted(unknown)} do not match")
    signature = {name: case.types.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in case.constants.items()}
    aligned = [
        name for name in names if name in case.aligned or case.types.get(name, "").startswith("*")
    ]
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel.function, signature=signature, constexprs=constants, attrs=attrs)
    at = TARGETS[target]
    options = {"num_warps": case.warps, "num_stages": case.stages, "enable_fp_fusion": False}
    if at.backend == "hip":
        options["matrix_instr_nonkdim"] = 16
    begin = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Triton's own, about defaults that will change
        made = triton.compile(
            source, target=GPUTarget(at.backend, at.arch, at.warp), options=options
        )
    seconds = time.perf_counter() - begin
    asm = str(made.asm.get("ptx") or made.asm.get("amdgcn"))
    if at.backend == "hip":
        registers = _number(r"\.vgpr_count:\s+(\d+)", asm)
        spilled = _number(r"\.vgpr_spill_count:\s+(\d+)", asm)
    else:
        usage = _usage(made.asm["cubin"])
        registers, spilled = _number(r"REG:(\d+)", usage), _number(r"STACK:(\d+)", usage)
    shared = int(made.metadata.shared)
    return Built(kernel.name, case, target, registers, spilled, shared, seconds, asm)


def _usage(cubin: bytes) -> str:
    """cuobjdump's line on a binary; it comes with Triton."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return ""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        call = [str(tool), "--dump-resource-usage", file.name]
        return subprocess.run(call, check=False, capture_output=True, text=True).stdout


def _number(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return int(found[1]) if found else None


def build_all(targets: Sequence[str] = tuple(TARGETS)) -> Iterator[Built | str]:
    """Everything, one after the other; a string says what did not compile, and why."""
    for kernel in kernels():
        if not kernel.cases:
            yield f"{kernel.module}.{kernel.name} names no case to compile"
        for case in kernel.cases:
            for target in case.targets or targets:
                if target not in targets:
                    continue
                try:
                    yield build(kernel, case, target)
                except Exception as error:  # whatever a compiler throws
                    why = " ".join(str(error).split())[-160:]
                    yield f"{kernel.name} '{case.name}' for {target}: {type(error).__name__}: {why}"


def main() -> int:
    """Compile everything and print a table."""
    if not TRITON:
        sys.stderr.write("Triton is not installed: nothing was compiled.\n")
        return 1
    faults = []
    row = "{:24} {:34} {:7} {:>9} {:>9} {:>8} {:>8}\n"
    head = ("kernel", "configuration", "target", "registers", "shared", "spilled", "seconds")
    sys.stdout.write(f"triton {triton.__version__}\n" + row.format(*head))
    for built in build_all():
        if isinstance(built, str):
            faults.append(built)
            continue
        numbers = ("-" if n is None else n for n in (built.registers, built.shared, built.spilled))
        cells = (built.kernel, built.case.name, built.target, *numbers, f"{built.seconds:.1f}")
        sys.stdout.write(row.format(*cells))
        if built.fault:
            faults.append(f"{built.kernel} '{built.case.name}' for {built.target}: {built.fault}")
    for fault in faults:
        sys.stderr.write(fault + "\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
