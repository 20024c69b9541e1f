"""FastDeploy's parameters: each sets an option, is ignored with a reason in the log, or is rejected by name."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving import Served, free_ports, run_in_process

from penstock import LLM, GuidedDecodingParams, PenstockError, SamplingParams
from penstock.cli.main import main
from penstock.frontend import fastdeploy

MESSAGES = [{"role": "user", "content": "What is the capital of Canada?"}]


def configured(*flags: str) -> dict[str, Any]:
    """Return the settings printed by ``penstock config``, and its log as ``stderr``."""
    found = run_in_process(main, "config", "--json", "--compat", "fastdeploy", *flags)
    assert found.returncode == 0, found
    return {name: setting["value"] for name, setting in json.loads(found.stdout).items()} | {"stderr": found.stderr}


@pytest.mark.slow
@pytest.mark.row("fastdeploy", "ports 8002 and 8003 between its processes", "engine_worker_queue_port")
@pytest.mark.row("fastdeploy", "cache_queue_port", "enable_mm")
def test_server_with_fastdeploy_ports_answers(tmp_path: Path) -> None:
    flags = "--metrics-port 0 --engine-worker-queue-port 8002 --cache-queue-port 8003 --num-gpu-blocks-override 172"
    flags += f" --enable-mm --log-file {tmp_path / 'log'} --compat fastdeploy"
    with Served(*flags.split()) as served:
        client = openai.OpenAI(base_url=served.url, api_key="none")
        fields: dict[str, Any] = {"model": "default", "messages": MESSAGES, "temperature": 0}
        answer = client.chat.completions.create(**fields)
        assert answer.choices[0].message.content == "The capital of Canada is Ottawa."
        with pytest.raises(openai.BadRequestError, match="logprobs: is disabled on this server"):
            next(iter(client.completions.create(model="default", prompt="x", logprobs=1, stream=True)))
        best = client.completions.create(model="default", prompt="x", n=1, extra_body={"best_of": 2})
        assert len(best.choices) == 1, "best_of must be allowed although logprobs are disabled"
        for name in ("cache_queue_port", "enable_mm"):
            assert any(f"--{name} is ignored" in line for line in served.lines), name
        assert f"--{name} is ignored" in (tmp_path / "log").read_text()


def test_defaults_equal_fastdeploy_defaults() -> None:
    found = configured()
    expected = {
        "port": 8000,
        "metrics_port": 8001,
        "max_queue_time": 0.0,
        "max_concurrency": 512,
        "max_model_len": 2048,
        "block_size": 64,
        "max_num_seqs": 8,
        "gpu_memory_utilization": 0.9,
        "num_gpu_blocks_override": 0,
        "max_num_batched_tokens": 2048,
        "kv_cache_ratio": 0.75,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "max_num_partial_prefills": 1,
        "max_long_partial_prefills": 1,
        "static_decode_blocks": 2,
        "guided_decoding_backend": "off",
        "guided_decoding_disable_any_whitespace": False,
        "speculative_config": "",
        "enable_logprob": False,
        "use_warmup": False,
        "log_file": "log/fastdeploy.log",
    }
    assert found == found | expected and not found["stderr"]


@pytest.mark.row("fastdeploy", "max_waiting_time", "max_concurrency", "port", "metrics_port", "guided_decoding_backend")
@pytest.mark.row(
    "fastdeploy",
    "max_num_batched_tokens",
    "long_prefill_token_threshold",
    "block_size",
    "tokenizer",
    "gpu_memory_utilization",
)
@pytest.mark.row(
    "fastdeploy",
    "swap_space",
    "max_num_partial_prefills",
    "max_long_partial_prefills",
    "static_decode_blocks",
    "quantization",
)
@pytest.mark.row(
    "fastdeploy",
    "use_warmup",
    "reasoning_parser",
    "guided_decoding_disable_any_whitespace",
    "speculative_config",
    "enable_logprob",
)
def test_each_parameter_sets_its_option() -> None:
    flags = "--port 8180 --metrics_port 8181 --max-waiting-time 5 --max-concurrency 100 --max-model-len 8192"
    flags += " --tensor-parallel-size 1 --data-parallel-size 1 --block-size 32 --max-num-seqs 16 --tokenizer /tokenizer"
    flags += " --quantization wint4 --gpu-memory-utilization 0.8 --num-gpu-blocks-override 90 --kv-cache-ratio 0.5"
    flags += " --enable-prefix-caching --swap-space 2 --enable-chunked-prefill --max-num-partial-prefills 3"
    flags += " --max-long-partial-prefills 2 --static-decode-blocks 3 --reasoning-parser ernie-x1"
    flags += " --guided-decoding-backend xgrammar --guided-decoding-disable-any-whitespace --enable-logprob"
    flags += " --splitwise-role mixed --dynamic-load-weight 0 --use-warmup 1"
    speculation = '{"method": "ngram", "num_speculative_tokens": 2}'
    found = configured(*flags.split(), "--speculative-config", speculation)
    expected = {
        "port": 8180,
        "metrics_port": 8181,
        "max_queue_time": 5.0,
        "max_concurrency": 100,
        "max_model_len": 8192,
        "max_num_batched_tokens": 8192,
        "long_prefill_token_threshold": 327,
        "block_size": 32,
        "max_num_seqs": 16,
        "tokenizer": "/tokenizer",
        "quantization": "wint4",
        "gpu_memory_utilization": 0.8,
        "num_gpu_blocks_override": 90,
        "kv_cache_ratio": 0.5,
        "enable_prefix_caching": True,
        "kv_offloading_size": 2.0,
        "swap_space": 4.0,
        "preemption_mode": "recompute",
        "enable_chunked_prefill": True,
        "max_num_partial_prefills": 3,
        "max_long_partial_prefills": 2,
        "static_decode_blocks": 3,
        "reasoning_parser": "ernie",
        "guided_decoding_backend": "xgrammar",
        "guided_decoding_disable_any_whitespace": True,
        "speculative_config": speculation,
        "enable_logprob": True,
        "use_warmup": True,
    }
    assert found == found | expected and not found["stderr"]
    explicit = configured(
        "--enable-chunked-prefill", "--long-prefill-token-threshold", "99", "--max-num-batched-tokens", "7"
    )
    assert (explicit["long_prefill_token_threshold"], explicit["max_num_batched_tokens"]) == (99, 7)


@pytest.mark.row("fastdeploy", "splitwise_role", "innode_prefill_ports", "engine_worker_queue_port", "pd_comm_port")
@pytest.mark.row("fastdeploy", "cache_transfer_protocol", "rdma_comm_ports", "router", "scheduler_name")
def test_prefill_and_decode_instances_are_configured_by_ports() -> None:
    common = "--cache-transfer-protocol rdma,ipc --rdma-comm-ports 7671,7672"
    prefill = configured(*f"--splitwise-role prefill --engine-worker-queue-port 8182 {common}".split())
    assert (prefill["role"], prefill["engine_address"]) == ("prefill", "0.0.0.0:8182")
    assert "--rdma_comm_ports is ignored: KV is transferred through shared memory" in prefill["stderr"]
    decode = configured(*"--splitwise-role decode --innode-prefill-ports 8182,8190 --scheduler-name local".split())
    assert (decode["role"], decode["prefill_instances"]) == ("decode", ["127.0.0.1:8182", "127.0.0.1:8190"])
    routed = configured(*"--splitwise-role prefill --pd-comm-port 2334 --router 10.0.0.1:9000".split())
    assert (routed["router_address"], routed["kv_port"]) == (["10.0.0.1:9000"], 2334)
    assert routed["engine_address"] == "0.0.0.0:0"
    mixed = configured("--engine-worker-queue-port", "8002")
    assert mixed["engine_address"] == configured()["engine_address"] and mixed["role"] == "mixed"


@pytest.mark.slow
@pytest.mark.row("fastdeploy", "python -m fastdeploy.router.launch")
def test_prefill_and_decode_instances_on_same_machine_answer(tmp_path: Path) -> None:
    """Both instances are started as in FastDeploy's documentation. Clients may send requests to either instance."""
    environment = {"XDG_CONFIG_HOME": str(tmp_path)}
    (port,) = free_ports(1)
    common = ("--compat", "fastdeploy", "--metrics-port", "0", "--num-gpu-blocks-override", "172")
    common += ("--log-file", str(tmp_path / "log"))
    roles = ("--splitwise-role prefill --engine-worker-queue-port", "--splitwise-role decode --innode-prefill-ports")
    started = [Served(*f"{role} {port}".split(), *common, environment=environment) for role in roles]
    with started[0] as prefill, started[1] as decode:
        decode.find(rf"the prefill instance at 127.0.0.1:{port} has joined")
        body = {"model": "default", "messages": MESSAGES, "temperature": 0}
        for served in (decode, prefill):
            answer = httpx.post(f"{served.url}/chat/completions", json=body).json()
            assert answer["choices"][0]["message"]["content"] == "The capital of Canada is Ottawa."
    assert main(["shims", str(tmp_path / "shims"), "fastdeploy"]) == 0
    command = (sys.executable, "-m", "fastdeploy.router.launch", "--splitwise", "--engine-address", "127.0.0.1:1")
    path = {"PYTHONPATH": str(tmp_path / "shims" / "modules")}
    router = subprocess.run(
        command, cwd=tmp_path / "shims", env=os.environ | path, capture_output=True, text=True, check=False
    )
    assert "engine_address: a router has no engine" in router.stderr


