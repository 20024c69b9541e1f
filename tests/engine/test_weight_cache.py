"""Disk cache of packed weights: used at the next start, unless damaged or of another checkpoint."""

from __future__ import annotations

import fcntl
import logging
import os
import queue
import random
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
import torch
from checkpoints import SMALL, save
from serving import Served
from transformers import Qwen3Config
from xxhash import xxh3_64_intdigest

from penstock import LLM, SamplingParams, demo
from penstock.config.cache_folder import new_file
from penstock.core import PenstockError
from penstock.models.loader import LoadOptions, load_model
from penstock.ops import backend
from penstock.parallel.shared_memory import SharedMemoryGroup, create_memory

PROMPTS = [[5, 6, 7, 8], list(range(40, 90))]
DATA = 2 * 2**20
"""Byte offset of the weights in a small cache file."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save(Qwen3Config(**SMALL, head_dim=32), tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def start(checkpoint: Path, cache: Path | str, quantization: str = "w4a8", size: float = 0, blocks: int = 20) -> LLM:
    options: dict[str, Any] = {"weight_cache_dir": str(cache), "weight_cache_size": size}
    llm = LLM(checkpoint, dtype="bfloat16", quantization=quantization, num_gpu_blocks_override=blocks, **options)
    for thread in threading.enumerate():
        if thread.name == "keep-weights":
            thread.join()
    return llm


def answers(checkpoint: Path, cache: Path | str, quantization: str = "w4a8") -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    outputs = start(checkpoint, cache, quantization).generate(PROMPTS, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.slow
def test_next_start_uses_cached_weights(checkpoint: Path, tmp_path: Path) -> None:
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


@pytest.mark.slow
def test_weights_of_another_checkpoint_state_are_packed_again(checkpoint: Path, tmp_path: Path) -> None:
    cache, weights = tmp_path / "cache", checkpoint / "model.safetensors"
    answers(checkpoint, cache)
    (file,) = cache.iterdir()
    save(Qwen3Config(**SMALL | {"intermediate_size": 64}, head_dim=32), checkpoint)
    expected = answers(checkpoint, "none")
    assert answers(checkpoint, cache) == expected
    assert list(cache.iterdir()) == [file]
    before = weights.stat()
    with weights.open("r+b") as content:  # change the weights, but not the file's size, header and date
        content.seek(before.st_size - 20_000)
        content.write(random.Random(0).randbytes(1000) + bytes(19_000))
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = answers(checkpoint, "none")
    assert changed != expected
    assert answers(checkpoint, cache) == changed


def flip_bits(content: bytes, begin: int, end: int) -> bytes:
    """Return the content with 300 bits flipped at random positions of a byte range."""
    damaged, rng = bytearray(content), random.Random(0)
    for _ in range(300):
        damaged[rng.randrange(begin, end)] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def test_damaged_tensors_are_logged_and_packed_again(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    expected = answers(checkpoint, cache)
    (file,) = cache.iterdir()
    content = file.read_bytes()
    file.write_bytes(flip_bits(content, DATA, len(content)))
    with caplog.at_level(logging.WARNING):
        assert answers(checkpoint, cache) == expected
    (message,) = [record.getMessage() for record in caplog.records]
    assert re.search(rf"{file}: \d+ tensors are damaged and packed again: model.embed_tokens \(values\), .*", message)
    assert file.read_bytes() == content
    damaged = bytearray(content)
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert answers(checkpoint, cache) == expected
    (message,) = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(rf"{file}: a tensor is damaged and packed again: \S+ \((scales|values)\)", message)
    assert file.read_bytes() == content


def edit_header(change: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    """Return a function that changes the header of a cache file; the header's checksum is correct."""

    def changed(content: bytes) -> bytes:
        length = int.from_bytes(content[8:16], "little")
        header = msgspec.json.decode(content[24 : 24 + length])
        change(header)
        data = msgspec.json.encode(header)
        sizes = len(data).to_bytes(8, "little") + xxh3_64_intdigest(data).to_bytes(8, "little")
        return (content[:8] + sizes + data).ljust(DATA, b"\0") + content[DATA:]

    return changed


