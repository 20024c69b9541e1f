"""Tensor and pipeline parallelism: which part of the model a rank computes, and how ranks exchange their results."""

from .group import SINGLE_RANK, Group, RankFailedError, Shard, SingleRank, shard_heads, shard_outputs
from .pipeline import SINGLE_STAGE, PipelineStage
