"""Flags of ``vllm serve``, with ``--compat vllm`` and without a profile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving import Served

from penstock import demo
from penstock.cli.main import main

PROFILES = pytest.mark.parametrize("profile", [[], ["--compat", "vllm"]], ids=["bare", "vllm"])


def configured(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["config", "--json", *flags]) == 0
    return {name: setting["value"] for name, setting in json.loads(capsys.readouterr().out).items()}


@pytest.mark.row("vllm", "--max-model-len 8k", "--max-num-batched-tokens 8K", "--kv-cache-memory-bytes 4G")
@pytest.mark.row("vllm", "--dtype half", "--dtype float", "--no-enable-prefix-caching", "--enable-chunked-prefill")
@pytest.mark.row("vllm", "--quantization awq")
@pytest.mark.row("vllm", "--generation-config", "--override-generation-config", "--max-logprobs")
@pytest.mark.row("vllm", "--tool-call-parser", "--reasoning-parser", "--structured-outputs-config")
@PROFILES
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--max-model-len 8k", {"max_model_len": 8000}),
        ("--max-model-len 2K", {"max_model_len": 2048}),
        ("--max-model-len 1.5k", {"max_model_len": 1500}),
        ("--max_model_len=auto", {"max_model_len": 0}),
        ("--max-model-len -1", {"max_model_len": 0}),
        ("--max-num-batched-tokens 8K", {"max_num_batched_tokens": 8192}),
        ("--kv-cache-memory-bytes 4G", {"kv_cache_memory_bytes": 4 * 2**30}),
        ("--dtype half", {"dtype": "float16"}),
        ("--dtype float", {"dtype": "float32"}),
        ("--dtype bfloat16", {"dtype": "bfloat16"}),
        ("--model-impl vllm", {"model_impl": "penstock"}),
        ("--quantization awq_marlin --load-format pt", {"quantization": "none", "load_format": "auto"}),
        ("--quantization fp8", {"quantization": "fp8"}),
        ("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
        ("--no-enable-chunked-prefill --max-num-batched-tokens 4096", {"enable_chunked_prefill": False}),
        ("--generation-config vllm", {"generation_config": "vllm"}),
        (
            '--override-generation-config {"temperature":0.5,"max_new_tokens":64}',
            {"override_generation_config": '{"temperature": 0.5}', "max_output_len": 64},
        ),
        ("--max-logprobs 5", {"max_logprobs": 5}),
        ("--enable-auto-tool-choice --tool-call-parser hermes", {"tool_call_parser": "hermes"}),
        ("--tool-call-parser qwen3_coder --reasoning-parser glm45", {"tool_call_parser": "qwen3_coder"}),
        ("--reasoning-parser ernie45", {"reasoning_parser": "ernie"}),
        (
            '--structured-outputs-config {"backend":"guidance","disable_any_whitespace":true}',
            {"guided_decoding_backend": "guidance", "guided_decoding_disable_any_whitespace": True},
        ),
        ("--served-model-name a b --api-key secret --seed 3", {"served_model_name": ["a", "b"], "seed": 3}),
        ("--gpu-memory-utilization 0.8 --swap-space 4", {"gpu_memory_utilization": 0.8, "swap_space": 4.0}),
        ("--max-num-seqs 8 --uvicorn-log-level warning", {"max_num_seqs": 8, "log_level": "warning"}),
        ('--allowed-origins ["http://a","http://b"]', {"allowed_origins": ["http://a", "http://b"]}),
        ("--allowed-origins http://a http://b", {"allowed_origins": ["http://a", "http://b"]}),
        (
            '--kv-transfer-config {"kv_connector":"P2pNcclConnector","kv_role":"kv_producer","kv_port":1400}',
            {"role": "prefill", "kv_port": 1400, "kv_transport": "auto"},
        ),
        (
            '--kv-transfer-config {"kv_connector":"NixlConnector","kv_role":"kv_consumer","kv_buffer_size":4096}',
            {"role": "decode", "kv_transport": "nixl", "kv_buffer_size": 4096},
        ),
        ("--kv-offloading-size 4 --kv-offloading-backend native", {"kv_offloading_size": 4.0}),
        (
            '--kv-transfer-config {"kv_connector":"OffloadingConnector","kv_role":"kv_both",'
            '"kv_connector_extra_config":{"cpu_bytes_to_use":1073741824}}',
            {"kv_offloading_size": 1.0, "role": "mixed"},
        ),
    ],
)
def test_flag_sets_option(
    capsys: pytest.CaptureFixture[str], profile: list[str], flags: str, expected: dict[str, Any]
) -> None:
    found = configured(capsys, *profile, *flags.split())
    assert found == found | expected


def test_vllm_profile_listens_at_all_addresses(capsys: pytest.CaptureFixture[str]) -> None:
    assert configured(capsys, "--enforce-eager")["host"] == "127.0.0.1"
    assert configured(capsys, "--compat", "vllm")["host"] == "0.0.0.0"


SWITCHES = """
--trust-remote-code --enable-auto-tool-choice --enable-prompt-tokens-details --enable-request-id-headers
--async-scheduling --no-async-scheduling --calculate-kv-scales --disable-hybrid-kv-cache-manager --fully-sharded-loras
--disable-log-requests --enable-log-requests --no-enable-log-requests --disable-log-stats
--disable-uvicorn-access-log --aggregate-engine-logging --language-model-only --disable-custom-all-reduce
""".split()
NEUTRAL = """
--attention-backend=FLASH_ATTN --prefix-caching-hash-algo=sha256 --runner=generate
--safetensors-load-strategy=lazy --max-cpu-loras=4 --show-hidden-metrics-for-version=0.9
--mm-processor-cache-gb=4
--max-log-len=100 --max-parallel-loading-workers=2 --max-seq-len-to-capture=8192
""".split()
DEFAULTS = """
-tp=1 -pp=1 -dp=1 --tensor-parallel-size=1 --pipeline-parallel-size=1 --data-parallel-size=1 --nnodes=1
--chat-template-content-format=auto --config-format=auto --model-impl=auto --logprobs-mode=raw_logprobs
--task=generate --lora-dtype=auto --stream-interval=1 --cpu-offload-gb=0 --tokenizer-mode=auto --response-role=assistant
""".split()


@pytest.mark.row("vllm", "--enforce-eager", "--cudagraph-capture-sizes", "--max-cudagraph-capture-size")
@pytest.mark.row("vllm", "--compilation-config", "-O")
def test_cuda_graph_flags_set_options(capsys: pytest.CaptureFixture[str]) -> None:
    eager, sizes = "enforce_eager", "cudagraph_capture_sizes"
    assert configured(capsys, "--enforce-eager")[eager] is True
    assert configured(capsys, "--cudagraph-capture-sizes", "1", "2")[sizes] == [1, 2]
    assert configured(capsys, "--max-cudagraph-capture-size", "20")[sizes] == [1, 2, 4, 8, 16, 20]
    compilation = configured(
        capsys, "--compilation-config", '{"cudagraph_capture_sizes": [3], "cudagraph_mode": "NONE"}'
    )
    assert compilation[eager] is True and compilation[sizes] == [3]
    for flags in (["-O3"], ["-O", '{"level": 3}'], ["-O", '{"cudagraph_mode": "FULL"}']):
        assert configured(capsys, *flags)[eager] is False


@pytest.mark.row("vllm", "--limit-mm-per-prompt", "--mm-processor-kwargs", "--media-io-kwargs")
@pytest.mark.row("vllm", "--allowed-local-media-path", "--allowed-media-domains")
def test_multimodal_flags_set_options(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--limit-mm-per-prompt", '{"image": 2}', "--mm-processor-kwargs", '{"max_pixels": 9408}']
    flags += ["--media-io-kwargs", '{"video": {"num_frames": 8}}']
    flags += ["--allowed-local-media-path", "/pictures", "--allowed-media-domains", "a.example", "b.example"]
    found = configured(capsys, *flags)
    assert found["limit_mm_per_prompt"] == '{"image": 2}' and found["mm_processor_kwargs"] == '{"max_pixels": 9408}'
    assert found["media_io_kwargs"] == '{"video": {"num_frames": 8}}'
    assert found["allowed_local_media_path"] == "/pictures"
    assert found["allowed_media_domains"] == ["a.example", "b.example"]


@pytest.mark.row("vllm", "--enable-expert-parallel", "-ep")
def test_expert_parallel_flag_sets_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert configured(capsys, "--enable-expert-parallel")["enable_expert_parallel"] is True
    assert configured(capsys, "--compat", "vllm", "-ep")["enable_expert_parallel"] is True


@pytest.mark.row("vllm", "--eplb-config", "--enable-eplb", "--expert-placement-strategy", "--all2all-backend")
def test_expert_load_flags_set_options(capsys: pytest.CaptureFixture[str]) -> None:
    config = '{"num_redundant_experts": 3, "log_balancedness": true}'
    found = configured(capsys, "--eplb-config", config, "--all2all-backend", "naive")
    assert found["num_redundant_experts"] == 3 and found["expert_load"] is True
    assert configured(capsys, "--expert-placement-strategy", "linear")["expert_placement"] == ""
    for flags in (["--enable-eplb"], ["--eplb-config", '{"step_interval": 3000}']):
        assert main(["config", *flags])
    assert "experts are not rebalanced at run time" in capsys.readouterr().err


@pytest.mark.row("vllm", "--enable-auto-tool-choice", "--enable-prompt-tokens-details", "--enable-request-id-headers")
@pytest.mark.row("vllm", "--async-scheduling", "--attention-backend")
@pytest.mark.row("vllm", "--calculate-kv-scales", "--prefix-caching-hash-algo", "--disable-hybrid-kv-cache-manager")
@pytest.mark.row(
    "vllm", "--safetensors-load-strategy", "--max-cpu-loras", "--fully-sharded-loras", "--runner", "--task"
)
@pytest.mark.row("vllm", "--enable-log-requests", "--disable-uvicorn-access-log")
@pytest.mark.row("vllm", "--aggregate-engine-logging", "--show-hidden-metrics-for-version")
@pytest.mark.row("vllm", "--mm-processor-cache-gb")
@pytest.mark.row("vllm", "--language-model-only")
@PROFILES
def test_flags_without_effect_are_accepted_and_reported(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], profile: list[str]
) -> None:
    expected_options = configured(capsys, *profile)
    assert configured(capsys, *profile, *SWITCHES, *NEUTRAL, *DEFAULTS) == expected_options
    reported = {line.partition(" is ignored")[0] for line in caplog.messages}
    names = {flag.partition("=")[0].replace("--no-", "--") for flag in (*SWITCHES, *NEUTRAL)}
    expected = {f"--{name.removeprefix('--').replace('-', '_')}" for name in names - {"-O3"}}
    assert reported == expected


@pytest.mark.row("vllm", "--chat-template-content-format")
@pytest.mark.row("vllm", "--config-format", "--model-impl", "--logprobs-mode", "--lora-dtype", "--stream-interval")
@pytest.mark.row(
    "vllm", "--cpu-offload-gb", "--kv-transfer-config", "--tool-parser-plugin", "--reasoning-parser-plugin"
)
@pytest.mark.row("vllm", "--kv-offloading-size", "--kv-offloading-backend")
@pytest.mark.row("vllm", "--logits-processors", "--middleware")
@PROFILES
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("-tp 0", "--tensor-parallel-size: '0' is wrong: it must be at least 1"),
        ("--tensor-parallel-size=99", "--tensor-parallel-size: '99' is wrong: it must be at most 32"),
        ("--nnodes 0", "--nnodes: '0' is wrong: it must be at least 1"),
        ("--chat-template-content-format openai", "--chat_template_content_format: 'openai' is wrong"),
        ("--config-format mistral", "--config_format: 'mistral' is wrong"),
        ("--model-impl terratorch", "'terratorch' is wrong: it is not one of auto, vllm"),
        ("--logprobs-mode raw_logits", "--logprobs_mode: 'raw_logits' is wrong"),
        ("--lora-dtype float16", "--lora_dtype: 'float16' is wrong"),
        ("--stream-interval 10", "--stream_interval: '10' is wrong"),
        ("--cpu-offload-gb 4", "--cpu_offload_gb: '4' is wrong"),
        ("--kv-offloading-backend lmcache", "--kv_offloading_backend: 'lmcache' is wrong"),
        ('--kv-transfer-config {"kv_connector":"OffloadingConnector"}', "must have cpu_bytes_to_use"),
        ("--kv-transfer-config {}", "kv_role must be kv_producer or kv_consumer"),
        ('--kv-transfer-config {"kv_role":"kv_both"}', "omit this flag for an instance with both roles"),
        (
            '--kv-transfer-config {"kv_role":"kv_producer","kv_connector_extra_config":{}}',
            "kv_connector_extra_config is not supported",
        ),
        ("--tool-parser-plugin a.py", "--tool_parser_plugin: 'a.py' is wrong: loading code is not supported"),
        ("--reasoning-parser-plugin a.py", "--reasoning_parser_plugin: 'a.py' is wrong"),
        ("--logits-processors a:B", "--logits_processors: 'a:B' is wrong"),
        ("--middleware a.B", "--middleware: 'a.B' is wrong"),
        ("--max-model-len 8q", "--max-model-len: '8q' is wrong: it is not a number such as 4096, 4k or 4K"),
        ("--max-model-len 1.5K", "--max-model-len: '1.5K' is wrong"),
        ("--dtype fp8", "--dtype: 'fp8' is wrong: it is not one of auto, float16"),
        ("--tool-call-parser nobody", "--tool-call-parser: 'nobody' is wrong: it is not one of auto, generic, "),
        ("--max-logprobs 50", "max_logprobs: 50 is wrong: it must be at most 20, in --max-logprobs"),
        ("--override-generation-config {", "--override-generation-config: '{' is wrong: it is not JSON"),
        ('--override-generation-config {"temprature":1}', "Unexpected keyword argument 'temprature'"),
        ('--override-generation-config {"top_p":2}', "top_p: must be at most 1, is 2"),
        ('--structured-outputs-config {"backend":"x"}', "--structured_outputs_config: "),
        ('--structured-outputs-config {"reasoning_parser":"x"}', "reasoning_parser is not supported"),
        ("--quantization nvfp4", "'nvfp4' is wrong: it is not one of none, w8a8"),
        ("--enforce-eagre", "unknown argument --enforce-eagre; did you mean --enforce-eager?"),
    ],
)
def test_unsupported_value_is_rejected_by_name(
    capsys: pytest.CaptureFixture[str], profile: list[str], flags: str, message: str
) -> None:
    try:
        status: object = main(["config", *profile, *flags.split()])
    except SystemExit as ended:
        status = ended.code
    (line,) = capsys.readouterr().err.splitlines()
    assert status == 2 and message in line


def test_help_lists_vllm_flags_separately(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help=all"])
    own, _, of_vllm = capsys.readouterr().out.partition("options of vLLM")
    assert "--dtype {auto,bfloat16,float16,float32}" in own and "Data type of the computation" in own
    assert "\n  --dtype " not in of_vllm and "--trust-remote-code" in of_vllm


# --- Server -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Server started by ``vllm serve MODEL …``."""
    folder = tmp_path_factory.mktemp("shims")
    assert main(["shims", str(folder), "vllm"]) == 0
    flags = "-tp 1 --trust-remote-code --enforce-eager --dtype auto --enable-auto-tool-choice --tool-call-parser hermes"
    flags += " --max-model-len 1k --max-num-seqs 8 --max-logprobs 3 --gpu-memory-utilization 0.9 --disable-log-requests"
    flags += ' --served-model-name qwen --override-generation-config {"temperature":0,"max_new_tokens":20}'
    flags += " --num-gpu-blocks-override 100 --root-path /behind/a"
    with Served(*flags.split(), command=[str(folder / "vllm"), "serve", str(demo.CHAT)]) as served:
        yield served