def edit_first_tensor(**fields: Any) -> Callable[[bytes], bytes]:
    """Return a function that changes fields of the first tensor in a cache file's header."""
    return edit_header(lambda header: next(iter(next(iter(header["entries"].values())).values())).update(fields))


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut short": lambda content: content[: DATA + 1000],
    "cut short in its header": lambda content: content[:1000],
    "garbage": lambda content: random.Random(0).randbytes(len(content)),
    "header longer than the file": lambda content: content[:8] + b"\xff" * 8 + content[16:],
    "flipped bits in the header": lambda content: flip_bits(content, 24, 1000),
    "earlier version": lambda content: content[8:],
    "offset beyond the end": edit_first_tensor(offset=2**40),
    "negative offset": edit_first_tensor(offset=-DATA),
    "overlapping tensors": edit_header(
        lambda header: [part.update(offset=0) for e in header["entries"].values() for part in [*e.values()]] and None
    ),
    "huge shape": edit_first_tensor(shape=[2**40, 2**40]),
    "negative shape": edit_first_tensor(shape=[-1, 5]),
    "unknown dtype": edit_first_tensor(dtype="load"),
    "other shape": edit_first_tensor(shape=[1]),
    "other dtype": edit_first_tensor(dtype="int8"),
    "other state": edit_header(lambda header: header.update(state="")),
}


