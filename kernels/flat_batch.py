"""The tokens of one step, of many sequences, laid one after the other without padding."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from kernels.checks import check_context, check_dtype, check_shape


@dataclass(frozen=True, slots=True, eq=False)
class FlatBatch:
    """T tokens: first one each of B decode sequences, then the runs of S prefill sequences.

    token_ids, positions, slot_mapping: int64 [T]; a slot is block * block_size + offset.
    sample_rows: int64 [R], the tokens whose logits are wanted.
    Decode: block_tables int32 [B, M], context_lens int32 [B]. Prefill: the same with S, and cu_seqlens int32 [S + 1],
    which count from the first prefill token. Context lengths include the tokens of this step. All are contiguous.
    Checked once, here, and used for every layer: raises ValueError or TypeError for shapes and dtypes.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    sample_rows: torch.Tensor
    decode_block_tables: torch.Tensor
    decode_context_lens: torch.Tensor
    prefill_block_tables: torch.Tensor
    prefill_context_lens: torch.Tensor
    prefill_cu_seqlens: torch.Tensor

    def __post_init__(self) -> None:
        check_context(self.decode_block_tables, self.decode_context_lens, self.num_decodes)
        check_context(self.prefill_block_tables, self.prefill_context_lens, self.num_prefills)
        check_shape("prefill_cu_seqlens", self.prefill_cu_seqlens, (self.num_prefills + 1,))
        check_dtype("prefill_cu_seqlens", self.prefill_cu_seqlens, torch.int32)
        for name in ("token_ids", "positions", "slot_mapping"):
            check_shape(name, getattr(self, name), (self.num_tokens,))
        for name in ("token_ids", "positions", "slot_mapping", "sample_rows"):
            check_dtype(name, getattr(self, name), torch.int64)
        if self.num_decodes > self.num_tokens:
            raise ValueError(f"decode_context_lens has {self.num_decodes} entries for {self.num_tokens} tokens")
        for field in fields(self):
            if not getattr(self, field.name).is_contiguous():
                raise ValueError(f"{field.name} is not contiguous")

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_decodes(self) -> int:
        return self.decode_context_lens.shape[0]

    @property
    def num_prefills(self) -> int:
        return self.prefill_context_lens.shape[0]
