"""State of the scheduler, shared by admission, preemption and planning."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.options import SchedulerOptions

from ..kv.block_pool import BlockPool
from ..kv.cache_manager import KVCacheManager
from ..kv.swap_space import SwapSpace
from .encoder_cache import EncoderCache
from .running import RunningBatch
from .sequence_group import SequenceGroup
from .step_builder import StepBuilder
from .waiting import WaitingQueue


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """Unfinished sequences, and the resources that they use."""

    options: SchedulerOptions
    device_pool: BlockPool
    """Blocks of the KV cache."""
    swap_space: SwapSpace | None
    """Host memory of preempted sequences; None without swapping."""
    kv: KVCacheManager
    waiting: WaitingQueue
    running: RunningBatch
    groups: dict[str, SequenceGroup]
    """Sequences of each unfinished request, by request id."""
    encoder_cache: EncoderCache
    builder: StepBuilder
    """Builds the workers' messages from plans."""
