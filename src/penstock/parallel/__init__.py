"""Tensor and pipeline parallelism: partition of the model among ranks, and communication between ranks."""

from .group import SINGLE_RANK, Group, RankFailedError, Shard, SingleRank, shard_heads, shard_outputs
from .pipeline import SINGLE_STAGE, PipelineStage
