"""Every Triton kernel compiles for the GPUs we name, without one: registers, shared memory, spills.

``python -m forkserve.kernels.compile`` prints the whole table; here one small and one main
configuration of each kernel is compiled for each target, and all of them with ``-m long``.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import forkserve.kernels
from forkserve.errors import BackendError
from forkserve.kernels import compile as compiler
from forkserve.kernels.compile import TARGETS, Kernel, build, build_all, kernels

ROOT = Path(__file__).resolve().parents[2]
TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not TRITON, reason="Triton is not installed")
NAMES = sorted(kernel.name for kernel in kernels())


def test_the_scan_finds_what_the_sources_define() -> None:
    """By text, so that a kernel in a module the scan cannot see would show."""
    folder = Path(forkserve.kernels.__file__).parent
    text = "\n".join(path.read_text() for path in folder.rglob("*.py"))
    written = [
        line.split("(")[0].removeprefix("def ")
        for line in text.splitlines()
        if line.startswith("def ") and line.split("(")[0].endswith("_kernel")
    ]
    assert sorted(written) == NAMES
    assert len(NAMES) >= 8


def test_every_kernel_names_its_configurations() -> None:
    for kernel in kernels():
        assert kernel.cases, f"{kernel.name} is never compiled"
        reached = {t for case in kernel.cases for t in case.targets or TARGETS}
        assert reached == set(TARGETS), kernel.name
        names = [(case.name, case.targets) for case in kernel.cases]
        assert len(set(names)) == len(names), f"{kernel.name}: two configurations of one name"


@needs_triton
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NAMES)
def test_compiles_without_spills(name: str, target: str) -> None:
    (kernel,) = [k for k in kernels() if k.name == name]
    cases = [c for c in kernel.cases if target in (c.targets or TARGETS)]
    tight = ("d128 g8 bf16 small", "d64 g3 fp32 large", "d128 g8 fp32 large")
    tight += ("2048x4096 bf16", "2048x4096 i8")
    chosen = [case for case in cases if case.name in tight] or cases[-1:]
    for case in chosen:
        built = build(kernel, case, target)
        assert built.fault == ""
        assert built.registers is not None
        assert built.spilled == 0


@needs_triton
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["rotate_write_kv_kernel", "attend_kernel"])
def test_fp8_keeps_small_numbers(name: str, target: str) -> None:
    """Codes are made and read through numbers below 2**-126, which must not be flushed to zero."""
    (kernel,) = [k for k in kernels() if k.name == name]
    cases = [c for c in kernel.cases if "fp8" in c.name and target in (c.targets or TARGETS)]
    asm = build(kernel, cases[0], target).asm
    if target.startswith("sm"):
        assert re.search(r"\bmul\S*\.f32", asm)
        assert not re.search(r"\bmul\S*\.ftz", asm)
    else:
        assert re.search(r"float_denorm_mode_32 3\b", asm)


PRODUCTS = ("attend_kernel", "linear_kernel")
# What adds products up, by target and by the bits of a number.
ADDING = re.compile(r"\b(mma\.sync\.\S+|wgmma\.mma_async\S*|v_mfma_\w+)")
ONE = {
    "sm_80": {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"},
    "sm_90": {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"},
    "gfx942": {"v_mfma_f32_16x16x16_bf16"},
}


@needs_triton
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_every_shape_of_a_tile_adds_up_with_one_instruction(name: str, target: str) -> None:
    """On it rests that a row's bits do not depend on the shape that its batch chose."""
    (kernel,) = [k for k in kernels() if k.name == name]
    shapes = {}  # one case of each shape: compiling takes seconds
    for case in kernel.cases:
        if "bf16" in case.name and (not case.targets or target in case.targets):
            shapes.setdefault((case.constants["BLOCK_M"], case.warps), case)
    assert len(shapes) >= 2
    for case in shapes.values():
        asm = build(kernel, case, target).asm
        assert set(ADDING.findall(asm)) == ONE[target], case.name


@needs_triton
def test_products_are_pipelined_on_tensor_cores() -> None:
    """Loads that overlap the products: what their speed rests on."""
    wanted = {
        "attend_kernel": ("d128 g8 bf16 small", 48),
        "linear_kernel": ("16x4096 bf16", 40),
    }
    for kernel in kernels():
        if kernel.name in wanted:
            name, kilobytes = wanted[kernel.name]
            (case,) = [c for c in kernel.cases if c.name == name and "sm_90" in c.targets]
            built = build(kernel, case, "sm_90")
            assert "cp.async" in built.asm
            assert built.shared >= kilobytes * 1024, "several steps on their way"


@needs_triton
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_configuration_compiles() -> None:
    faults = [b if isinstance(b, str) else b.fault for b in build_all()]
    assert [fault for fault in faults if fault] == []


@needs_triton
def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A table, and an exit status that says whether all is well."""
    (kernel,) = [k for k in kernels() if k.name == "copy_rows_kernel"]
    monkeypatch.setattr(compiler, "kernels", lambda: [kernel])
    assert compiler.main() == 0
    out = capsys.readouterr().out
    assert out.count("copy_rows_kernel") == len(kernel.cases) * len(TARGETS)
    bare = Kernel(kernel.module, kernel.name, kernel.function, ())
    monkeypatch.setattr(compiler, "kernels", lambda: [bare])
    assert compiler.main() == 1
    assert "names no case" in capsys.readouterr().err


def test_kernels_import_without_triton() -> None:
    """And then say what is missing when they are to be compiled."""
    modules = [name for name in compiler.modules() if not name.endswith(".compile")]
    code = f"""
import sys
sys.modules["triton"] = None
import importlib
for name in {modules!r}:
    importlib.import_module(name)
from forkserve.kernels import compile
assert compile.main() == 1
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Triton is not installed" in done.stderr


@needs_triton
def test_an_interpreter_cannot_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "INTERPRETED", True)
    kernel = kernels()[0]
    with pytest.raises(BackendError, match="TRITON_INTERPRET"):
        build(kernel, kernel.cases[0], "sm_80")
