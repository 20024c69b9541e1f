"""Examples of FastDeploy's parameter documentation: flags, log line, metrics, and ``LLM`` with all parameters."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from repository import ROOT
from serving import Served
from shell import Shell

from penstock import LLM, PenstockError, SamplingParams, demo

START = """
export PYTHONPATH=${shims}
exec python -m fastdeploy.entrypoints.openai.api_server \\
    --model ${model} \\
    --use-cudagraph \\
    --graph-optimization-config '{"cudagraph_capture_sizes": [1, 3, 5, 7, 9]}' \\
    --enable-prefix-caching --enable-chunked-prefill \\
    --num-gpu-blocks-override 172 --metrics-port 0 --max-concurrency 4 --max-waiting-time 1
"""
BLOCKS = r"Reset block num, the total_block_num:(\d+), prefill_kvcache_block_num:(\d+)"
NAMES = set(re.findall(r"`fastdeploy:(\w+)`", (ROOT / "docs/dialects/fastdeploy.md").read_text()))
ABSENT = {"first_token_latency", "infer_latency", "send_cache_failed_num"}
"""Documented metrics that Penstock does not have."""
QUESTION = [{"role": "user", "content": "What is the capital of Canada?"}]
LONG = "The fox and the owl went to the river, and the river said: " * 8
"""Prompt that fills several KV blocks."""


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    result = Shell(tmp_path_factory.mktemp("fastdeploy"))
    result.environment |= {"shims": str(result.programs / "modules"), "model": str(demo.CHAT)}
    return result


@pytest.fixture(scope="module")
def served(shell: Shell) -> Iterator[Served]:
    with Served(command=shell.command(START), environment=shell.environment) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url, api_key="none", max_retries=0)


@pytest.mark.row("fastdeploy", "python -m fastdeploy.entrypoints.openai.api_server")
@pytest.mark.row("fastdeploy", "Reset block num, the total_block_num:N, prefill_kvcache_block_num:M")
@pytest.mark.row("fastdeploy", "log/fastdeploy.log", "num_gpu_blocks_override", "kv_cache_ratio")
def test_log_file_has_documented_line(shell: Shell, served: Served, client: openai.OpenAI) -> None:
    client.chat.completions.create(model="default", messages=QUESTION)
    total, prefill = map(int, served.find(BLOCKS).groups())
    assert (total, prefill) == (172, 129), "kv_cache_ratio is 0.75"
    served.find("POST /v1/chat/completions")
    file = (shell.folder / "log" / "fastdeploy.log").read_text()
    assert re.search(BLOCKS, file)
    for message in ("serve: ready: ", "engine: ", "api: POST /v1/chat/completions"):
        assert message in file, message


@pytest.mark.row("fastdeploy", "use_cudagraph", "graph_optimization_config", "@support_graph_optimization")
def test_documented_graph_options_are_accepted(shell: Shell, served: Served) -> None:
    file = (shell.folder / "log" / "fastdeploy.log").read_text()
    for name in ("use_cudagraph", "graph_optimization_config"):
        assert f"--{name} is ignored" not in file


@pytest.mark.row("fastdeploy", "port 8000 for requests, 8001 for metrics", "/metrics", "enable_prefix_caching")
@pytest.mark.row("fastdeploy", "fastdeploy:num_requests_running", "fastdeploy:batch_size", "fastdeploy:requests_number")
@pytest.mark.row("fastdeploy", "fastdeploy:num_requests_waiting", "fastdeploy:max_batch_size")
@pytest.mark.row("fastdeploy", "fastdeploy:available_batch_size", "fastdeploy:gpu_cache_usage_perc")
@pytest.mark.row("fastdeploy", "fastdeploy:max_gpu_block_num", "fastdeploy:available_gpu_block_num")
@pytest.mark.row("fastdeploy", "fastdeploy:free_gpu_block_num", "fastdeploy:available_gpu_resource")
@pytest.mark.row("fastdeploy", "fastdeploy:cache_config_info", "fastdeploy:hit_req_rate", "fastdeploy:hit_token_rate")
@pytest.mark.row("fastdeploy", "fastdeploy:gpu_hit_token_rate", "fastdeploy:prefix_cache_token_num")
@pytest.mark.row("fastdeploy", "fastdeploy:prefix_gpu_cache_token_num", "fastdeploy:cpu_hit_token_rate")
@pytest.mark.row("fastdeploy", "fastdeploy:prefix_cpu_cache_token_num", "fastdeploy:time_to_first_token_seconds")
@pytest.mark.row("fastdeploy", "fastdeploy:time_per_output_token_seconds", "fastdeploy:e2e_request_latency_seconds")
@pytest.mark.row("fastdeploy", "fastdeploy:request_queue_time_seconds", "fastdeploy:request_inference_time_seconds")
@pytest.mark.row("fastdeploy", "fastdeploy:request_prefill_time_seconds", "fastdeploy:request_decode_time_seconds")
@pytest.mark.row("fastdeploy", "fastdeploy:request_prompt_tokens", "fastdeploy:request_generation_tokens")
@pytest.mark.row("fastdeploy", "fastdeploy:prompt_tokens", "fastdeploy:generation_tokens", "fastdeploy:request_success")
@pytest.mark.row("fastdeploy", "fastdeploy:request_params_max_tokens", "fastdeploy:first_token_latency")
@pytest.mark.row("fastdeploy", "fastdeploy:infer_latency", "fastdeploy:send_cache_failed_num")
def test_metrics_have_documented_names_and_add_up(served: Served, client: openai.OpenAI) -> None:
    before = metrics_of(served)
    for _ in range(2):
        client.completions.create(model="default", prompt=LONG, max_tokens=5, extra_body={"ignore_eos": True})
    metrics_url = served.find(r"health and metrics at (\S+)")[1]
    deadline = time.monotonic() + 60
    while (found := metrics_of(served))["available_gpu_block_num"] != 172:  # the engine reports metrics asynchronously
        assert time.monotonic() < deadline, found
    page = httpx.get(f"{metrics_url}/metrics").text
    for name in NAMES:
        assert (re.search(rf"^fastdeploy:{name}(_total|_count|){{", page, re.MULTILINE) is None) == (name in ABSENT)

    def increase(name: str) -> float:
        return found[name] - before[name]

    assert (found["max_gpu_block_num"], found["free_gpu_block_num"], found["available_gpu_resource"]) == (172, 172, 1)
    assert (found["max_batch_size"], found["available_batch_size"], found["batch_size"]) == (8, 8, 0)
    assert increase("requests_number_total") == increase("request_success_total") == 2
    assert increase("generation_tokens_total") == 10 == increase("request_params_max_tokens_sum")
    cached = increase("prefix_cache_token_num_total")
    assert 0 < cached < increase("prompt_tokens_total") / 2 and cached == increase("prefix_gpu_cache_token_num_total")
    ratio = found["prefix_cache_token_num_total"] / found["prompt_tokens_total"]
    assert found["hit_token_rate"] == found["gpu_hit_token_rate"] == pytest.approx(ratio)
    assert found["hit_req_rate"] == pytest.approx(1 / found["requests_number_total"])
    assert found["cpu_hit_token_rate"] == found["prefix_cpu_cache_token_num_total"] == 0, "no prefix was evicted"
    spans = [increase(f"request_{part}_time_seconds_sum") for part in ("inference", "prefill", "decode")]
    assert spans[0] == pytest.approx(spans[1] + spans[2]) and min(spans) > 0
    (config,) = re.findall(r"^fastdeploy:cache_config_info{(.*)} 1.0", page, re.MULTILINE)
    assert 'block_size="64"' in config and 'num_gpu_blocks="172"' in config


def metrics_of(served: Served) -> dict[str, float]:
    """Return the values of FastDeploy's metrics by name, summed over labels. Histogram buckets are left out."""
    found: dict[str, float] = {}
    page = httpx.get(f"{served.root}/metrics").text
    for name, value in re.findall(r"^fastdeploy:(\w+){[^}]*} (\S+)$", page, re.MULTILINE):
        found[name] = found.get(name, 0.0) + float(value)
    return found


