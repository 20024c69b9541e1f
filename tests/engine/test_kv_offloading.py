"""KV offloading: prefixes are kept in host memory and on disk; a damaged or wrong block is a cache miss."""

from __future__ import annotations

import fcntl
import gc
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from checkpoints import SMALL, save
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from serving import Served
from state_families import draw
from transformers import Qwen3Config

from penstock import LLM, LoRARequest, PenstockError
from penstock.core import EngineRequest, SamplingParams
from penstock.engine.kv import disk_tier
from penstock.engine.kv.block_pool import BlockPool
from penstock.engine.kv.host_tier import HostTier
from penstock.engine.kv.offloading import KVOffloading
from penstock.engine.sequence.plan import Plan

BLOCK = 16
OPTIONS: dict[str, Any] = {
    "block_size": BLOCK,
    "num_gpu_blocks_override": 16,
    "max_model_len": 256,
    "weight_cache_dir": "none",
    "kv_offloading_size": 0.01,
}
PROMPTS = [[2 + (7 * i + j) % 90 for j in range(200)] for i in range(3)]
"""Token ids of three prompts. The device's KV cache has room for one of them."""
FULL = 192
"""Number of tokens in the full blocks of a prompt."""
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
Result = list[tuple[list[int], Any]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    model = save(Qwen3Config(**SMALL, head_dim=32, sliding_window=None), folder)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["k_proj", "v_proj"], init_lora_weights=False))
    adapted.save_pretrained(folder / "adapter")
    return folder


@contextmanager
def opened(checkpoint: Path, **options: Any) -> Iterator[LLM]:
    """Yield a model with an engine. All blocks must be free at the end; closing the engine writes pending blocks."""
    llm = LLM(checkpoint, **OPTIONS | options)
    with closing(llm.engine):
        yield llm
        assert llm.engine.scheduler.device_pool.num_free == llm.engine.scheduler.device_pool.total


def generate(llm: LLM, prompts: list[list[int]] = PROMPTS, **options: Any) -> tuple[Result, list[int]]:
    """Run one prompt at a time; return the results, and the number of cached tokens of each prompt."""
    results, cached = [], []
    for prompt in prompts:
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False, **options)
        results.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
        cached.append(output.num_cached_tokens)
    return results, cached


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Result:
    with opened(checkpoint, kv_offloading_size=0, enable_prefix_caching=False) as llm:
        return generate(llm)[0]


def counts(llm: LLM) -> dict[str, int]:
    assert llm.engine.kv_offloading
    return llm.engine.kv_offloading.counts


def written(checkpoint: Path, folder: Path, **options: Any) -> list[Path]:
    """Store the blocks of all prompts on disk; return the files."""
    with opened(checkpoint, kv_offloading_disk_path=str(folder), **options) as llm:
        generate(llm)
    return sorted(folder.iterdir())


def test_evicted_blocks_are_loaded_from_host_memory(checkpoint: Path, expected: Result) -> None:
    with opened(checkpoint) as llm:
        assert generate(llm) == (expected, [0, 0, 0])
        assert generate(llm) == (expected, [FULL] * 3)
        assert counts(llm)["hits"] == 3 * FULL and counts(llm)["bytes_loaded"] > 0
        prompt_logprobs = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=1)
        (output,) = llm.generate([PROMPTS[0]], prompt_logprobs, use_tqdm=False)
        assert output.num_cached_tokens == 0 and len(output.prompt_logprobs or []) == len(PROMPTS[0])
        llm.reset_prefix_cache()
        assert generate(llm) == (expected, [0, 0, 0])


@pytest.mark.slow
def test_host_memory_is_bounded(checkpoint: Path, expected: Result) -> None:
    """Host memory has room for one and a half prompts. The least recently used blocks are evicted."""
    with opened(checkpoint) as llm:
        generate(llm)
        size = counts(llm)["bytes_stored"]
    with opened(checkpoint, kv_offloading_size=size / 2 / 2**30) as llm:
        generate(llm)
        assert generate(llm, PROMPTS[2:])[1] == [FULL]
        assert generate(llm) == (expected, [0, 0, 0])
        assert counts(llm)["evictions"] > 0 and counts(llm)["slots_used"] <= counts(llm)["slots"]


