"""The wheel holds the whole package, installs alone, and works without extras."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "forkserve"
NATIVE = "forkserve/kernels/native/"
REASON = f"{NATIVE}not_built.txt"  # instead of libraries
LINKS = ("engine", "kernels", "adapters")

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wheel")]


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command; a failure shows all it said."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    line = [str(part) for part in command]
    done = subprocess.run(line, check=False, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{line} -> {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source archive of this tree."""
    out = tmp_path_factory.mktemp("dist")
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir", out)
    run(*build, "--wheel", "--sdist", ROOT, cwd=out)
    return out


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that holds the wheel and its base dependencies only."""
    home = tmp_path_factory.mktemp("empty")
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    wheels = Path(sys.prefix) / "wheels"  # left there by scripts/setup.sh
    source = ["--no-index", "--find-links", wheels] if wheels.is_dir() else []
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    wheel = next(dist.glob("*.whl"))
    install = ("install", "--no-compile", "-c", ROOT / "constraints.txt")  # most is never imported
    run(*pip, *install, *source, wheel, cwd=home)
    return home / "bin"


def package_files() -> set[str]:
    """Every file of the package, relative to the root."""
    return {
        str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".pyc", ".so")
    } - {REASON}


def test_wheel_holds_every_file(dist: Path) -> None:
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    native = {name for name in packed if name.endswith(".so") or name == REASON}
    assert native
    assert packed - native == package_files()
    assert "forkserve/py.typed" in packed


def test_wheel_is_for_this_platform_if_it_has_native_kernels(dist: Path) -> None:
    path = next(dist.glob("*.whl"))
    with zipfile.ZipFile(path) as wheel:
        native = [name for name in wheel.namelist() if name.endswith(".so")]
    assert path.name.endswith("-py3-none-any.whl") is (native == [])
    assert all(name.startswith(f"{NATIVE}libforkserve-") for name in native)


def test_wheel_without_native_kernels_is_pure_and_says_why(tmp_path: Path) -> None:
    run(
        "env", "FORKSERVE_NATIVE=off", sys.executable, "-m", "build", "--no-isolation",
        "--wheel", "--outdir", tmp_path, ROOT, cwd=tmp_path,
    )  # fmt: skip
    (path,) = tmp_path.glob("*.whl")
    assert path.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(path) as wheel:
        assert [name for name in wheel.namelist() if name.endswith(".so")] == []
        assert wheel.read(REASON) == b"FORKSERVE_NATIVE=off\n"


def test_a_missing_compiler_can_be_an_error(tmp_path: Path) -> None:
    env = {**os.environ, "FORKSERVE_NATIVE": "require", "PATH": ""}
    env.pop("CXX", None)
    command = (sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path)
    done = subprocess.run(
        [*command, ROOT], check=False, cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "no C++ compiler" in done.stdout + done.stderr


def test_every_folder_with_code_is_a_package() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [str(f) for f in folders if not (f / "__init__.py").is_file()] == []


def test_source_archive_holds_package_and_tests_once(dist: Path) -> None:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert package_files() <= names
    needed = {"pyproject.toml", "hatch_build.py", "LICENSE", "README.md", "tests/conftest.py"}
    assert needed <= names
    assert [name for name in names if name.split("/")[0] in LINKS] == []


def test_installed_without_extras(installed: Path, tmp_path: Path) -> None:
    code = "import importlib.util as u; print([m for m in ('torch', 'gguf') if u.find_spec(m)])"
    assert run(installed / "python", "-c", code, cwd=tmp_path).strip() == "[]"
    assert "Usage" in run(installed / "forkserve", "--help", cwd=tmp_path)


def test_installed_demo_on_the_mock(installed: Path, tmp_path: Path) -> None:
    command = (installed / "forkserve", "demo", "--backend", "mock", "--json")
    report = json.loads(run(*command, cwd=tmp_path))
    assert report["backend"] == "mock"
    assert report["turns"]
    assert report["identity"]["checked"] == report["identity"]["equal"] > 0


def hook() -> Any:
    hatch_build = pytest.importorskip("hatch_build")
    pytest.importorskip("hatchling")
    return hatch_build.NativeHook(str(ROOT), {}, None, None, str(ROOT), "wheel")


def build_fails(monkeypatch: pytest.MonkeyPatch, wish: str) -> None:
    """Run the hook with FORKSERVE_NATIVE=`wish`: it ends the build, without a traceback."""
    monkeypatch.setenv("FORKSERVE_NATIVE", wish)
    with pytest.raises(SystemExit) as end:
        hook().initialize("standard", {})
    assert end.value.code == 1


def test_an_unknown_wish_for_native_kernels_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slip such as FORKSERVE_NATIVE=required must not leave the package slow in silence."""
    build_fails(monkeypatch, "required")
    assert "FORKSERVE_NATIVE=required is unknown" in capsys.readouterr().err


