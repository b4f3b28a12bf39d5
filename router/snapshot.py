"""What the router knows of the cluster at one moment: a frozen value that a routing decision is made from.

A `PodView` is a pod's own record (up to a heartbeat old) with the router's corrections: work that this router placed
on the pod, or took off it, since the record was made. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from proto import kv_pb2, registry_pb2

PREFILL = registry_pb2.ROLE_PREFILL
DECODE = registry_pb2.ROLE_DECODE

PodKey = tuple[str, str]  # pod id, epoch

# Field of KVLayout -> value, in the order in which a difference is reported. The fingerprint is derived, so left out.
Layout = tuple[tuple[str, str | int], ...]


def layout_fields(message: kv_pb2.KVLayout) -> Layout:
    names = (field.name for field in message.DESCRIPTOR.fields)
    return tuple((name, getattr(message, name)) for name in names if name != "fingerprint")


def layout_difference(ours: Layout, theirs: Layout) -> str | None:
    """The first field that keeps two pods from exchanging blocks, as `block_size 16 != 32`; None when none does."""
    for (name, a), (_, b) in zip(ours, theirs, strict=True):
        if a != b:
            return f"{name} {a} != {b}"
    return None


@dataclass(frozen=True, slots=True)
class Correction:
    """Work placed on a pod (or, negative, taken off it) that its last heartbeat does not show."""

    num_sequences: int = 0
    num_tokens: int = 0  # prompt tokens to compute
    num_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """One pod. Loads are the pod's own plus the router's correction; never negative."""

    pod_id: str
    epoch: str
    role: registry_pb2.Role.ValueType
    address: str
    token_address: str  # of a decode pod's token streams
    draining: bool
    reachable: bool  # the router can talk to it; a decode pod's token stream is up
    model_id: str
    max_model_len: int
    layout: Layout
    fingerprint: str
    block_size: int
    max_num_seqs: int
    num_sequences: int  # that have a place or wait for one; those whose KV is to come have one
    num_waiting_tokens: int  # prompt tokens still to compute
    num_free_blocks: int
    num_blocks: int
    step_s: float  # 0: nothing measured yet
    prefill_tokens_per_s: float  # likewise

    @property
    def key(self) -> PodKey:
        return self.pod_id, self.epoch

    def corrected(self, correction: Correction, *, reachable: bool) -> PodView:
        return replace(
            self,
            reachable=reachable,
            num_sequences=max(0, self.num_sequences + correction.num_sequences),
            num_waiting_tokens=max(0, self.num_waiting_tokens + correction.num_tokens),
            num_free_blocks=min(self.num_blocks, max(0, self.num_free_blocks - correction.num_blocks)),
        )

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @property
    def computes(self) -> tuple[str, str, str, str]:
        """Model, weights and dtypes: pods that agree in these continue one another's answers."""
        layout = dict(self.layout)
        return self.model_id, str(layout["weights_revision"]), str(layout["dtype"]), str(layout["kv_dtype"])


def pod_view(record: registry_pb2.PodRecord) -> PodView:
    """The record as it stands. Raises ValueError for one that no pod of this release can have written."""
    load, layout = record.load, record.layout
    if record.role not in (PREFILL, DECODE) or layout.block_size < 1 or load.num_blocks < 1:
        given = f"role {record.role}, block_size {layout.block_size}, num_blocks {load.num_blocks}"
        raise ValueError(f"pod {record.pod_id!r}: {given}: the role must be known and the sizes at least 1")
    if record.role == DECODE and not record.token_address:
        raise ValueError(f"pod {record.pod_id!r}: a decode pod without token_address: is it of another release?")
    return PodView(
        pod_id=record.pod_id,
        epoch=record.epoch,
        role=record.role,
        address=record.address,
        token_address=record.token_address,
        draining=record.state != registry_pb2.POD_STATE_READY,
        reachable=True,
        model_id=record.model_id,
        max_model_len=record.max_model_len,
        layout=layout_fields(layout),
        fingerprint=layout.fingerprint,
        block_size=layout.block_size,
        max_num_seqs=record.max_num_seqs,
        num_sequences=load.num_waiting + load.num_running + load.num_credits + load.num_transfers,
        num_waiting_tokens=load.num_waiting_tokens,
        num_free_blocks=load.num_free_blocks,
        num_blocks=load.num_blocks,
        step_s=load.step_s,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
    )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All pods of the served model, in order of pod id."""

    pods: tuple[PodView, ...] = ()

    def __iter__(self) -> Iterator[PodView]:
        return iter(self.pods)

    def of_role(self, role: registry_pb2.Role.ValueType) -> tuple[PodView, ...]:
        return tuple(pod for pod in self.pods if pod.role == role)
