from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu import build as builder
from kernels.cpu.build import BuildFailed, CompilerMissing, build, cache_directory

BUILT = b"\x7fELF".ljust(64, b"\0")  # a library without sections


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "pdserve" / "kernels"


@pytest.fixture
def fake_compiler(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for c++: writes its last argument and logs each call; FAKE_VERSION is its --version."""
    path = tmp_path / "bin" / "c++"
    path.parent.mkdir()
    path.write_text(
        f"#!{sys.executable}\n"
        "import os, pathlib, sys\n"
        "if '--version' in sys.argv: print(os.environ['FAKE_VERSION']); sys.exit()\n"
        f"with open({str(tmp_path / 'calls')!r}, 'a') as log: print(*sys.argv[1:], file=log)\n"
        "if os.environ.get('FAKE_ERROR'): sys.exit(os.environ['FAKE_ERROR'])\n"
        f"pathlib.Path(sys.argv[-1]).write_bytes({BUILT!r})\n"
    )
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    monkeypatch.setenv("FAKE_VERSION", "1.0")
    return tmp_path / "calls"


def calls(log: Path) -> int:
    return len(log.read_text().splitlines())


def test_cache_directory_follows_xdg(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_directory() == empty_cache
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "pdserve" / "kernels"


def test_builds_once(empty_cache: Path, fake_compiler: Path) -> None:
    first = build()
    count = calls(fake_compiler)
    assert build() == first
    assert first.read_bytes() == BUILT
    assert calls(fake_compiler) == count
    assert list(empty_cache.iterdir()) == [first]  # no scratch stays


@pytest.mark.parametrize(
    "damage", [b"", BUILT[:-1], bytes(64), BUILT[:41] + b"\x01" + BUILT[42:]], ids=["empty", "short", "zeros", "cut"]
)
def test_a_damaged_library_is_built_again(fake_compiler: Path, damage: bytes) -> None:
    library = build()
    count = calls(fake_compiler)
    library.write_bytes(damage)
    assert build() == library
    assert library.read_bytes() == BUILT
    assert calls(fake_compiler) == 2 * count


def test_another_compiler_version_builds_again(
    empty_cache: Path, fake_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build()
    monkeypatch.setenv("FAKE_VERSION", "2.0")
    assert build() != first
    assert len(list(empty_cache.iterdir())) == 2


def test_other_sources_build_again(
    empty_cache: Path, fake_compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build()
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "kernels.cpp").write_text("int changed;")
    monkeypatch.setattr(builder, "_SOURCES", sources)
    assert build() != first


@pytest.mark.parametrize(("machine", "objects"), [("x86_64", 5), ("aarch64", 1)])
def test_every_x86_level_is_built_and_other_processors_get_the_portable_build(
    empty_cache: Path, fake_compiler: Path, monkeypatch: pytest.MonkeyPatch, machine: str, objects: int
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    build()
    log = fake_compiler.read_text()
    assert log.count(" -c ") == objects
    assert ("-mavx2" in log) == ("HAVE_X86_LEVELS" in log) == (machine == "x86_64")


@pytest.mark.usefixtures("fake_compiler")
def test_a_failed_build_says_what_the_compiler_said_and_leaves_nothing(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_ERROR", "kernels.cpp:1: error: no such thing")
    with pytest.raises(BuildFailed, match="error: no such thing"):
        build()
    assert list(empty_cache.iterdir()) == []


@pytest.mark.usefixtures("fake_compiler")
def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a file"
    file.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    with pytest.raises(BuildFailed, match=r"cannot write .*a file/pdserve/kernels/.*XDG_CACHE_HOME may name"):
        build()


@pytest.mark.usefixtures("empty_cache")
def test_no_compiler_names_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompilerMissing, match=r"apt-get install g\+\+.*python -m kernels.cpu.build"):
        build()


@pytest.mark.usefixtures("empty_cache")
def test_a_cxx_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompilerMissing, match="CXX=no-such-compiler is not an executable"):
        build()


def test_without_a_compiler_an_earlier_library_serves(
    empty_cache: Path, fake_compiler: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    built = build()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build() == built
    assert fake_compiler.exists()
    assert empty_cache in built.parents


def test_command_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert builder.main() == 0
    assert Path(capsys.readouterr().out.strip()).exists()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert builder.main() == 1
    assert "no-such-compiler" in capsys.readouterr().err


def test_sources_keep_their_functions_to_themselves() -> None:
    """Each build exports its table alone: a function the linker could merge would run on the wrong processor."""
    for header in Path(builder.__file__).parent.glob("*.h"):
        if header.name != "ops.h":
            assert "namespace {" in header.read_text(), header.name


def test_exports_only_the_interface() -> None:
    symbols = subprocess.run(["nm", "-D", "--defined-only", build()], capture_output=True, text=True, check=True).stdout
    assert {line.split()[-1] for line in symbols.splitlines()} == {"pdserve_ops", "pdserve_use_pool"}
