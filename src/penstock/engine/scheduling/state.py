"""The scheduler's state, which admission, preemption and planning share."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.options import SchedulerOptions

from ..kv.block_pool import BlockPool
from ..kv.cache_manager import KVCacheManager
from .encoder_cache import EncoderCache
from .running import RunningBatch
from .sequence_group import SequenceGroup
from .step_builder import StepBuilder
from .waiting import WaitingQueue


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """Sequences that have not ended, and what they take of the workers."""

    options: SchedulerOptions
    device_pool: BlockPool
    """Blocks of the KV cache."""
    kv: KVCacheManager
    waiting: WaitingQueue
    running: RunningBatch
    groups: dict[str, SequenceGroup]
    """Sequences of each request that has not ended, by its id."""
    encoder_cache: EncoderCache
    builder: StepBuilder
    """Builds the workers' messages from plans."""
