"""Tensor parallelism: which part of each matrix a rank computes, and how ranks exchange what they have computed."""

from .group import SINGLE_RANK, Group, RankFailedError, Shard, SingleRank, shard_heads, shard_outputs

__all__ = ["SINGLE_RANK", "Group", "RankFailedError", "Shard", "SingleRank", "shard_heads", "shard_outputs"]
