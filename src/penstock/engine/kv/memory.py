"""Number of KV blocks on the device and in host memory."""

from __future__ import annotations

from typing import NamedTuple

from penstock.config.options import EngineOptions
from penstock.core.errors import invalid
from penstock.planning.host_memory import FREE_SHARE, free_host_bytes
from penstock.planning.kv_size import blocks_of_sequences

from ..step import MemoryProfile

SNAPSHOT_SHARE = 0.25
"""Largest share of the free memory for snapshots of recurrent states."""
SNAPSHOTS_PER_SEQUENCE = 4
"""Largest number of snapshots for each running sequence."""


def count_blocks(options: EngineOptions, profile: MemoryProfile, max_len: int) -> int:
    """Number of KV blocks on the device: ``num_gpu_blocks_override``, or as many as the memory options allow.

    Args:
        max_len: maximum number of tokens of a sequence.

    Raises ``PenstockError`` (``invalid``) if no block fits, or fewer than ``kv_cache_sequences`` sequences fit, or the
    host tier of the prefix cache does not fit.
    """
    if (tier := options.host_tier_bytes) > (free := free_host_bytes()):
        message = f"{tier / 2**30:.1f} GiB do not fit into the {free / 2**30:.1f} GiB of free host memory; lower it"
        raise invalid("kv_offloading_size", message, free / 2**30)
    if options.num_gpu_blocks_override:
        return options.num_gpu_blocks_override
    size = profile.block_bytes
    if not size:  # no layer has keys and values
        return blocks_of_sequences(2 * options.max_num_seqs, max_len, options.block_size)
    sequences = 0.0 if options.kv_cache_memory_bytes else options.kv_cache_sequences
    share = options.kv_cache_free_memory_fraction
    if options.kv_cache_memory_bytes:
        room = options.kv_cache_memory_bytes
    elif profile.total:  # a GPU
        unused = (1 - options.gpu_memory_utilization) * profile.total
        room = int(profile.free * share if share else profile.free - unused)
    else:
        swapped = swap_sizes(options, profile).bytes
        offloaded = options.host_tier_bytes // (options.tensor_parallel_size * options.pipeline_parallel_size)
        room = int(profile.free * (1.0 if sequences else share or FREE_SHARE)) - swapped - offloaded
        if room < size <= room + offloaded:
            message = f"takes {offloaded / 1e9:.2f} GB of the {(room + offloaded) / 1e9:.2f} GB that are available for "
            raise invalid("kv_offloading_size", f"{message}KV blocks and offloading together; lower it")
    if not options.kv_cache_memory_bytes:
        room -= count_snapshots(options, profile) * profile.state_bytes
    if room < size:
        advice = "raise it" if options.kv_cache_memory_bytes else "free memory"
        message = f"one KV block takes {size} bytes, but only {max(room, 0)} bytes are available; {advice}"
        raise invalid("kv_cache_memory_bytes", message)
    if not sequences:
        return room // size
    blocks = blocks_of_sequences(sequences, max_len, options.block_size)
    if blocks * size > room:
        limit = room // size * options.block_size / max_len
        message = f"{sequences:g} sequences of {max_len} tokens take {blocks * size / 1e9:.2f} GB, but only "
        message += f"{room / 1e9:.2f} GB are available; at most {limit:.1f} fit"
        raise invalid("kv_cache_sequences", message, limit)
    return blocks


def count_snapshots(options: EngineOptions, profile: MemoryProfile) -> int:
    """Number of snapshots of recurrent states: ``num_state_snapshots``, or as many as ``SNAPSHOT_SHARE`` of the free
    memory holds, at most ``SNAPSHOTS_PER_SEQUENCE`` for each running sequence."""
    if not profile.state_bytes or not (options.enable_prefix_caching or options.role != "mixed"):
        return 0
    if options.num_state_snapshots >= 0:
        return options.num_state_snapshots
    fitting = int(profile.free * SNAPSHOT_SHARE) // profile.state_bytes
    return min(fitting, SNAPSHOTS_PER_SEQUENCE * options.max_num_seqs)


class SwapSizes(NamedTuple):
    """Sizes of the swap space of a rank."""

    blocks: int
    """Number of KV blocks."""
    states: int
    """Number of recurrent states; 0 for models without such states."""
    bytes: int
    """Bytes of blocks and states."""


def swap_sizes(options: EngineOptions, profile: MemoryProfile) -> SwapSizes:
    """Sizes for ``swap_space`` with ``preemption_mode`` ``swap``; else zeros. Recurrent states take at most half of it.
    Sequences of models without keys and values are never swapped, since they are not preempted for blocks."""
    if options.preemption_mode != "swap" or not profile.host_block_bytes:
        return SwapSizes(0, 0, 0)
    space, states = int(options.swap_space * 2**30), 0
    if size := profile.swapped_state_bytes:
        states = min(space // 2 // size, options.max_num_seqs)
    blocks = (space - states * size) // profile.host_block_bytes
    return SwapSizes(blocks, states, states * size + blocks * profile.host_block_bytes)