@pytest.mark.slow
def test_unusable_files_are_packed_again(checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = tmp_path / "cache"
    expected = answers(checkpoint, cache)
    (file,) = cache.iterdir()
    content = file.read_bytes()
    for name, damage in DAMAGES.items():
        file.write_bytes(damage(content))
        caplog.clear()
        with caplog.at_level(logging.INFO):
            assert answers(checkpoint, cache) == expected, name
        messages = [record.getMessage() for record in caplog.records if "again" in record.getMessage()]
        assert len(messages) == 1 and "\n" not in messages[0], name
        assert file.read_bytes() == content, name
    with caplog.at_level(logging.INFO):
        assert answers(checkpoint, file / "no-folder") == expected
    assert "are not stored for the next start" in caplog.text


@pytest.mark.slow
def test_files_writable_by_other_users_are_not_used(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    expected = answers(checkpoint, cache)
    assert cache.stat().st_mode & 0o077 == 0
    (file,) = cache.iterdir()

    def replace_by_link() -> None:
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")

    def replace_by_fifo() -> None:
        file.unlink()
        os.mkfifo(file)

    changes: dict[str, Callable[[], object]] = {
        "other users may write to it": lambda: file.chmod(0o666),
        "Too many levels of symbolic links": replace_by_link,
        "it is not a regular file": replace_by_fifo,
    }
    if os.geteuid() == 0:
        changes["it belongs to another user"] = lambda: os.chown(file, 12345, 12345)
    for message, change in changes.items():
        change()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert answers(checkpoint, cache) == expected
        assert message in caplog.text
        assert file.is_file() and not file.is_symlink()
        assert file.stat().st_uid == os.geteuid() and file.stat().st_mode & 0o022 == 0
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert answers(checkpoint, cache) == expected
    assert not caplog.text


def test_changed_configuration_does_not_use_cached_weights(checkpoint: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    answers(checkpoint, cache)
    config = checkpoint / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 96', '"intermediate_size": 64'))
    with pytest.raises(PenstockError, match="has shape"):
        answers(checkpoint, cache)


def test_unfinished_file_of_killed_process_is_removed(checkpoint: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    answers(checkpoint, cache)
    (file,) = cache.iterdir()
    file.rename(file.with_suffix(".part"))
    with (cache / "other.part").open("wb") as other:  # another process is writing this file
        fcntl.flock(other, fcntl.LOCK_EX)
        answers(checkpoint, cache)
        assert set(cache.iterdir()) == {file, Path(other.name)}


def test_least_recently_used_files_are_removed(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"

    def files() -> set[Path]:
        return set(cache.iterdir())

    start(checkpoint, cache, "w8a8")
    (first,) = files()
    limit = 3.5 * first.stat().st_size / 2**30
    start(checkpoint, cache, "w4a8", limit)
    (second,) = files() - {first}
    start(checkpoint, cache, "wint8", limit)
    (third,) = files() - {first, second}
    start(checkpoint, cache, "w8a8", limit)  # marks the first file as recently used
    start(checkpoint, cache, "wint4", limit)
    (fourth,) = files() - {first, third}
    assert second not in files()
    running = start(checkpoint, cache, "wint8", limit)  # keeps the third file mapped
    start(checkpoint, cache, "w8a8", limit)
    start(checkpoint, cache, "wint4", limit)
    start(checkpoint, cache, "w4a8", limit)
    assert files() == {second, third, fourth}
    start(checkpoint, cache, "w8a8", limit)
    assert third in files() and len(files()) == 3
    before = files()
    with caplog.at_level(logging.INFO):
        start(checkpoint, cache, "none", 0.5 * first.stat().st_size / 2**30)
    assert "packed weights are not stored" in caplog.text and "weight_cache_size" in caplog.text
    assert files() == before
    del running


def test_each_rank_has_a_separate_file(checkpoint: Path, tmp_path: Path) -> None:
    """The weight halves of two ranks have the same tensor names and sizes, but different values."""
    cache, memory = tmp_path / "cache", create_memory()

    def load(rank: int, ranks: int) -> int:
        """Load the weights of a rank; return the number of bytes that were mapped from the cache."""
        model = load_model(
            checkpoint,
            backend(torch.device("cpu")),
            LoadOptions(quantization="w8a8", weight_cache_dir=cache, group=SharedMemoryGroup(memory, rank, ranks)),
        )
        for thread in threading.enumerate():
            if thread.name == "keep-weights":
                thread.join()
        return model.mapped_bytes

    ranks = [(0, 1), (0, 2), (1, 2)]
    assert [load(*rank) for rank in ranks] == [0, 0, 0]
    assert len(list(cache.iterdir())) == 3
    whole, first, second = (load(*rank) for rank in ranks)
    assert 0 < first < whole and 0 < second < whole
    data = [path.read_bytes() for path in cache.iterdir()]
    assert len(set(data)) == 3


def test_concurrent_writers_share_the_size_limit(tmp_path: Path) -> None:
    size, limit = 2**20, 4 * 2**20
    results: queue.SimpleQueue[bool] = queue.SimpleQueue()
    done = threading.Event()

    def write(number: int) -> None:
        try:
            with new_file(tmp_path / f"{number}.packed", size, limit):
                results.put(True)
                done.wait()
        except OSError:
            results.put(False)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    kept = sum(results.get(timeout=60) for _ in threads)
    done.set()
    for thread in threads:
        thread.join()
    assert kept == len(list(tmp_path.iterdir())) == limit // size


@pytest.mark.thorough
def test_file_truncated_while_in_use_is_packed_again(tmp_path: Path) -> None:
    cache, greedy = tmp_path / "cache", SamplingParams(temperature=0, max_tokens=8)
    llm = start(demo.CHAT, cache, "none", blocks=100)
    expected = llm.generate(["The river"], greedy, use_tqdm=False)[0].outputs[0].text
    (file,) = cache.iterdir()
    size = file.stat().st_size
    flags = ("--weight-cache-dir", str(cache), "--num-gpu-blocks-override", "100", "--dtype", "bfloat16")
    with Served(*flags) as served:
        client = openai.OpenAI(base_url=served.url, api_key="none", max_retries=0)
        seen = len(served.lines)
        os.truncate(file, DATA)
        request: dict[str, Any] = {"model": "penstock-demo", "prompt": "The river", "max_tokens": 8, "temperature": 0}
        answer = client.completions.create(**request).choices[0].text  # continued by the engine's next process
        served.find("ended: killed by SIGBUS", seen)
        served.find(r"cannot be used .it has \d+ bytes instead of \d+.", seen, limit=60)
        assert answer == expected
    assert file.stat().st_size == size
