"""Runs the builds of the CPU kernels that this machine's processor cannot execute, in an emulator: `make emulate`.

Bochs emulates a Sapphire Rapids Xeon, whose AVX-512, AVX512-BF16 and AMX the kernels are compiled for. Bochs 3.0 lacks
what Linux wants before it gives AMX to a process, so nothing runs underneath: boot.S switches the processor on,
driver.cpp calls each build's ops over odd shapes and compares with the portable build's results, and the report leaves
by the serial port. It says whether results are right; an emulator's speed says nothing about a processor's.

On Debian: apt-get install bochs bochs-term xorriso isolinux syslinux-common g++. Where Bochs is too old (before 3.0),
unpack the packages of a newer release with all they depend on (dpkg -x) into a folder and name it: ARGS="--root DIR".

`python -m tests.kernels.emulated` compiles, boots and prints the report; status 1 when any result is wrong.
"""

from __future__ import annotations

import argparse
import os
import pty
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kernels.cpu import build as builder

_HERE = Path(__file__).parent
_REPOSITORY = _HERE.parents[2]
_ISAS = ("baseline", "avx512", "avx512bf16", "amx")
_FREESTANDING = (
    "-fno-pic",
    "-fno-pie",
    "-fno-stack-protector",
    "-fcf-protection=none",
    "-fno-exceptions",
    "-fno-asynchronous-unwind-tables",
)
_END = "the end\n"
_LIBRARIES = "usr/lib/x86_64-linux-gnu"
_BOOT_FILES = ("ISOLINUX/isolinux.bin", *(f"syslinux/modules/bios/{n}.c32" for n in ("ldlinux", "libcom32", "mboot")))
_BOOT_MENU = "default all\nprompt 0\ntimeout 0\nlabel all\nkernel mboot.c32\nappend program.bin\n"
_SETTINGS = """\
display_library: term
config_interface: textconfig
megs: 512
cpu: model=sapphire_rapids, count=1, ips=50000000, reset_on_triple_fault=0
romimage: file={share}/BIOS-bochs-latest
vgaromimage: file={share}/VGABIOS-lgpl-latest
ata0-master: type=cdrom, path=boot.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=serial.txt
clock: sync=none
log: bochs.log
panic: action=fatal
"""


class CannotRun(RuntimeError):
    """Something is missing or failed; the message says what."""


def emulate(root: Path, timeout_s: float) -> str:
    """The report of one run. root: where the packages' usr/ lies. Raises CannotRun."""
    for path in (root / "usr/bin/bochs-bin", *(root / "usr/lib" / name for name in _BOOT_FILES)):
        if not path.exists():
            raise CannotRun(f"{path} does not exist: install what --help lists")
    with tempfile.TemporaryDirectory(prefix="emulated-") as scratch:
        folder = Path(scratch)
        _write_disc(root, _compile(folder), folder)
        return _boot(root, folder, timeout_s)


def _compile(folder: Path) -> Path:
    compiler = builder._find_compiler()
    if compiler is None:
        raise CannotRun("no C++ compiler on PATH")
    common = [compiler, *(flag for flag in builder._FLAGS if flag != "-fPIC"), *_FREESTANDING, f"-I{_REPOSITORY}", "-c"]
    sources = {isa: [*builder._levels()[isa], f"-DISA={isa}", str(builder._SOURCES / "kernels.cpp")] for isa in _ISAS}
    sources |= {name: [str(_HERE / name)] for name in ("boot.S", "driver.cpp")}
    commands = [[*common, *arguments, "-o", str(folder / f"{name}.o")] for name, arguments in sources.items()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_run, commands))
    linked, program = folder / "program.elf", folder / "program.bin"
    objects = [str(folder / f"{name}.o") for name in sources]
    _run(["ld", "-static", "--no-warn-rwx-segments", "-T", str(_HERE / "link.ld"), *objects, "-o", str(linked)])
    _run(["objcopy", "-O", "binary", str(linked), str(program)])
    return program


def _write_disc(root: Path, program: Path, folder: Path) -> None:
    disc = folder / "disc"
    disc.mkdir()
    shutil.copy(program, disc)
    for name in _BOOT_FILES:
        shutil.copy(root / "usr/lib" / name, disc)
    (disc / "isolinux.cfg").write_text(_BOOT_MENU)
    boot = ["-b", "isolinux.bin", "-c", "boot.cat", "-no-emul-boot", "-boot-load-size", "4", "-boot-info-table"]
    image = str(folder / "boot.iso")
    _run([*_program(root, "xorriso"), "-as", "mkisofs", "-quiet", "-o", image, *boot, str(disc)])


def _boot(root: Path, folder: Path, timeout_s: float) -> str:
    share, report = root / "usr/share/bochs", folder / "serial.txt"
    (folder / "bochsrc").write_text(_SETTINGS.format(share=share))
    plugins = root / _LIBRARIES / "bochs/plugins"
    environment = os.environ | {"LTDL_LIBRARY_PATH": str(plugins), "BXSHARE": str(share), "TERM": "xterm"}
    ours, its = pty.openpty()  # its screen, which it insists on
    with subprocess.Popen(
        [*_program(root, "bochs-bin"), "-q", "-f", "bochsrc"],
        cwd=folder,
        env=environment,
        stdin=its,
        stdout=its,
        stderr=its,
        start_new_session=True,
    ) as emulator:
        os.close(its)
        threading.Thread(target=_drain, args=(ours,), daemon=True).start()
        try:
            deadline = time.monotonic() + timeout_s
            while time.monotonic() < deadline:
                running = emulator.poll() is None
                text = report.read_text() if report.exists() else ""
                if text.endswith(_END):
                    return text
                if not running:
                    break
                time.sleep(0.2)
        finally:
            emulator.kill()
    log = (folder / "bochs.log").read_text()[-2000:]
    raise CannotRun(
        f"no report within {timeout_s} s, or an exception of the processor. The report so far:\n{text}\n{log}"
    )


def _drain(terminal: int) -> None:
    try:
        while os.read(terminal, 1 << 16):
            continue
    except OSError:
        os.close(terminal)


def _program(root: Path, name: str) -> list[str]:
    """Started by its own system's loader, which need not be this one's."""
    libraries = root / _LIBRARIES
    return [str(libraries / "ld-linux-x86-64.so.2"), "--library-path", str(libraries), str(root / "usr/bin" / name)]


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise CannotRun(f"{' '.join(command)}\nfailed with status {result.returncode}:\n{result.stderr}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.kernels.emulated",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--root", type=Path, default=Path("/"), help="where Bochs's packages are unpacked (default: /)")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="of the emulated run (default: 900)")
    arguments = parser.parse_args()
    try:
        report = emulate(arguments.root.resolve(), arguments.timeout_s)
    except CannotRun as error:
        print(error, file=sys.stderr)
        return 1
    print(report, end="")
    return 0 if "\nall right\n" in report else 1


if __name__ == "__main__":
    sys.exit(main())