def ask(served: Served, **fields: Any) -> httpx.Response:
    body = {"model": "qwen", "prompt": "Once upon a time", **fields}
    return httpx.post(f"{served.url}/completions", json=body, timeout=60)


def test_vllm_serve_command_runs_unmodified(served: Served) -> None:
    assert served.name == "qwen"
    assert any("--trust_remote_code is ignored: " in line for line in served.lines)
    (model,) = httpx.get(f"{served.url}/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("qwen", 1000)


def test_override_generation_config_sets_defaults_and_limit(served: Served) -> None:
    first, again, greedy = (ask(served, **fields).json() for fields in ({}, {}, {"temperature": 0}))
    assert first["choices"][0]["text"] == again["choices"][0]["text"] == greedy["choices"][0]["text"]
    beyond = ask(served, max_tokens=21)
    assert beyond.status_code == 400 and "more than max_output_len (20)" in beyond.json()["error"]["message"]
    sampled = {ask(served, temperature=1, seed=seed).json()["choices"][0]["text"] for seed in range(4)}
    assert sampled != {first["choices"][0]["text"]}, "the request's temperature must override the default"


@pytest.mark.row("vllm", "--root-path")
def test_root_path_prefix_is_optional_in_requests(served: Served) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 4}
    for prefix in ("/behind/a", ""):
        assert httpx.post(f"{served.root}{prefix}/v1/completions", json=body).status_code == 200
        assert httpx.get(f"{served.root}{prefix}/health").status_code == 200
        assert httpx.get(f"{served.root}{prefix}/v1/models").json()["data"][0]["id"] == "qwen"
        assert "unknown model" in httpx.get(f"{served.root}{prefix}/v2/models/none").json()["error"]
    for path in ("/behind/ab/health", "/behind/health", "/behind/a/behind/a/health"):
        assert httpx.get(f"{served.root}{path}").status_code == 404
    assert '<base href="/behind/a/">' in httpx.get(f"{served.root}/behind/a").text  # path of the web page
    assert httpx.get(f"{served.root}/behind/a/openapi.json").json()["servers"] == [{"url": "/behind/a"}]


