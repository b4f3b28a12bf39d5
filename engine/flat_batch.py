"""The tokens of one step, of many sequences, laid one after the other without padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """T tokens: first one each of B decode sequences, then the runs of S prefill sequences.

    token_ids, positions, slot_mapping: int64 [T]; a slot is block * block_size + offset.
    sample_rows: int64 [R], the tokens whose logits are wanted.
    Decode: block_tables int32 [B, M], context_lens int32 [B]. Prefill: the same with S, and cu_seqlens int32 [S + 1],
    which count from the first prefill token. Context lengths include the tokens of this step.
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

    @property
    def num_decodes(self) -> int:
        return self.decode_context_lens.shape[0]

    @property
    def num_prefills(self) -> int:
        return self.prefill_context_lens.shape[0]