@pytest.mark.row("fastdeploy", "use_cudagraph", "graph_optimization_config")
def test_cuda_graph_parameters_set_options() -> None:
    assert configured()["enforce_eager"] is False
    assert configured("--use-cudagraph")["enforce_eager"] is False
    chosen = '{"use_cudagraph": false, "graph_opt_level": 1, "cudagraph_capture_sizes": [1, 3, 5]}'
    found = configured("--graph-optimization-config", chosen)
    assert found["enforce_eager"] is True and found["cudagraph_capture_sizes"] == [1, 3, 5]


@pytest.mark.row(
    "fastdeploy",
    "enable_mm",
    "enable_custom_all_reduce",
)
def test_ignored_parameters_are_reported() -> None:
    switches = ["enable-mm", "enable-custom-all-reduce"]
    output = configured(*[f"--{name}" for name in switches])["stderr"]
    for name in switches:
        assert f"--{name.replace('-', '_')} is ignored: " in output


@pytest.mark.row("fastdeploy", "mm_processor_kwargs", "limit_mm_per_prompt")
def test_image_and_video_limits_are_converted() -> None:
    kwargs = '{"image_min_pixels": 3136, "image_max_pixels": 9408, "video_fps": 2, "video_target_frames": -1}'
    found = configured("--mm-processor-kwargs", kwargs, "--limit-mm-per-prompt", '{"image": 10, "video": 3}')
    images, videos = {"min_pixels": 3136, "max_pixels": 9408}, {"fps": 2}
    assert json.loads(found["mm_processor_kwargs"]) == {"images_kwargs": images, "videos_kwargs": videos}
    assert found["limit_mm_per_prompt"] == '{"image": 10, "video": 3}'


