"""How many KV blocks there are to be."""

from __future__ import annotations

import torch

from penstock.config.options import EngineOptions
from penstock.core.errors import invalid
from penstock.ops import KVSpec
from penstock.planning.kv_size import blocks_of_sequences
from penstock.planning.kv_spec import bytes_per_block

from ..service.host import FREE_SHARE, free_host_bytes


def count_blocks(
    options: EngineOptions, size: int, specs: list[KVSpec], device: torch.device, mapped: int, longest: int
) -> int:
    """KV blocks that fit, or as many as were asked for.

    Args:
        longest: tokens that a sequence may have.
        size: bytes of a block, in all caches together.
        mapped: bytes of weights that are mapped from a disk. They count as free, but every step needs them.

    Raises ``PenstockError`` (``invalid``) where not even one fits, or not as many sequences as were asked for.
    """
    if options.num_gpu_blocks_override:
        return options.num_gpu_blocks_override
    wanted = 0.0 if options.kv_cache_memory_bytes else options.kv_cache_sequences
    share = options.kv_cache_free_memory_fraction
    if options.kv_cache_memory_bytes:
        room = options.kv_cache_memory_bytes
    elif device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        room = int(free * share if share else free - (1 - options.gpu_memory_utilization) * total)
    else:
        free = free_host_bytes() - mapped
        room = int(free * (1.0 if wanted else share or FREE_SHARE)) - count_host_blocks(
            options, specs
        ) * bytes_per_block(specs)
    if room < size:
        raise invalid("kv_cache_memory_bytes", f"one KV block takes {size} bytes, and {max(room, 0)} are there")
    if not wanted:
        return room // size
    blocks = blocks_of_sequences(wanted, longest, options.block_size)
    if blocks * size > room:
        most = room // size * options.block_size / longest
        words = f"{wanted:g} of {longest} tokens take {blocks * size / 1e9:.2f} GB, and "
        words += f"{room / 1e9:.2f} are there; at most {most:.1f} fit"
        raise invalid("kv_cache_sequences", words, most)
    return blocks


def count_host_blocks(options: EngineOptions, specs: list[KVSpec]) -> int:
    """Blocks of the host tier."""
    if options.preemption_mode != "swap":
        return 0
    return int(options.swap_space * 2**30) // bytes_per_block(specs)
