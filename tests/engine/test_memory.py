"""How large the KV cache gets: from memory, a container's limit, or what was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock import LLM, PenstockError
from penstock.planning.host_memory import free_host_bytes

A_BLOCK = 6 * 2 * 2 * 64 * 64 * 2
"""Bytes of the demo model's: layers, keys and values, KV heads, their size, tokens, bfloat16."""


def test_bytes_and_blocks_can_be_given() -> None:
    assert LLM(kv_cache_memory_bytes=50 * A_BLOCK + 1).engine.scheduler.device_pool.total == 50
    assert LLM(num_gpu_blocks_override=40, kv_cache_memory_bytes=1).engine.scheduler.device_pool.total == 40
    rounded = LLM(kv_cache_memory_bytes=50 * A_BLOCK, kv_cache_dtype="int8")
    assert rounded.engine.scheduler.device_pool.total == 50 * (2 * 64) // (64 + 4), "a scale for 64 bytes"
    with pytest.raises(PenstockError, match="one KV block takes"):
        LLM(kv_cache_memory_bytes=A_BLOCK - 1)
    with pytest.raises(PenstockError, match=r"kv_offloading_size: takes .* lower it"):
        LLM(kv_offloading_size=0.8 * free_host_bytes() / 2**30)


def test_a_share_of_what_the_weights_leave() -> None:
    """Others come and go on this machine: what is free is known to a tenth."""
    less, more = (LLM(kv_cache_free_memory_fraction=share).engine.scheduler.device_pool.total for share in (0.01, 0.04))
    assert 3.6 < more / less < 4.4
    assert 0.9 < less * A_BLOCK / (0.01 * free_host_bytes()) < 1.1
    for wrong in (-0.1, 1.0):
        with pytest.raises(PenstockError, match="kv_cache_free_memory_fraction"):
            LLM(kv_cache_free_memory_fraction=wrong)


@pytest.mark.parametrize(
    "names", [("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")]
)
def test_a_containers_limit_counts(tmp_path: Path, names: tuple[str, str]) -> None:
    for name, value in zip(names, (1_000_000, 400_000), strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{value}\n")
    assert free_host_bytes(tmp_path) == 600_000
    (tmp_path / names[1]).with_name("memory.stat").write_text("anon 300000\ninactive_file 60000\nactive_file 40000\n")
    assert free_host_bytes(tmp_path) == 700_000


def test_no_limit_is_the_machines_memory(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert free_host_bytes(tmp_path) > 100_000_000