@pytest.mark.row("fastdeploy", "enable_expert_parallel")
def test_expert_parallelism_is_enabled_by_parameter() -> None:
    assert configured("--enable-expert-parallel")["enable_expert_parallel"] is True


@pytest.mark.row("fastdeploy", "other parameters")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tensor-parallel-size 0", "--tensor-parallel-size: "),
        ("--splitwise-role both", "--splitwise_role: 'both' is wrong: it is not one of mixed, prefill, decode"),
        ("--innode-prefill-ports a", "--innode_prefill_ports: 'a' is wrong: "),
        ("--cache-transfer-protocol tcp", "--cache_transfer_protocol: 'tcp' is wrong: 'tcp' is neither ipc nor rdma"),
        ("--scheduler-name splitwise", "--scheduler_name: 'splitwise' is wrong: requests are distributed by a router"),
        ("--splitwise-role decode --engine-worker-queue-port x", "--engine_worker_queue_port: 'x' is not a port"),
        ("--dynamic-load-weight 2", "unknown argument 2"),
        ("--graph-optimization-config [1]", "--graph_optimization_config: '[1]' is wrong: it is not a JSON object"),
        ("--max-waiting-time soon", "--max_waiting_time: 'soon' is wrong"),
        ("--max-waiting-time -2", "--max_waiting_time: "),
        ("--max-model-len long", "--max_model_len: 'long' is not a number of tokens"),
        ("--reasoning-parser nobody", "--reasoning-parser: "),
        ("--max-num-sequence 8", "unknown argument --max-num-sequence; did you mean --max-num-seqs?"),
    ],
)
def test_invalid_parameter_is_rejected_by_name(capsys: pytest.CaptureFixture[str], flags: str, message: str) -> None:
    assert main(["config", "--compat", "fastdeploy", *flags.split()]) == 2
    assert message in capsys.readouterr().err


