"""Compiles the CPU kernels into the user's cache directory: `python -m kernels.cpu.build`.

One shared library holds a build for each x86-64 level and chooses among them when loaded, so it may be copied between
machines; other processors get the portable build alone. It links to nothing but libc. Its name carries a hash of the
sources and one of the compiler's version, and it appears by an atomic rename, so processes may build at the same time.
A machine without a compiler uses any library that was built from the same sources (a container image, say).
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_SOURCES = Path(__file__).parent
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
    "-Werror",
)
_LINK_FLAGS = ("-shared", "-Wl,--as-needed", "-Wl,-z,defs")
_BASELINE: dict[str, tuple[str, ...]] = {"baseline": ()}
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mbmi2")
_AVX512_BF16 = (*_AVX512, "-mavx512bf16", "-mavx512vnni", "-DBASE_OPS=ops_avx512")
_X86_LEVELS: dict[str, tuple[str, ...]] = {
    "avx2": ("-mavx2", "-mfma", "-mf16c", "-mbmi2"),
    "avx512": _AVX512,
    "avx512bf16": _AVX512_BF16,
    "amx": (*_AVX512_BF16, "-DHAVE_AMX"),
}
_ELF_HEADER = struct.Struct("<4s36xQ10xHH2x")  # magic; where the section headers are, which come last; size and number


class CompilerMissing(RuntimeError):
    """No C++ compiler was found, and no library built earlier either."""


class BuildFailed(RuntimeError):
    """The compiler refused our sources, or their library has no place; the message carries what was said."""


def build() -> Path:
    """The library's path, compiled first where it does not exist yet or is cut short (some 15 s).

    Raises CompilerMissing or BuildFailed, whose messages say what to do.
    """
    directory = cache_directory()
    compiler = _find_compiler()
    if compiler is None:
        return _built_elsewhere(directory)
    target = directory / f"kernels-{_source_key()}-{_compiler_key(compiler)}.so"
    if not _is_whole(target):
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _compile(compiler, target)
        except OSError as error:
            raise BuildFailed(
                f"cannot write the CPU kernels' library to {target}: {error}; "
                "XDG_CACHE_HOME may name a directory that can be written"
            ) from error
    return target


def _is_whole(library: Path) -> bool:
    """Whether it reaches as far as its ELF header says: one that is cut short kills the process that runs it."""
    if not library.is_file():
        return False
    with library.open("rb") as file:
        header = file.read(_ELF_HEADER.size)
        size = file.seek(0, os.SEEK_END)
    if len(header) < _ELF_HEADER.size:
        return False
    magic, sections_at, section_bytes, num_sections = _ELF_HEADER.unpack(header)
    whole: bool = magic == b"\x7fELF" and sections_at + section_bytes * num_sections <= size
    return whole


def cache_directory() -> Path:
    """Where libraries go: pdserve/kernels in $XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "pdserve" / "kernels"


def _find_compiler() -> str | None:
    """$CXX, which must exist when set, or the first known compiler on the path."""
    chosen = os.environ.get("CXX")
    if chosen:
        found = shutil.which(chosen)
        if found is None:
            raise CompilerMissing(f"CXX={chosen} is not an executable. Unset it or name a C++17 compiler.")
        return found
    return next(filter(None, map(shutil.which, _COMPILERS)), None)


def _built_elsewhere(directory: Path) -> Path:
    for path in sorted(directory.glob(f"kernels-{_source_key()}-*.so")):
        if _is_whole(path):
            return path
    raise CompilerMissing(
        "The CPU kernels need a C++ compiler (c++, g++ or clang++ on PATH, or CXX). "
        "Install one (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++) "
        "and run `python -m kernels.cpu.build`."
    )


def _compile(compiler: str, target: Path) -> None:
    levels = _levels()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as scratch:
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # each waits for a compiler of its own
            objects = list(pool.map(lambda isa: _compile_level(compiler, isa, levels[isa], Path(scratch)), levels))
        library = Path(scratch) / "kernels.so"
        dispatch = ["-DHAVE_X86_LEVELS"] if len(levels) > 1 else []
        sources = [str(_SOURCES / "dispatch.cpp"), *map(str, objects)]
        _run([compiler, *_FLAGS, *dispatch, *sources, *_LINK_FLAGS, "-o", str(library)])
        _write_through(library)
        library.replace(target)


def _write_through(file: Path) -> None:
    """To the disk: after a crash a name that has lost its bytes would be loaded, and never be built again."""
    with file.open("rb") as f:
        os.fsync(f.fileno())


def _compile_level(compiler: str, isa: str, flags: tuple[str, ...], scratch: Path) -> Path:
    target = scratch / f"{isa}.o"
    _run([compiler, *_FLAGS, *flags, f"-DISA={isa}", "-c", str(_SOURCES / "kernels.cpp"), "-o", str(target)])
    return target


def _levels() -> dict[str, tuple[str, ...]]:
    return _BASELINE | (_X86_LEVELS if platform.machine() in ("x86_64", "AMD64") else {})


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildFailed(f"{' '.join(command)}\nfailed with status {result.returncode}:\n{result.stderr}")


def _source_key() -> str:
    digest = hashlib.sha256(repr((_FLAGS, _LINK_FLAGS, _levels(), platform.machine())).encode())
    for path in sorted([*_SOURCES.glob("*.cpp"), *_SOURCES.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _compiler_key(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    return hashlib.sha256(version.encode()).hexdigest()[:16]


def main() -> int:
    """Builds, prints the library's path; on failure one message and status 1."""
    try:
        print(build())
    except (CompilerMissing, BuildFailed) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