@pytest.mark.row("fastdeploy", "max_model_len", "max_num_seqs", "max_concurrency", "max_waiting_time", "enable_logprob")
@pytest.mark.row("fastdeploy", "guided_decoding_backend", "port", "metrics_port", "enable_chunked_prefill")
def test_limits_equal_parameters(served: Served, client: openai.OpenAI) -> None:
    """The limits of this server: 2048 tokens, 8 sequences, 4 connections, no guided decoding, no logprobs."""
    (model,) = httpx.get(f"{served.url}/models").json()["data"]
    assert model["max_model_len"] == 2048
    for wrong, message in (
        ({"logprobs": True}, "logprobs: is disabled on this server"),
        ({"response_format": {"type": "json_object"}}, "guided"),
        ({"messages": [{"role": "user", "content": "fox " * 3000}]}, "maximum context length is 2048"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            client.chat.completions.create(**{"model": "default", "messages": QUESTION} | wrong)
    body: dict[str, Any] = {"prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "stream": True, "n": 2}
    streams = [httpx.Client().stream("POST", f"{served.url}/completions", json=body, timeout=60) for _ in range(4)]
    lines = [stream.__enter__().iter_lines() for stream in streams]
    try:
        for stream_lines in lines:
            next(stream_lines)  # each stream runs two sequences: eight in total
        fifth = httpx.post(f"{served.url}/completions", json={"prompt": "x"})
        assert fifth.status_code == 429 and fifth.json()["error"]["param"] == "max_concurrency"
        streams.pop().__exit__(None, None, None)
        served.find("POST /v1/completions.*error=cancelled")
    finally:
        for stream in streams:
            stream.__exit__(None, None, None)


# --- LLM --------------------------------------------------------------------------------------------------------------

SAME_NAME: dict[str, Any] = {
    "enable_expert_parallel": True,
    "max_model_len": 1024,
    "block_size": 32,
    "max_num_seqs": 4,
    "gpu_memory_utilization": 0.5,
    "num_gpu_blocks_override": 64,
    "max_num_batched_tokens": 512,
    "kv_cache_ratio": 0.5,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "max_num_partial_prefills": 3,
    "max_long_partial_prefills": 2,
    "long_prefill_token_threshold": 99,
    "static_decode_blocks": 3,
    "guided_decoding_backend": "auto",
    "guided_decoding_disable_any_whitespace": True,
    "quantization": "wint8",
    "use_warmup": 1,
}
"""Parameters that set the option of the same name."""
IGNORED: dict[str, Any] = {
    "port": 8000,
    "metrics_port": 8001,
    "max_concurrency": 512,
    "cache_queue_port": 8003,
    "enable_mm": True,
    "enable_custom_all_reduce": True,
    "dynamic_load_weight": 0,
}
ONE_VALUE: dict[str, Any] = {
    "tensor_parallel_size": 1,
    "data_parallel_size": 1,
    "splitwise_role": "mixed",
    "innode_prefill_ports": None,
}
REST: dict[str, Any] = {
    "mm_processor_kwargs": {"image_min_pixels": 3136, "video_fps": 2},
    "limit_mm_per_prompt": {"image": 10, "video": 3},
    "use_cudagraph": True,
    "graph_optimization_config": {"use_cudagraph": False, "graph_opt_level": 0, "cudagraph_capture_sizes": None},
    "engine_worker_queue_port": 8002,
    "max_waiting_time": -1,
    "ips": "127.0.0.1",
    "tokenizer": str(demo.CHAT),
    "reasoning_parser": "ernie-x1",
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
    "enable_logprob": True,
    "swap_space": 0.01,
}


@pytest.mark.row("fastdeploy", "from fastdeploy import LLM", "block_size", "tokenizer", "gpu_memory_utilization")
def test_llm_accepts_all_documented_parameters(caplog: pytest.LogCaptureFixture) -> None:
    document = re.search(r"\n\| parameter.*?\n\n", (ROOT / "docs/dialects/fastdeploy.md").read_text(), re.DOTALL)
    assert document
    cells = [line.split(" | ")[0] for line in document[0].splitlines()]
    parameters = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    arguments = SAME_NAME | IGNORED | ONE_VALUE | REST
    assert arguments.keys() == parameters
    llm = LLM(demo.CHAT, compat="fastdeploy", **arguments)
    for name, value in SAME_NAME.items():
        assert getattr(llm.options, name) == value, name
    assert (llm.options.kv_offloading_size, llm.options.max_queue_time) == (0.01, 0.0), (
        "swap_space must set the size of KV offloading"
    )
    assert json.loads(llm.options.speculative_config) == REST["speculative_config"]
    assert llm.options.enforce_eager, "graph_optimization_config must disable CUDA graphs"
    ignored = {record.args[0] for record in caplog.records if "is ignored" in record.msg}
    assert ignored == IGNORED.keys()
    (output,) = llm.chat(QUESTION, SamplingParams(temperature=0, logprobs=1), use_tqdm=False)
    assert output.outputs[0].text == "The capital of Canada is Ottawa." and output.outputs[0].logprobs


@pytest.mark.row("fastdeploy", "enable_logprob")
def test_llm_rejects_logprobs_unless_enabled() -> None:
    llm = LLM(compat="fastdeploy", num_gpu_blocks_override=64)
    assert (llm.options.max_model_len, llm.options.max_num_seqs, llm.options.kv_cache_ratio) == (2048, 8, 0.75)
    for fields in ({"logprobs": 0}, {"prompt_logprobs": 1}):
        with pytest.raises(PenstockError, match=f"{next(iter(fields))}: is disabled on this server"):
            llm.generate("Once", SamplingParams(**fields), use_tqdm=False)
    best = SamplingParams(temperature=1, best_of=3, n=1, max_tokens=3)
    assert len(llm.generate("Once", best, use_tqdm=False)[0].outputs) == 1, (
        "best_of must be allowed although logprobs are disabled"
    )


def test_renamed_log_file_is_recreated(shell: Shell, served: Served, client: openai.OpenAI) -> None:
    log = shell.folder / "log"
    (log / "fastdeploy.log").rename(log / "fastdeploy.log.1")
    before = len(served.lines)
    client.completions.create(model="default", prompt="x", max_tokens=1)
    served.find("POST /v1/completions", after=before)
    (line,) = (log / "fastdeploy.log").read_text().splitlines()
    assert "api: POST /v1/completions" in line
    assert re.search(BLOCKS, (log / "fastdeploy.log.1").read_text())


def test_unwritable_log_file_is_reported(shell: Shell) -> None:
    Path(shell.folder, "file").touch()
    ran = shell.run("penstock serve --compat fastdeploy --log-file file/fastdeploy.log")
    assert ran.returncode == 2
    (line,) = ran.stderr.splitlines()
    assert line.startswith("penstock serve: log_file: cannot write file/fastdeploy.log (")


# --- Fields of requests -----------------------------------------------------------------------------------------------


@pytest.mark.row("fastdeploy", "model", "top_p", "return_token_ids", "metadata")
def test_fields_of_fastdeploy_clients_are_accepted(client: openai.OpenAI) -> None:
    """FastDeploy's clients send arbitrary JSON in metadata, the model "null", and ``top_p: 0`` for greedy sampling."""
    greedy = client.chat.completions.create(model="null", messages=QUESTION, temperature=0, max_tokens=12)
    more: dict[str, Any] = {"return_token_ids": True, "metadata": {"raw": [1, {"deep": None}], "n": 2.5}}
    fields: dict[str, Any] = {"model": "null", "messages": QUESTION, "max_tokens": 12, "top_p": 0, "extra_body": more}
    found: Any = client.chat.completions.create(**fields, temperature=1.5)
    message = found.choices[0].message
    assert message.content == greedy.choices[0].message.content
    assert len(message.completion_token_ids) == found.usage.completion_tokens
    assert len(message.prompt_token_ids) == found.usage.prompt_tokens
    chunks: Any = list(client.chat.completions.create(**fields, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].prompt_token_ids == message.prompt_token_ids
    assert all(delta.prompt_token_ids is None for delta in deltas[1:])
    assert [token for delta in deltas[1:] for token in delta.completion_token_ids] == message.completion_token_ids


@pytest.mark.row("fastdeploy", "prompt_token_ids", "disable_chat_template")
def test_prompt_token_ids_and_disable_chat_template_equal_prompt(client: openai.OpenAI) -> None:
    plain: dict[str, Any] = {"model": "default", "temperature": 0, "max_tokens": 8}
    text = client.completions.create(**plain, prompt=LONG, extra_body={"return_token_ids": True})
    ids = text.choices[0].prompt_token_ids  # type: ignore[attr-defined]
    assert len(text.choices[0].completion_token_ids) == 8  # type: ignore[attr-defined]
    for fields in ({"prompt": "something else", "prompt_token_ids": ids}, {"prompt": "", "prompt_token_ids": [ids]}):
        again = client.completions.create(**plain, prompt=fields["prompt"], extra_body=fields)
        assert again.choices[0].text == text.choices[0].text
    with pytest.raises(openai.BadRequestError, match="prompt_token_ids"):
        client.completions.create(**plain, prompt="a", extra_body={"prompt_token_ids": [1, [2]]})
    messages: Any = [{"role": "user", "content": LONG}]
    raw = client.chat.completions.create(**plain, messages=messages, extra_body={"disable_chat_template": True})
    assert raw.choices[0].message.content == text.choices[0].text
    assert raw.usage and text.usage and raw.usage.total_tokens == text.usage.total_tokens


@pytest.mark.row("fastdeploy", "/config-info", "/v1/abort_requests")
def test_config_info_and_abort_requests_return_documented_fields(served: Served, client: openai.OpenAI) -> None:
    metrics = served.find(r"health and metrics at (\S+)")[1]
    for root in (served.root, metrics):
        found = httpx.get(f"{root}/config-info").json()
        assert found["engine"]["num_gpu_blocks_override"] == 172 and found["server"]["api_key"] in ([], "***")
    endless: dict[str, Any] = {"messages": QUESTION, "max_tokens": 1900, "extra_body": {"ignore_eos": True}}

    def abort(**body: Any) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.post(f"{served.url}/abort_requests", json=body).raise_for_status().json()
        return answer["result"]  # type: ignore[no-any-return]

    for by_id in (True, False):
        stream = client.chat.completions.create(model="default", stream=True, **endless)
        first = next(stream)
        found = abort(req_ids=[first.id, "another"]) if by_id else abort(abort_all=True)
        (aborted,) = found["aborted"]
        assert first.id.endswith(aborted["request_id"].removeprefix("chatcmpl-")) and aborted["output_token_count"] > 0
        assert found["not_found"] == (["another"] if by_id else [])
        with pytest.raises(openai.APIError, match="cancelled"):
            list(stream)
    assert httpx.post(f"{served.url}/abort_requests", json={}).status_code == 400
