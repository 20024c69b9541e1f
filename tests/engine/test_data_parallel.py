"""Data parallelism: answers equal to a single engine's, prefix-aware routing, adapters, and an engine that dies."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from checkpoints import SMALL, save
from peft import LoraConfig, get_peft_model
from serving import Served
from transformers import Qwen3Config

from penstock import LLM, AsyncLLM, LoRARequest, PenstockError
from penstock.cli.main import main
from penstock.core import SamplingParams
from penstock.frontend.gateway import Gateway
from penstock.frontend.prompts import TokenizedPrompt

OPTIONS = ("--data-parallel-size", "2", "--num-gpu-blocks-override", "120")
LONG = {"prompt": "One two three", "max_tokens": 1900, "ignore_eos": True, "temperature": 0}
RUNNING = "penstock:replica_num_requests_running"
STORIES = [f"{topic}. " + f"This is a story about {topic} and nothing else at all. " * 12 for topic in "abcdefgh"]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(*OPTIONS, "--api-server-count", "1") as served:
        until(lambda: metric(served, "penstock:replica_kv_blocks") == {"0": 120, "1": 120})
        yield served


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def complete(served: Served, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{served.url}/completions", json={"max_tokens": 20, "logprobs": 3, **body})
    found: dict[str, Any] = answer.json()
    assert answer.status_code == 200, found
    return found


def choices(answer: dict[str, Any]) -> Any:
    """Return the parts of an answer that do not depend on id and time: text and logprobs of each choice."""
    return [(choice["text"], choice["logprobs"]) for choice in answer["choices"]]


def metric(served: Served, name: str) -> dict[str, float]:
    """Return the values of a metric by engine number."""
    page = httpx.get(f"{served.root}/metrics").text
    return {engine: float(value) for engine, value in re.findall(rf'{name}{{engine="(\d)".*}} (\S+)', page)}


def engines(served: Served) -> list[int]:
    """Return the engine process ids, by replica number."""
    return served.pids["engine"]


def num_open(served: Served) -> int:
    """Return the number of requests that are open on the server."""
    (count,) = re.findall(r"penstock:num_requests_open{.*} (\S+)", httpx.get(f"{served.root}/metrics").text)
    return int(float(count))


class Stream:
    """A long streamed completion whose first chunk has been received."""

    def __init__(self, served: Served, n: int = 1) -> None:
        self._response = httpx.stream("POST", f"{served.url}/completions", json={**LONG, "n": n, "stream": True})
        self._lines = (line for line in self._response.__enter__().iter_lines() if line)
        self._first = next(self._lines)

    def rest(self) -> list[Any]:
        """Return all chunks of the stream, including a final error."""
        data = [line.removeprefix("data: ") for line in (self._first, *self._lines)]
        self._response.__exit__(None, None, None)
        return [json.loads(chunk) for chunk in data if chunk != "[DONE]"]


def test_data_parallel_answers_equal_single_engine(served: Served) -> None:
    requests = [{"prompt": f"The story of {i}:", "temperature": i % 2, "seed": i, "n": 1 + i % 3} for i in range(24)]
    with Served("--num-gpu-blocks-override", "120") as single:
        expected = [choices(complete(single, **body)) for body in requests]
    with ThreadPoolExecutor(24) as threads:
        found = list(threads.map(lambda body: choices(complete(served, **body)), requests))
    assert found == expected
    cores = [os.sched_getaffinity(pid) for pid in engines(served)]
    assert not set.intersection(*cores) or len(os.sched_getaffinity(0)) < 2


@pytest.mark.slow
def test_request_is_routed_to_engine_with_cached_prefix(served: Served) -> None:
    """Load balancing spreads the prompts over both engines. Prompts with the same prefix are then sent to the engine
    that caches it, also while one engine runs eight sequences."""
    with ThreadPoolExecutor(len(STORIES) + 1) as threads:
        threads.submit(complete, served, prompt="One two three", n=8, max_tokens=300, ignore_eos=True)
        list(threads.map(lambda story: complete(served, prompt=story), STORIES))
    for story in STORIES:
        usage = complete(served, prompt=story + "It ends")["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 0.6 * usage["prompt_tokens"]
    httpx.post(f"{served.root}/reset_prefix_cache").raise_for_status()
    for story in STORIES[:2]:
        details = complete(served, prompt=story)["usage"]["prompt_tokens_details"]
        assert not details or not details["cached_tokens"]


@pytest.mark.slow
def test_requests_of_dead_engine_continue_on_other_engine(served: Served) -> None:
    """The stream of the killed engine and its waiting requests get the answers of an undisturbed engine. The engine
    restarts."""
    expected = choices(complete(served, prompt="The sea", temperature=0))
    whole = complete(served, **LONG)["choices"][0]["text"]
    until(lambda: sum(metric(served, RUNNING).values()) == 0)
    started = Stream(served, n=8)  # the stream must outlast the wait below for the engine's report
    until(lambda: sum(metric(served, RUNNING).values()) > 0)
    number = int(max(running := metric(served, RUNNING), key=lambda engine: running[engine]))
    first, second = engines(served)[number], engines(served)[1 - number]
    os.kill(first, signal.SIGSTOP)
    other = Stream(served)
    os.kill(second, signal.SIGSTOP)
    with ThreadPoolExecutor(4) as threads:
        waiting: list[Future[Any]] = [
            threads.submit(complete, served, prompt="The sea", temperature=0) for _ in range(4)
        ]
        until(lambda: num_open(served) == 6)
        after = len(served.lines)
        os.kill(first, signal.SIGKILL)
        served.find(rf"engine {number} \(process {first}\) ended: killed by SIGKILL", after)
        os.kill(second, signal.SIGCONT)
        assert [choices(future.result()) for future in waiting] == [expected] * 4
    texts = dict.fromkeys(range(8), "")
    for chunk in started.rest():
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == dict.fromkeys(range(8), whole)
    assert "".join(chunk["choices"][0]["text"] for chunk in other.rest()) == whole
    assert httpx.get(f"{served.root}/health").status_code == 200
    until(lambda: len(engines(served)) == 2 and first not in engines(served))
    assert choices(complete(served, prompt="The sea", temperature=0)) == expected


@pytest.mark.slow
def test_adapters_are_loaded_in_every_engine(tmp_path: Path) -> None:
    """A restarted engine gets the adapters that were loaded meanwhile. Both API gateways can use them."""
    model = save(Qwen3Config(**SMALL, head_dim=16, sliding_window=None), tmp_path)
    get_peft_model(model, LoraConfig(r=3, init_lora_weights=False)).save_pretrained(tmp_path / "adapter")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[2 + (7 * i + j) % 50 for j in range(9)] for i in range(8)]
    options: dict[str, Any] = {"num_gpu_blocks_override": 60, "enable_lora": True, "max_model_len": 128}
    adapter = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
    expected = LLM(tmp_path, **options).generate(prompts, params, lora_request=adapter, use_tqdm=False)

    async def last(outputs: AsyncGenerator[Any, None]) -> list[int]:
        async for output in outputs:
            token_ids: list[int] = output.outputs[0].token_ids
        return token_ids

    async def found() -> list[list[int]]:
        async with AsyncLLM(tmp_path, data_parallel_size=2, **options) as llm:
            await llm.load_lora_adapter("adapter", tmp_path / "adapter")
            assert llm._process
            gateways = [llm.gateway, Gateway(llm._process.addresses, llm._input_processor, 32)]

            async def replicas(count: int) -> None:
                for gateway in gateways:
                    while sum(replica.blocks > 0 for replica in gateway.engine_pool.stats.replicas) != count:
                        await asyncio.sleep(0.02)

            await replicas(2)
            os.kill(llm.ready.pid, signal.SIGKILL)
            await replicas(1)
            await llm.unload_lora_adapter("adapter")
            await llm.load_lora_adapter("other", tmp_path / "adapter")
            await replicas(2)
            streams = [
                gateways[i % 2].generate(TokenizedPrompt(prompt), params, adapter="other")
                for i, prompt in enumerate(prompts)
            ]
            token_ids = await asyncio.gather(*map(last, streams))
            assert [list(gateway.engine_pool.adapters) for gateway in gateways] == [["other"]] * 2
            await gateways[1].close()
            return token_ids

    assert asyncio.run(found()) == [output.outputs[0].token_ids for output in expected]


@pytest.mark.slow
def test_request_refused_by_full_engine_runs_on_another() -> None:
    """The request's prefix is cached in the full engine only. If both engines are full, it gets an error from one."""
    prompt = {"prompt_token_ids": list(range(10, 210))}
    params = SamplingParams(max_tokens=20, ignore_eos=True)

    async def failure(llm: AsyncLLM, prompt: Any) -> Any:
        outputs = [output async for output in llm.generate(prompt, params)]
        return outputs[-1].outputs[0].failure

    async def found() -> list[Any]:
        options: dict[str, Any] = {"num_gpu_blocks_override": 60, "max_model_len": 256}
        async with AsyncLLM(data_parallel_size=2, max_num_seqs=1, max_waiting=1, **options) as llm:
            error = await failure(llm, {"prompt_token_ids": [3_000_000_000]})
            assert error.code == "invalid" and error.field == "prompt"
            await failure(llm, prompt)
            return await asyncio.gather(*(failure(llm, prompt) for _ in range(6)))

    errors = asyncio.run(found())
    assert errors.count(None) == 4 and {error.code for error in errors if error} == {"overloaded"}


def test_llm_refuses_data_parallel_size() -> None:
    with pytest.raises(PenstockError, match="LLM runs one engine"):
        LLM(data_parallel_size=2)


@pytest.mark.row("vllm", "--data-parallel-size", "-tp", "-pp", "-dp")
@pytest.mark.row("fastdeploy", "data_parallel_size")
@pytest.mark.parametrize(
    ("profile", "flag"),
    [("vllm", "-dp"), ("ascend-vllm", "--data-parallel-size"), ("fastdeploy", "--data-parallel-size")],
)
def test_compat_flags_set_data_parallel_size(capsys: pytest.CaptureFixture[str], profile: str, flag: str) -> None:
    assert main(["config", "--json", "--compat", profile, flag, "3"]) == 0
    assert json.loads(capsys.readouterr().out)["data_parallel_size"]["value"] == 3
