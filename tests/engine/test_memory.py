"""Size of the KV cache, set by options or computed from free memory and a container's memory limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock import LLM, PenstockError
from penstock.planning.host_memory import free_host_bytes

BLOCK_BYTES = 6 * 2 * 2 * 64 * 64 * 2
"""Bytes per KV block of the demo model: layers, K and V, KV heads, head size, tokens per block, bytes of bfloat16."""


def test_options_set_number_of_blocks() -> None:
    assert LLM(kv_cache_memory_bytes=50 * BLOCK_BYTES + 1).engine.scheduler.device_pool.total == 50
    assert LLM(num_gpu_blocks_override=40, kv_cache_memory_bytes=1).engine.scheduler.device_pool.total == 40
    rounded = LLM(kv_cache_memory_bytes=50 * BLOCK_BYTES, kv_cache_dtype="int8")
    assert rounded.engine.scheduler.device_pool.total == 50 * (2 * 64) // (64 + 4), "64 bytes have a scale of 4 bytes"
    with pytest.raises(PenstockError, match=r"one KV block takes .*; raise it"):
        LLM(kv_cache_memory_bytes=BLOCK_BYTES - 1)
    with pytest.raises(PenstockError, match=r"kv_offloading_size: takes .* lower it"):
        LLM(kv_offloading_size=0.8 * free_host_bytes() / 2**30)


def test_kv_cache_takes_fraction_of_free_memory() -> None:
    """The tolerance is 10 %, because other processes use memory, too."""
    less, more = (LLM(kv_cache_free_memory_fraction=share).engine.scheduler.device_pool.total for share in (0.01, 0.04))
    assert 3.6 < more / less < 4.4
    assert 0.9 < less * BLOCK_BYTES / (0.01 * free_host_bytes()) < 1.1
    for wrong in (-0.1, 1.0):
        with pytest.raises(PenstockError, match="kv_cache_free_memory_fraction"):
            LLM(kv_cache_free_memory_fraction=wrong)


@pytest.mark.parametrize(
    "names", [("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")]
)
def test_container_limit_bounds_free_memory(tmp_path: Path, names: tuple[str, str]) -> None:
    for name, value in zip(names, (1_000_000, 400_000), strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{value}\n")
    assert free_host_bytes(tmp_path) == 600_000
    (tmp_path / names[1]).with_name("memory.stat").write_text("anon 300000\ninactive_file 60000\nactive_file 40000\n")
    assert free_host_bytes(tmp_path) == 700_000


def test_free_memory_without_container_limit_is_that_of_machine(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert free_host_bytes(tmp_path) > 100_000_000
