"""Packed weights on disk: found again by the next start, and never those of another checkpoint."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from pathlib import Path

import pytest
from checkpoints import SMALL, save
from transformers import Qwen3Config

from penstock import LLM, SamplingParams
from penstock.core import PenstockError

PROMPTS = [[5, 6, 7, 8], list(range(40, 90))]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save(Qwen3Config(**SMALL, head_dim=32), tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def answers(checkpoint: Path, cache: Path | str, quantization: str = "w4a8") -> list[list[int]]:
    llm = LLM(
        checkpoint,
        dtype="bfloat16",
        quantization=quantization,
        weight_cache_dir=str(cache),
        num_gpu_blocks_override=20,
    )
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    texts = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    for thread in threading.enumerate():
        if thread.name == "keep-weights":
            thread.join()
    return texts


def test_the_next_start_finds_them(checkpoint: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    expected = answers(checkpoint, "none")
    assert not cache.exists()
    assert answers(checkpoint, cache) == expected
    (file,) = cache.iterdir()
    written = file.stat().st_mtime_ns
    assert answers(checkpoint, cache) == expected
    assert file.stat().st_mtime_ns == written
    other = answers(checkpoint, cache, "wint8")
    assert len(list(cache.iterdir())) == 2
    assert answers(checkpoint, cache, "wint8") == other
    plain = answers(checkpoint, cache, "none")
    assert len(list(cache.iterdir())) == 3
    assert answers(checkpoint, cache, "none") == plain == answers(checkpoint, "none", "none")


def test_those_of_another_state_are_made_again(checkpoint: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    answers(checkpoint, cache)
    (file,) = cache.iterdir()
    save(Qwen3Config(**SMALL | {"intermediate_size": 64}, head_dim=32), checkpoint)
    expected = answers(checkpoint, "none")
    assert answers(checkpoint, cache) == expected
    assert list(cache.iterdir()) == [file]
    os.utime(checkpoint / "model.safetensors", ns=(1, 1))
    written = file.stat().st_mtime_ns
    assert answers(checkpoint, cache) == expected
    assert file.stat().st_mtime_ns != written


def test_damage_and_a_full_disk_stop_nothing(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    expected = answers(checkpoint, cache)
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    for damaged in (whole[:1000], b"\xff" * 9, b"", whole[:8] + whole[8:].replace(b"uint8", b"uint9", 1)):
        file.write_bytes(damaged)
        with caplog.at_level(logging.WARNING):
            assert answers(checkpoint, cache) == expected
        assert "cannot be used" in caplog.text
        caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert answers(checkpoint, cache) == expected
        assert not caplog.text
    with caplog.at_level(logging.INFO):
        assert answers(checkpoint, file / "no-folder") == expected
    assert "are not kept" in caplog.text


def test_a_changed_configuration_is_not_met_with_old_weights(checkpoint: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    answers(checkpoint, cache)
    config = checkpoint / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 96', '"intermediate_size": 64'))
    with pytest.raises(PenstockError, match="has shape"):
        answers(checkpoint, cache)


def test_what_a_killed_process_left_is_taken_away(checkpoint: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    answers(checkpoint, cache)
    (file,) = cache.iterdir()
    file.rename(file.with_suffix(".part"))
    with (cache / "other.part").open("wb") as other:  # which somebody writes
        fcntl.flock(other, fcntl.LOCK_EX)
        answers(checkpoint, cache)
        assert set(cache.iterdir()) == {file, Path(other.name)}