def test_a_build_that_fails_ends_with_one_line_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hatch_build = pytest.importorskip("hatch_build")
    advice = "; set CXX to g++ 11 or clang 14 or newer, or FORKSERVE_NATIVE=off"
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'In file a.h:\nx.cpp:1: error: too new' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(hatch_build, "ROOT", tmp_path)  # no object of an earlier build
    monkeypatch.setattr(hatch_build.platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("CXX", str(compiler))
    build_fails(monkeypatch, "require")
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"compiler {compiler} failed: x.cpp:1: error: too new{advice}"
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(hatch_build.shutil, "which", lambda name: None)
    build_fails(monkeypatch, "require")
    assert capsys.readouterr().err == f"there is no C++ compiler{advice}\n"


@pytest.mark.parametrize("wish", ["auto", "require"])
def test_a_compiler_that_is_set_and_not_there_is_an_error(
    wish: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another one must not take its place, nor the package become slow, in silence."""
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    build_fails(monkeypatch, wish)
    assert "CXX names the compiler 'no-such-compiler', which is not" in capsys.readouterr().err


def test_a_compiler_may_have_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hatch_build = pytest.importorskip("hatch_build")
    compiler = tmp_path / "cc"
    compiler.write_text("")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", f"{compiler} --target=here -m64")
    assert hatch_build._compiler() == [str(compiler), "--target=here", "-m64"]
    monkeypatch.setenv("CXX", "")
    monkeypatch.setattr(hatch_build.shutil, "which", lambda name: f"/bin/{name}")
    assert hatch_build._compiler() == ["/bin/c++"]


@pytest.mark.parametrize("version", ["standard", "editable"])
def test_a_package_without_kernels_says_why(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip shows nothing of a build that ends well."""
    hatch_build = pytest.importorskip("hatch_build")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("FORKSERVE_NATIVE", raising=False)
    monkeypatch.setattr(hatch_build, "ROOT", tmp_path)
    monkeypatch.setattr(hatch_build, "REASON", tmp_path / "not_built.txt")
    monkeypatch.setattr(hatch_build.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(hatch_build.shutil, "which", lambda name: None)
    data: dict[str, Any] = {"force_include": {}}
    built = hook()
    built.initialize(version, data)
    packed = {to: Path(path).read_text() for path, to in data["force_include"].items()}
    built.finalize(version, data, "")
    if version == "editable":
        packed = {"not_built.txt": (tmp_path / "not_built.txt").read_text()}
    assert packed == {"not_built.txt": f"there is no C++ compiler; {hatch_build.ADVICE}\n"}


@pytest.mark.parametrize(
    ("system", "tag"),
    [
        ("linux-aarch64", "linux_aarch64"),
        ("macosx-10.13-universal2", "macosx_11_0_arm64"),
        ("macosx-13.3-arm64", "macosx_13_0_arm64"),
    ],
)
def test_a_wheel_is_for_the_processor_that_it_was_built_on(
    system: str, tag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python on macOS may be for two; a library is for one, and for the system that is named."""
    hatch_build = pytest.importorskip("hatch_build")
    commands: list[list[str]] = []
    monkeypatch.setattr(hatch_build, "ROOT", tmp_path)
    monkeypatch.setattr(hatch_build.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(hatch_build.sysconfig, "get_platform", lambda: system)
    monkeypatch.setattr(hatch_build, "_run", lambda command, target: commands.append(command))
    assert hatch_build.platform_tag() == tag
    hatch_build._compile(["cc"], "neon", (), None)
    least = {f"-mmacosx-version-min={tag.split('_')[1]}.0"} if "macosx" in system else set()
    assert len(commands) > 1
    for command in commands:
        assert {part for part in command if part.startswith("-mmacosx")} == least


def test_an_intel_mac_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor has it a torch that the engine could use."""
    hatch_build = pytest.importorskip("hatch_build")
    monkeypatch.setattr(hatch_build.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(hatch_build.platform, "system", lambda: "Darwin")
    with pytest.raises(hatch_build.BuildError, match="'x86_64' on Darwin"):
        hatch_build.build()


def test_a_compiler_without_amx_builds_the_other_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hatch_build = pytest.importorskip("hatch_build")
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text('#!/bin/sh\ncase "$*" in *-mamx*) exit 1;; esac\nexit 0\n')
    new.write_text("#!/bin/sh\nexit 0\n")
    monkeypatch.setattr(hatch_build.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(hatch_build, "_compile", lambda compiler, isa, *rest: Path(isa))
    for compiler, names in ((old, ["avx2", "avx512"]), (new, ["avx2", "avx512", "amx"])):
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        assert [str(path) for path in hatch_build.build()] == names
