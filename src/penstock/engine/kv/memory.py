"""How many KV blocks there are to be."""

from __future__ import annotations

from penstock.config.options import EngineOptions
from penstock.core.errors import invalid
from penstock.planning.host_memory import FREE_SHARE
from penstock.planning.kv_size import blocks_of_sequences

from ..step import MemoryProfile


def count_blocks(options: EngineOptions, profile: MemoryProfile, max_len: int) -> int:
    """KV blocks that fit, or as many as were asked for.

    Args:
        max_len: tokens that a sequence may have.

    Raises ``PenstockError`` (``invalid``) where not even one fits, or not as many sequences as were asked for.
    """
    if options.num_gpu_blocks_override:
        return options.num_gpu_blocks_override
    size = profile.block_bytes
    wanted = 0.0 if options.kv_cache_memory_bytes else options.kv_cache_sequences
    share = options.kv_cache_free_memory_fraction
    if options.kv_cache_memory_bytes:
        room = options.kv_cache_memory_bytes
    elif profile.total:  # a device with memory of its own
        unused = (1 - options.gpu_memory_utilization) * profile.total
        room = int(profile.free * share if share else profile.free - unused)
    else:
        host = count_host_blocks(options, profile) * profile.host_block_bytes
        room = int(profile.free * (1.0 if wanted else share or FREE_SHARE)) - host
    if room < size:
        raise invalid("kv_cache_memory_bytes", f"one KV block takes {size} bytes, and {max(room, 0)} are there")
    if not wanted:
        return room // size
    blocks = blocks_of_sequences(wanted, max_len, options.block_size)
    if blocks * size > room:
        most = room // size * options.block_size / max_len
        words = f"{wanted:g} of {max_len} tokens take {blocks * size / 1e9:.2f} GB, and "
        words += f"{room / 1e9:.2f} are there; at most {most:.1f} fit"
        raise invalid("kv_cache_sequences", words, most)
    return blocks


def count_host_blocks(options: EngineOptions, profile: MemoryProfile) -> int:
    """Blocks of the host tier."""
    if options.preemption_mode != "swap":
        return 0
    return int(options.swap_space * 2**30) // profile.host_block_bytes
