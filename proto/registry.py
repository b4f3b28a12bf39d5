"""Where pod records lie in the registry. The record itself is `registry.proto`'s PodRecord."""

from __future__ import annotations

EXPIRY_INTERVALS = 3  # a record of which so many heartbeats were missed is that of a lost pod


def pod_key(cluster: str, pod_id: str) -> str:
    return f"pdserve:{cluster}:pod:{pod_id}"


def pod_pattern(cluster: str) -> str:
    """A SCAN pattern that matches every pod of `cluster`."""
    return f"pdserve:{cluster}:pod:*"
