"""Weights of a model as views of mapped safetensors files: pods on one host share the memory, and it is read once.

Matrices stay bfloat16 where the file has them so, also in a float32 model: products widen them exactly as they read
them, for half of the memory and of its traffic. Only what the file has in another dtype is a converted copy, and the
vectors, which are small. One rank of a tensor-parallel pod takes its rows and columns of the same views. Linears that
are quantised, or wanted in panels, come from a file of their own (packed_file.py), mapped likewise; the embedding, in
which rows are looked up, and the norms stay the checkpoint's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.checkpoint import EMBEDDING, HEAD, head_name
from engine.config_fields import CheckpointError
from engine.families import ExpertNames
from engine.model_config import ExpertsConfig, LayerConfig, ModelConfig
from engine.packed_file import PackedFile, forget, packed_file
from engine.quantization import check_quantization
from engine.shard import WHOLE, Shard
from engine.stored_tensors import StoredTensors
from kernels import panels, quantized
from kernels.decoder import MlpWeights
from kernels.linear import LinearWeights, Part, kind_of
from kernels.panels import PanelMatrix
from kernels.quantized import QuantizedMatrix

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FILE_DTYPES = ("F32", "F16", "BF16")
PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Rows:
    """The `total` output rows that a projection has in the file, and the runs of them that are wanted, in order."""

    total: int
    wanted: tuple[range, ...]


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """`router` gives one score an expert."""

    router: LinearWeights
    experts: tuple[MlpWeights, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Parts of `qkv`: query, key and value heads, or all as one. None: the family has no such norm."""

    input_norm: torch.Tensor
    qkv: LinearWeights
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: LinearWeights
    attention_output_norm: torch.Tensor | None
    mlp_input_norm: torch.Tensor
    mlp: MlpWeights | ExpertWeights
    mlp_output_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """embedding: [V, H]; with tied embeddings `head` is the same memory, unless it is quantised.

    dtype: that of everything between them.
    """

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: LinearWeights
    dtype: torch.dtype


def load_weights(
    model_dir: Path,
    config: ModelConfig,
    dtype: str,
    shard: Shard = WHOLE,
    quantization: str = "none",
    in_panels: bool = False,
) -> ModelWeights:
    """What `shard` computes with: its heads, inner columns and words; all of the embedding and of the norms.

    in_panels: linears that are not quantised lie so (kernels/panels.py). The bias after a sum over the ranks is the
    first rank's. The first load in panels or with a `quantization` takes seconds; later ones map its file. Raises
    CheckpointError when a tensor is missing, its shape is not what config.json says, or the weights cannot be
    quantised so.
    """
    check_quantization(quantization, config.quantization, str(model_dir))
    packed = packed_file(model_dir, config, quantization, in_panels)
    reader = _Reader(model_dir, TORCH_DTYPES[dtype], config.family.norm_weight_offset, packed, in_panels)
    try:
        return _load(reader, config, shard)
    except CheckpointError:
        if packed:
            forget(packed)
        raise


def _load(reader: _Reader, config: ModelConfig, shard: Shard) -> ModelWeights:
    hidden, vocab = config.hidden_size, config.vocab_size
    embedding = reader.matrix(EMBEDDING, (vocab, hidden))
    return ModelWeights(
        embedding=embedding,
        layers=tuple(
            _load_layer(reader, f"model.layers.{i}", config, layer, shard) for i, layer in enumerate(config.layers)
        ),
        final_norm=reader.norm("model.norm", hidden),
        head=_load_head(reader, embedding, config.tie_word_embeddings, shard.words(vocab)),
        dtype=reader.dtype,
    )


def _load_head(reader: _Reader, embedding: torch.Tensor, tied: bool, words: range) -> LinearWeights:
    if not reader.is_packed(HEAD) and reader.head_name(tied) == EMBEDDING:
        return LinearWeights((reader.arranged(embedding[words.start : words.stop]),))
    return reader.linear({HEAD: Rows(embedding.shape[0], (words,))}, embedding.shape[1], bias=False)


def _load_layer(reader: _Reader, prefix: str, config: ModelConfig, layer: LayerConfig, shard: Shard) -> LayerWeights:
    hidden, attention = config.hidden_size, f"{prefix}.self_attn"
    qk_norm, sandwich = config.family.qk_norm, config.family.sandwich_norms
    after_attention = f"{prefix}.post_attention_layernorm"  # of the residual stream, or of what is added to it
    return LayerWeights(
        input_norm=reader.norm(f"{prefix}.input_layernorm", hidden),
        qkv=reader.linear(_qkv_rows(attention, config, shard), hidden, config.qkv_bias),
        query_norm=reader.norm(f"{attention}.q_norm", config.head_dim) if qk_norm else None,
        key_norm=reader.norm(f"{attention}.k_norm", config.head_dim) if qk_norm else None,
        output=_load_attention_output(reader, f"{attention}.o_proj", config, shard),
        attention_output_norm=reader.norm(after_attention, hidden) if sandwich else None,
        mlp_input_norm=reader.norm(f"{prefix}.pre_feedforward_layernorm" if sandwich else after_attention, hidden),
        mlp=_load_feed_forward(reader, prefix, config, layer, shard),
        mlp_output_norm=reader.norm(f"{prefix}.post_feedforward_layernorm", hidden) if sandwich else None,
    )


