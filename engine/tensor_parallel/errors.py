"""What goes wrong between the processes of one pod."""

from __future__ import annotations


class RankLost(Exception):
    """Another rank of this pod has ended or does not answer."""
