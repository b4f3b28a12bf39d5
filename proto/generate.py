"""Generates the Python of the `.proto` files: `python -m proto.generate [--check]`.

Messages, gRPC stubs and their type stubs are committed, so that nothing but protobuf and grpcio is needed to run.
`--check` exits with 1 and names the files when the committed ones are out of step.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def generate(out: Path) -> None:
    sources = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "proto").glob("*.proto"))
    plugins = {"python": "", "grpc_python": "", "mypy": "quiet:", "mypy_grpc": "quiet:"}
    targets = [f"--{plugin}_out={options}{out}" for plugin, options in plugins.items()]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}", *targets, *sources], cwd=ROOT, check=True)
    for path in (out / "proto").glob("*_pb2_grpc.py"):
        source = (ROOT / "proto" / f"{path.stem.removesuffix('_pb2_grpc')}.proto").read_text()
        if not re.search(r"^service ", source, re.MULTILINE):
            path.unlink()
            path.with_suffix(".pyi").unlink(missing_ok=True)


def out_of_step() -> list[str]:
    with tempfile.TemporaryDirectory() as tmp:
        generate(Path(tmp))
        fresh = {p.name: p.read_bytes() for g in GENERATED for p in (Path(tmp) / "proto").glob(g)}
    committed = {p.name: p.read_bytes() for g in GENERATED for p in (ROOT / "proto").glob(g)}
    return sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare with the committed files")
    if parser.parse_args().check:
        stale = out_of_step()
        print(f"out of step with their .proto: {', '.join(stale)}; run `make proto`" if stale else "stubs in step")
        return 1 if stale else 0
    generate(ROOT)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