def _qkv_rows(attention: str, config: ModelConfig, shard: Shard) -> dict[str, Rows]:
    """The projections that make query, key and value heads."""
    heads = shard.heads(config.num_heads, config.num_kv_heads)
    query_total, kv_total = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    query, kv = _scaled(heads.query, config.head_dim), _scaled(heads.kv, config.head_dim)
    if config.family.fused_projections:
        runs = (query, _shifted(kv, query_total), _shifted(kv, query_total + kv_total))
        return {f"{attention}.qkv_proj": Rows(query_total + 2 * kv_total, runs)}
    return {
        f"{attention}.q_proj": Rows(query_total, (query,)),
        f"{attention}.k_proj": Rows(kv_total, (kv,)),
        f"{attention}.v_proj": Rows(kv_total, (kv,)),
    }


def _load_attention_output(reader: _Reader, name: str, config: ModelConfig, shard: Shard) -> LinearWeights:
    columns = _scaled(shard.heads(config.num_heads, config.num_kv_heads).query, config.head_dim)
    return _load_summed(
        reader, name, config.hidden_size, config.num_heads * config.head_dim, columns, shard, config.output_bias
    )


def _load_summed(
    reader: _Reader, name: str, rows: int, columns: int, wanted: range, shard: Shard, bias: bool
) -> LinearWeights:
    """A linear whose outputs are added up over the ranks, each of which has some of its columns."""
    return reader.linear({name: Rows(rows, (range(rows),))}, columns, bias and shard.rank == 0, wanted)


def _load_feed_forward(
    reader: _Reader, prefix: str, config: ModelConfig, layer: LayerConfig, shard: Shard
) -> MlpWeights | ExpertWeights:
    names = config.family.experts
    if names is None or layer.experts is None:
        return _load_mlp(reader, prefix, config, shard)
    return _load_experts(reader, prefix, config, layer.experts, names, shard)


def _load_mlp(reader: _Reader, prefix: str, config: ModelConfig, shard: Shard) -> MlpWeights:
    mlp, hidden, inner = f"{prefix}.mlp", config.hidden_size, config.intermediate_size
    wanted = shard.columns(inner)
    if config.family.fused_projections:
        gate_up = {f"{mlp}.gate_up_proj": Rows(2 * inner, (wanted, _shifted(wanted, inner)))}
    else:
        gate_up = {f"{mlp}.gate_proj": Rows(inner, (wanted,)), f"{mlp}.up_proj": Rows(inner, (wanted,))}
    return MlpWeights(
        gate_up=reader.linear(gate_up, hidden, config.mlp_bias),
        down=_load_summed(reader, f"{mlp}.down_proj", hidden, inner, wanted, shard, config.mlp_bias),
    )


def _load_experts(
    reader: _Reader, prefix: str, config: ModelConfig, experts: ExpertsConfig, names: ExpertNames, shard: Shard
) -> ExpertWeights:
    block, hidden, inner = f"{prefix}.{names.block}", config.hidden_size, experts.size
    wanted = shard.columns(inner)

    def expert(index: int) -> MlpWeights:
        one = f"{block}.experts.{index}"
        rows = Rows(inner, (wanted,))
        return MlpWeights(
            gate_up=reader.linear({f"{one}.{names.gate}": rows, f"{one}.{names.up}": rows}, hidden, bias=False),
            down=_load_summed(reader, f"{one}.{names.down}", hidden, inner, wanted, shard, bias=False),
        )

    router = reader.linear({f"{block}.gate": Rows(experts.count, (range(experts.count),))}, hidden, bias=False)
    return ExpertWeights(router, tuple(expert(i) for i in range(experts.count)))


def _scaled(heads: range, head_dim: int) -> range:
    """The rows or columns of `heads`."""
    return range(heads.start * head_dim, heads.stop * head_dim)


def _shifted(run: range, offset: int) -> range:
    return range(run.start + offset, run.stop + offset)