def test_llm_takes_parameters_of_server(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        llm = LLM(
            compat="fastdeploy",
            max_model_len=1024,
            max_num_seqs=4,
            num_gpu_blocks_override=64,
            tensor_parallel_size=1,
            enable_chunked_prefill=True,
            swap_space=0.01,
            graph_optimization_config={"use_cudagraph": False},
            enable_custom_all_reduce=False,
            quantization=None,
            guided_decoding_backend="auto",
            guided_decoding_disable_any_whitespace=True,
            port=8000,
        )
    options = llm.options
    assert (options.max_num_seqs, options.max_num_batched_tokens, options.kv_cache_ratio) == (4, 1024, 0.75)
    assert (options.long_prefill_token_threshold, options.preemption_mode, options.swap_space) == (40, "swap", 0.01)
    assert options.enforce_eager
    assert "enable_custom_all_reduce is ignored" in caplog.text and "port is ignored" in caplog.text
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    sampling = SamplingParams(temperature=0, guided_decoding=GuidedDecodingParams(json=schema))
    assert llm.chat(MESSAGES, sampling, use_tqdm=False)[0].outputs[0].text == '{"a":1}'
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"splitwise_role": "decode"}, "role: is decode, but LLM computes prompts and outputs"),
        ({"max_num_sequences": 1}, "max_num_sequences: no such option; did you mean max_num_seqs"),
        ({"max_num_seqs": 0}, "max_num_seqs: Expected `int` >= 1"),
        ({"quantization": "block_wise_fp8"}, "quantization: .* is wrong: it is not one of"),
        ({"max_waiting_time": -3}, "max_waiting_time: -3.0 is wrong: it must be at least 0"),
        ({"enable_prefix_caching": "maybe"}, "enable_prefix_caching: 'maybe' is wrong"),
        (
            {"speculative_config": {"method": "mtp", "model": "x"}},
            "speculative_config: model cannot be set with the method mtp",
        ),
    ]
    for wrong, message in refusals:
        with pytest.raises(PenstockError, match=message):
            LLM(compat="fastdeploy", **wrong)


def test_llm_results_have_fastdeploy_attributes() -> None:
    """FastDeploy documents the attributes of ``RequestOutput``, ``CompletionOutput`` and ``RequestMetrics``."""
    llm = LLM(compat="fastdeploy", num_gpu_blocks_override=64)
    sampling = SamplingParams(temperature=0, max_tokens=40)
    (output,) = llm.chat(MESSAGES, sampling, use_tqdm=False)
    found: Any = output.outputs
    assert (found.text, found.reasoning_content, found.tool_calls) == ("The capital of Canada is Ottawa.", None, None)
    assert (found.index, found.send_idx, found.completion_tokens) == (0, 0, found.text)
    assert found.token_ids == output.outputs[0].token_ids and found.logprobs is None, (
        "outputs must be usable as one sequence and as a list"
    )
    untyped_output: Any = output
    assert (untyped_output.error_code, untyped_output.error_msg, output.finished, output.num_cached_tokens) == (
        200,
        None,
        True,
        0,
    )
    metrics = untyped_output.metrics
    assert metrics.arrival_time <= metrics.inference_start_time and metrics.first_token_time > 0
    assert metrics.time_in_queue == pytest.approx(metrics.inference_start_time - metrics.arrival_time, abs=1e-3)
    thinking: list[Any] = llm.chat(MESSAGES, sampling, use_tqdm=False, chat_template_kwargs={"enable_thinking": True})
    message = thinking[0].outputs[0].message
    assert thinking[0].outputs.reasoning_content == message.reasoning_content
    assert thinking[0].outputs.text == message.content
    continued: list[Any] = llm.generate(["Once", "Twice"], sampling, use_tqdm=False)
    assert [result.outputs.text for result in continued] == [result.outputs[0].text for result in continued]


def test_fastdeploy_module_has_documented_arguments_and_defaults() -> None:
    llm = fastdeploy.LLM(model="", num_gpu_blocks_override=64)
    default = fastdeploy.SamplingParams()
    assert (default.max_tokens, default.min_tokens, default.temperature) == (None, 1, 1.0)
    greedy = fastdeploy.SamplingParams(top_p=0, temperature=None, max_tokens=4, bad_words_token_ids=[7, 8])
    assert (greedy.temperature, greedy.bad_word_ids) == (0, [(7,), (8,)])
    by_text: list[Any] = llm.generate({"prompt": "Once"}, greedy, False)
    by_ids: list[Any] = llm.generate([by_text[0].prompt_token_ids], greedy, False)
    assert by_text[0].outputs.text == by_ids[0].outputs.text
    with pytest.raises(PenstockError, match="multi_modal_data"):
        llm.generate([{"prompt": "Once", "multimodal_data": {"audio": []}}], greedy, False)
    with pytest.raises(PenstockError, match="stream"):
        llm.chat(MESSAGES, greedy, False, stream=True)
    assert (
        llm.chat(MESSAGES, greedy, False, chat_template="Q: {{ messages[0].content }}")[0].prompt
        == "Q: " + MESSAGES[0]["content"]
    )