@pytest.mark.slow
@pytest.mark.parametrize("again", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_blocks_on_disk_are_found_after_restart(
    checkpoint: Path, expected: Result, tmp_path: Path, again: dict[str, Any]
) -> None:
    """The restarted engine may have another number of ranks. An engine with another fingerprint finds no blocks."""
    folder = tmp_path / "new" / "kv"
    files = written(checkpoint, folder)
    assert folder.stat().st_mode & 0o777 == 0o700 and {file.stat().st_mode & 0o777 for file in files} == {0o600}
    with opened(checkpoint, kv_offloading_disk_path=str(folder), **again) as llm:
        assert generate(llm) == (expected, [FULL] * 3)
        assert counts(llm)["disk_hits"] == 3 * FULL and counts(llm)["disk_bytes_written"] == 0
    if not again:
        with opened(checkpoint, kv_offloading_disk_path=str(folder), quantization="w8a8") as llm:
            assert generate(llm)[1] == [0, 0, 0]


def test_two_engines_share_a_disk_folder(checkpoint: Path, expected: Result, tmp_path: Path) -> None:
    """The second engine finds blocks as soon as the first engine has written them."""
    options = {"kv_offloading_disk_path": str(tmp_path / "kv"), "distributed_executor_backend": "uni"}
    with opened(checkpoint, **options) as first, opened(checkpoint, **options) as second:
        generate(first, PROMPTS[:1])
        first.engine.close()
        first.engine.close = lambda: None  # type: ignore[method-assign]
        assert generate(second) == (expected, [FULL, 0, 0])


@pytest.mark.slow
def test_offloaded_blocks_differ_by_salt_adapter_and_weights(checkpoint: Path, tmp_path: Path) -> None:
    """With equal salt, adapter and weights, blocks are found, also after the weights were changed and restored."""
    with opened(checkpoint, kv_offloading_disk_path=str(tmp_path / "kv"), enable_lora=True) as llm:
        adapter = LoRARequest("one", 1, str(checkpoint / "adapter"))
        generate(llm)

        def salted(number: int) -> int:
            request = EngineRequest(request_id=str(number), prompt=PROMPTS[0], sampling=GREEDY, cache_salt="mine")
            llm.engine.add(request)
            cached = [delta.cached_tokens for _ in iter(lambda: llm.engine.busy, False) for delta in llm.engine.step()]
            return max(cached)

        assert salted(1) == 0 and salted(2) == FULL
        first, cached = generate(llm, lora_request=adapter)
        assert cached == [0, 0, 0]
        assert generate(llm, lora_request=adapter) == (first, [FULL] * 3)
        plain, _ = generate(llm)
        tensors = load_file(checkpoint / "model.safetensors")
        llm.update_weights({name: tensor + 0.1 * torch.ones_like(tensor) for name, tensor in tensors.items()})
        other, cached = generate(llm)
        assert cached == [0, 0, 0] and other != plain
        llm.update_weights(checkpoint)
        assert generate(llm) == (plain, [FULL] * 3)


# --- Recurrent states -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["Qwen3Next", "Mamba2"])
def recurrent(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with recurrent states and attention, and one without keys and values."""
    folder = tmp_path_factory.mktemp("recurrent")
    draw(request.param, 0, folder)
    return folder


@pytest.fixture(scope="module")
def recurrent_expected(recurrent: Path) -> Result:
    with opened(recurrent, kv_offloading_size=0, enable_prefix_caching=False) as llm:
        return generate(llm)[0]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("ranks", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_states_are_loaded_from_host_memory(recurrent: Path, recurrent_expected: Result, ranks: dict[str, Any]) -> None:
    """The device has room for the blocks of one prompt, and for two states."""
    with opened(recurrent, num_state_snapshots=2, **ranks) as llm:
        assert generate(llm) == (recurrent_expected, [0, 0, 0])
        assert generate(llm) == (recurrent_expected, [FULL] * 3)
        sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        prompt = PROMPTS[0][::-1][:150]
        (answer,) = llm.generate([prompt], sampling, use_tqdm=False)
        generate(llm)
        (output,) = llm.generate([[*prompt, *answer.outputs[0].token_ids, 5]], GREEDY, use_tqdm=False)
        assert output.num_cached_tokens == 176  # the whole blocks of 150 tokens and of an answer of 39 computed tokens
        llm.reset_prefix_cache()
        assert generate(llm) == (recurrent_expected, [0, 0, 0])


@pytest.mark.slow
def test_states_on_disk_are_found_after_restart(recurrent: Path, recurrent_expected: Result, tmp_path: Path) -> None:
    """An engine with another number of ranks has other states: it finds none, and computes the prompts."""
    folder = tmp_path / "kv"
    files = written(recurrent, folder, num_state_snapshots=2)
    with opened(recurrent, kv_offloading_disk_path=str(folder), num_state_snapshots=2) as llm:
        assert generate(llm) == (recurrent_expected, [FULL] * 3)
        assert counts(llm)["disk_bytes_read"] > 0 and counts(llm)["disk_hits"] in (0, 3 * FULL)
        assert counts(llm)["disk_bytes_written"] == 0 and sorted(folder.iterdir()) == files
    with opened(recurrent, kv_offloading_disk_path=str(folder), tensor_parallel_size=2) as llm:
        assert generate(llm) == (recurrent_expected, [0, 0, 0])


@pytest.mark.slow
def test_damaged_state_is_a_cache_miss(recurrent: Path, recurrent_expected: Result, tmp_path: Path) -> None:
    """Each file of the folder is damaged in turn: a block or a part of a state."""
    intact = tmp_path / "intact"
    files = written(recurrent, intact)
    for number, name in enumerate(sorted(file.name for file in files)[:: -(-len(files) // 6)]):
        folder = shutil.copytree(intact, tmp_path / str(number))
        flip_bit(folder / name)
        with opened(recurrent, kv_offloading_disk_path=str(folder)) as llm:
            found, cached = generate(llm)
            assert found == recurrent_expected and sorted(cached)[1:] == [FULL] * 2


# --- Damaged files ----------------------------------------------------------------------------------------------------


def flip_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def replace_by(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def damage(file: Path) -> None:
        file.unlink()
        make(file)

    return damage


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped bit": flip_bit,
    "truncated": lambda file: os.truncate(file, 1000),
    "empty": lambda file: os.truncate(file, 0),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"x"),
    "content of another block": lambda file: file.write_bytes(
        next(p for p in file.parent.iterdir() if p != file).read_bytes()
    ),
    "deleted": Path.unlink,
    "folder": replace_by(Path.mkdir),
    "fifo": replace_by(os.mkfifo),
    "symbolic link": replace_by(lambda file: file.symlink_to("/dev/zero")),
    "writable by others": lambda file: file.chmod(0o622),
}


@pytest.fixture(scope="module")
def intact(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Disk folder with the blocks of all prompts."""
    folder = tmp_path_factory.mktemp("disk") / "kv"
    written(checkpoint, folder)
    return folder


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_a_cache_miss(
    checkpoint: Path, intact: Path, expected: Result, tmp_path: Path, damage: str
) -> None:
    folder = shutil.copytree(intact, tmp_path / "kv")
    for file in list(folder.iterdir()):
        DAMAGES[damage](file)
    with opened(checkpoint, kv_offloading_disk_path=str(folder)) as llm:
        assert generate(llm) == (expected, [0, 0, 0])
    replaced = {file.name for file in intact.iterdir() if same(file, folder / file.name)}
    assert damage == "folder" or len(replaced) >= len(PROMPTS), "damaged files were not replaced"


def same(file: Path, other: Path) -> bool:
    return other.is_file() and other.read_bytes() == file.read_bytes()


def test_blocks_with_nan_are_deleted(
    checkpoint: Path, intact: Path, expected: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request that loads the blocks fails. The end of a request marks its blocks as used, but these are not loaded
    again."""
    folder = shutil.copytree(intact, tmp_path / "kv")
    for file in folder.iterdir():
        file.write_bytes(b"\xff" * file.stat().st_size)  # all bits set: NaN in every data type
    monkeypatch.setattr(disk_tier.DiskTier, "_checksum", lambda *_: b"\xff" * disk_tier.CHECKSUM_BYTES)
    with opened(checkpoint, kv_offloading_disk_path=str(folder)) as llm:
        (output,) = llm.generate([PROMPTS[0]], GREEDY, use_tqdm=False)
        assert "not finite" in str(output.outputs[0].failure) and counts(llm)["disk_hits"] == FULL
    with opened(checkpoint, kv_offloading_disk_path=str(folder)) as llm:
        assert generate(llm, PROMPTS[:1]) == (expected[:1], [0])


def test_block_found_wrong_while_stored_is_dropped() -> None:
    """NaN is detected in a block while the next step stores it."""
    device = BlockPool(1, BLOCK)
    device.cache_block(*device.allocate(1), b"a")
    with closing(KVOffloading(device, HostTier(4096, 1024, BLOCK))) as offloading:
        for wrong in (True, False):
            offloading.store([0], [b"a"])
            plan = Plan(stores=offloading.take_stores())
            if wrong:
                offloading.forget([b"a"])
            offloading.confirm(plan)
            assert offloading.count([b"a"]) == (not wrong)


def test_blocks_after_a_damaged_block_are_computed(checkpoint: Path, expected: Result, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with opened(checkpoint, kv_offloading_disk_path=str(folder)) as llm:
        generate(llm, PROMPTS[:1])
    file = next(folder.iterdir())
    intact = file.read_bytes()
    flip_bit(file)
    with opened(checkpoint, kv_offloading_disk_path=str(folder)) as llm:
        found, (cached,) = generate(llm, PROMPTS[:1])
        assert found == expected[:1] and cached < FULL and cached % BLOCK == 0
        assert counts(llm)["disk_read_failures"] == 1
    assert file.read_bytes() == intact, "the block was not written again"


@pytest.mark.slow
def test_disk_folder_is_bounded(checkpoint: Path, expected: Result, tmp_path: Path) -> None:
    """The least recently used files are deleted first, including those of other weights. Foreign files are kept."""
    folder = tmp_path / "kv"
    files = written(checkpoint, folder)
    size = sum(file.stat().st_size for file in files)
    for file in files:
        os.utime(file, (1, 1))
    (folder / "notes.txt").write_text("x" * size)
    options = {"kv_offloading_disk_path": str(folder), "kv_offloading_disk_size": 1.2 * size / 2**30}
    with opened(checkpoint, quantization="w8a8", **options) as llm:
        generate(llm)
    kept = [file for file in folder.iterdir() if file.suffix == ".kv"]
    assert sum(file.stat().st_size for file in kept) <= 1.2 * size
    assert len(set(files) & set(kept)) < len(files) / 4 and (folder / "notes.txt").exists()
    with opened(checkpoint, quantization="w8a8", **options) as llm:
        assert generate(llm)[1] == [FULL] * 3
    assert generate_fresh(checkpoint, options) == expected


def generate_fresh(checkpoint: Path, options: dict[str, Any]) -> Result:
    with opened(checkpoint, **options) as llm:
        return generate(llm)[0]


def test_full_disk_fails_no_request(
    checkpoint: Path, expected: Result, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "kv"
    with opened(checkpoint, kv_offloading_disk_path=str(folder)) as llm:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # longer writes fail, as on a full disk
        try:
            assert generate(llm)[0] == expected
            llm.engine.close()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        llm.engine.close = lambda: None  # type: ignore[method-assign]
        assert counts(llm)["disk_write_failures"] > 0 and not list(folder.iterdir())
    assert "no blocks are written for 30 seconds" in caplog.text


@pytest.mark.slow
def test_hanging_disk_delays_one_request_until_timeout(
    checkpoint: Path, expected: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request waits for its blocks until the timeout. Later requests do not wait for the disk to respond."""
    folder = tmp_path / "kv"
    files = written(checkpoint, folder)
    monkeypatch.setattr(disk_tier, "READ_TIMEOUT", 0.2)
    held = [file.open("r+b") for file in files]
    for file in held:
        fcntl.flock(file, fcntl.LOCK_EX)  # the engine's readers wait for this lock
    with opened(checkpoint, kv_offloading_disk_path=str(folder)) as llm:
        assert generate(llm) == (expected, [0, 0, 0])
        assert counts(llm)["disk_read_failures"] == 1 and counts(llm)["disk_hits"] == 0
        for file in held:
            file.close()
        monkeypatch.setattr(disk_tier, "READ_TIMEOUT", 60)
        while not counts(llm)["disk_hits"]:
            llm.reset_prefix_cache()
            assert generate(llm, PROMPTS[:1])[0] == expected[:1]


KILLED = """
import os, signal, sys
from penstock import LLM, SamplingParams
llm = LLM(sys.argv[1], kv_offloading_disk_path=sys.argv[2], **{options})
for prompt in {prompts}:
    llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
while not llm.engine.kv_offloading.counts["disk_bytes_written"]:
    pass
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_blocks_written_by_killed_engine_are_found(checkpoint: Path, expected: Result, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    code = KILLED.format(options=OPTIONS, prompts=PROMPTS)
    ended = subprocess.run([sys.executable, "-c", code, str(checkpoint), str(folder)], timeout=120)
    assert ended.returncode == -signal.SIGKILL
    with opened(checkpoint, kv_offloading_disk_path=str(folder)) as llm:
        found, cached = generate(llm)
        assert found == expected and sum(cached) > 0, "no block was found"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_offloading_size": 1e-6}, "kv_offloading_size: must be at least"),
        ({"kv_offloading_size": 1e5}, "kv_offloading_size: 100000.0 GiB do not fit into the"),
        ({"kv_offloading_size": float("inf")}, "kv_offloading_size: "),
        ({"kv_offloading_disk_path": "{tmp}/a", "kv_offloading_disk_size": float("inf")}, "disk_size: "),
        ({"kv_offloading_disk_path": "/dev/null/kv"}, "cannot be used"),
        ({"kv_offloading_disk_path": "/tmp"}, "must be accessible to this user only"),
        ({"kv_offloading_disk_path": "{tmp}/a", "kv_offloading_disk_size": 1e-6}, "disk_size: must be at least"),
    ],
)
def test_invalid_offloading_options_are_refused(
    checkpoint: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    given = {name: value.format(tmp=tmp_path) if isinstance(value, str) else value for name, value in options.items()}
    with pytest.raises(PenstockError, match=re.escape(message)):
        LLM(checkpoint, **OPTIONS | given)


def test_failed_start_leaves_no_thread_and_no_file(checkpoint: Path, tmp_path: Path) -> None:
    def open_resources() -> tuple[int, int]:
        gc.collect()
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    threads, files = open_resources()
    with pytest.raises((OSError, MemoryError)):
        LLM(checkpoint, **OPTIONS | {"num_gpu_blocks_override": 10**9, "kv_offloading_disk_path": str(tmp_path / "a")})
    threads_left, files_left = open_resources()
    assert threads_left <= threads and files_left <= files  # an earlier test's thread may have ended


@pytest.mark.slow
def test_metrics_count_hits_of_host_and_disk(tmp_path: Path) -> None:
    """Two servers run one after the other with the same disk folder."""
    flags = ("--block-size", "16", "--num-gpu-blocks-override", "16", "--max-model-len", "256")
    flags += ("--kv-offloading-disk-path", str(tmp_path / "kv"))
    body = {"prompt": PROMPTS[0], "max_tokens": 2}

    def served(cached: int) -> dict[str, float]:
        with Served(*flags) as server:
            answer = httpx.post(f"{server.url}/completions", json=body, timeout=60).raise_for_status().json()
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
            while True:  # the engine reports metrics periodically
                page = httpx.get(f"{server.root}/metrics").text
                found = {name: float(value) for name, value in re.findall(r"^(\w+:\w+){[^}]*} (\S+)$", page, re.M)}
                if found["vllm:kv_offload_cpu_cache_usage_perc"] > 0:
                    return found

    assert served(0)["vllm:external_prefix_cache_hits_total"] == 0
    found = served(FULL)
    assert found["vllm:external_prefix_cache_hits_total"] == found["penstock:kv_offload_disk_hits_total"] == FULL
    assert found["vllm:external_prefix_cache_queries_total"] >= FULL
    assert found["vllm:kv_offload_load_bytes_total"] == found["penstock:kv_offload_disk_read_bytes_total"] > 0