class _Reader:
    """Finds tensors by name in a checkpoint, and in the file of its linears."""

    def __init__(
        self, model_dir: Path, dtype: torch.dtype, norm_weight_offset: float, packed: Path | None, in_panels: bool
    ) -> None:
        self._stored = StoredTensors(model_dir)
        self.dtype = dtype
        self._norm_weight_offset = norm_weight_offset
        self._packed = None if packed is None else PackedFile(packed)
        self._in_panels = in_panels

    def linear(
        self, projections: dict[str, Rows], columns: int, bias: bool, wanted_columns: range | None = None
    ) -> LinearWeights:
        """One layer from `projections` (by name without suffix), in order; of their `columns` the wanted, or all."""
        wanted = range(columns) if wanted_columns is None else wanted_columns
        parts = [
            self._part(name, (rows.total, columns), run, wanted)
            for name, rows in projections.items()
            for run in _joined(rows.wanted)
        ]
        if len(set(map(kind_of, parts))) > 1:
            parts = [self.arranged(_widened(part, self.dtype)) for part in parts]
        biases = [
            self.vector(f"{name}.bias", rows.total)[run.start : run.stop]
            for name, rows in projections.items()
            for run in (rows.wanted if bias else ())
        ]
        return LinearWeights(tuple(parts), torch.cat(biases) if biases else None)

    def is_packed(self, name: str) -> bool:
        """Whether linear `name` is quantised, or in panels already."""
        return self._packed is not None and name in self._packed

    def head_name(self, tied: bool) -> str:
        """The tensor that is the head where it is not packed."""
        return head_name(self._stored.entries, tied)

    def arranged(self, matrix: torch.Tensor) -> Part:
        """`matrix` as a linear wants it."""
        return panels.pack(matrix) if self._in_panels else matrix

    def _part(self, name: str, shape: tuple[int, int], rows: range, columns: range) -> Part:
        """These rows and columns of linear `name`."""
        if self._packed is None or name not in self._packed:
            return self.arranged(self._block(f"{name}.weight", shape, rows, columns))
        if f"{name}.weight" in self._stored.entries:
            self._check_shape(f"{name}.weight", shape)
        whole = self._packed.matrix(name, shape)
        if isinstance(whole, torch.Tensor):
            return self.arranged(self._cut(whole, rows, columns))
        try:
            matrix = _sliced(whole, rows, columns)
        except ValueError as error:
            raise CheckpointError(f"{self._stored.model_dir}: {name} cannot be shared among ranks: {error}") from None
        _fetch_pages(matrix.packed)
        return matrix

    def matrix(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        """A view of the mapped file when it has our dtype or bfloat16, else a converted copy."""
        return self._block(name, shape, range(shape[0]), range(shape[1]))

    def _block(self, name: str, shape: tuple[int, int], rows: range, columns: range) -> torch.Tensor:
        """As `matrix`, of these rows and columns alone."""
        return self._cut(self._tensor(name, shape), rows, columns)

    def _cut(self, whole: torch.Tensor, rows: range, columns: range) -> torch.Tensor:
        """These rows and columns: a view when they have our dtype or bfloat16, else a converted copy."""
        tensor = whole[rows.start : rows.stop, columns.start : columns.stop]
        tensor = tensor if tensor.dtype == torch.bfloat16 else tensor.to(self.dtype)
        _fetch_pages(tensor)
        return tensor

    def vector(self, name: str, size: int) -> torch.Tensor:
        return self._tensor(name, (size,)).to(self.dtype)

    def norm(self, name: str, size: int) -> torch.Tensor:
        """The factors of an RMSNorm, with the family's offset added in float32."""
        weight = self._tensor(f"{name}.weight", (size,))
        return (weight.float() + self._norm_weight_offset).to(self.dtype)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A view of the mapped file."""
        stored, entry = self._stored, self._stored.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{stored.model_dir}: weight {name} is missing, though config.json calls for it")
        self._check_shape(name, shape)
        if entry.dtype not in FILE_DTYPES:
            allowed = ", ".join(FILE_DTYPES)
            raise CheckpointError(f"{stored.file(name)}: {name} is {entry.dtype}: weights must be {allowed}")
        return stored.tensor(name)

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Of a tensor that is stored, also where what is read is made of it: the file to mend is the checkpoint's."""
        found = self._stored.entries[name].shape
        if found != shape:
            raise CheckpointError(f"{self._stored.file(name)}: {name} has shape {found}, config.json calls for {shape}")


def _sliced(matrix: PanelMatrix | QuantizedMatrix, rows: range, columns: range) -> PanelMatrix | QuantizedMatrix:
    if isinstance(matrix, PanelMatrix):
        return panels.sliced(matrix, rows, columns)
    return quantized.sliced(matrix, rows, columns)


def _widened(part: Part, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(part, QuantizedMatrix):
        return quantized.dequantized(part).to(dtype)
    return (panels.unpacked(part) if isinstance(part, PanelMatrix) else part).to(dtype)


def _joined(runs: tuple[range, ...]) -> list[range]:
    """Runs that follow each other become one."""
    joined = [runs[0]]
    for run in runs[1:]:
        if run.start == joined[-1].stop:
            joined[-1] = range(joined[-1].start, run.stop)
        else:
            joined.append(run)
    return joined


def _fetch_pages(matrix: torch.Tensor) -> None:
    """Reads one byte of each page, so that loading waits for the disk rather than the first request."""
    matrix.view(torch.uint8).flatten(1)[:, ::PAGE_BYTES].sum()