def test_invalid_root_path_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    for prefix in ("behind", "/"):
        assert main(["config", "--root-path", prefix]) == 2
        assert "root_path" in capsys.readouterr().err


@pytest.mark.slow
def test_completion_without_max_tokens_keeps_max_output_len() -> None:
    with Served("--num-gpu-blocks-override", "50", "--max-output-len", "4") as served:
        for path, headers, body in (
            ("/v1/completions", {}, {"prompt": "Once upon a time", "temperature": 0}),
            ("/v1/completions", {"authorization": "TOKEN"}, {"prompt": "Once upon a time", "temperature": 0}),
            ("/generate", {}, {"prompt": "Once upon a time", "temperature": 0}),
        ):
            answer = httpx.post(f"{served.root}{path}", json=body, headers=headers, timeout=60)
            assert answer.status_code == 200, answer.text
            if path == "/v1/completions":
                assert answer.json()["usage"]["completion_tokens"] == 4


def test_logprobs_above_max_logprobs_are_rejected(served: Served) -> None:
    assert len(ask(served, logprobs=3).json()["choices"][0]["logprobs"]["top_logprobs"][0]) >= 3
    refused = ask(served, logprobs=4)
    assert (
        refused.status_code == 400
        and "must be at most 3 on this server (max_logprobs)" in refused.json()["error"]["message"]
    )
