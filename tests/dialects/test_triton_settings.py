"""Triton's flags and config.pbtxt parameters: each sets an option, is ignored with a reason, or is rejected by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from test_triton_profile import config, filled
from triton_templates import write_templates

from penstock import demo
from penstock.cli.compat.repository_parameters import PARAMETERS, has_gpus
from penstock.cli.main import main


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return filled(write_templates(tmp_path_factory.mktemp("models") / "triton"), demo.CHAT)


def changed(repository: Path, folder: Path, model: str, line: str) -> list[str]:
    """Copy the repository to a folder, replacing a line of one model's config.pbtxt; return the flags for the copy."""
    for file in repository.glob("*/config.pbtxt"):
        text = file.read_text()
        if file.parent.name == model:
            key = line.partition("value: ")[0] if line.startswith("parameters") else line.partition(" ")[0]
            text = "\n".join([other for other in text.splitlines() if not other.startswith(key)] + [line])
        (folder / file.parent.name).mkdir(parents=True)
        (folder / file.parent.name / "config.pbtxt").write_text(text)
    return ["--model-repository", str(folder)]


def parameter(key: str, value: str) -> str:
    return f'parameters: {{ key: "{key}" value: {{ string_value: "{value}" }} }}'


# --- Flags ----------------------------------------------------------------------------------------------------------


@pytest.mark.row(
    "triton", "--http-port", "--http-address", "--grpc-port", "--metrics-port", "--allow-grpc", "--allow-http"
)
@pytest.mark.row("triton", "--allow-http", "--allow-metrics", "--log-verbose", "--log-info", "--log-warning")
@pytest.mark.row("triton", "--log", "--log-file")
@pytest.mark.row("triton", "--log-format", "--exit-timeout-secs", "--model-control-mode", "--http_port", "--grpc_port")
@pytest.mark.row("triton", "--metrics_port", "--exit_timeout", "--tensorrt_llm_model_name")
@pytest.mark.parametrize(
    ("arguments", "setting", "value"),
    [
        (["--http-port=8200"], "port", 8200),
        (["--http_port", "8200"], "port", 8200),
        (["--http-address", "127.0.0.1"], "host", "127.0.0.1"),
        (["--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--metrics-address=127.0.0.1"], "host", "127.0.0.1"),
        (["--grpc-port", "8201"], "grpc_port", 8201),
        (["--grpc_port=8201"], "grpc_port", 8201),
        (["--metrics-port", "8202"], "metrics_port", 8202),
        (["--metrics_port=8202"], "metrics_port", 8202),
        (["--allow-http=false"], "port", -1),
        (["--allow-http", "true"], "port", 8000),
        (["--allow-grpc", "false"], "grpc_port", -1),
        (["--allow-metrics=false"], "metrics_port", -1),
        (["--log-verbose", "1"], "log_level", "debug"),
        (["--log-verbose=0"], "log_level", "info"),
        (["--log-info", "true"], "log_level", "info"),
        (["--log-info", "false"], "log_level", "warning"),
        (["--log-info", "0", "--log-warning", "0"], "log_level", "error"),
        (["--log-verbose", "4", "--log-info", "false"], "log_level", "debug"),
        (["--log-file=a.log"], "log_file", "a.log"),
        (["--log"], "log_file", "triton_log.txt"),
        (["--log", "--log-file", "b.log"], "log_file", "b.log"),
        (["--log-format", "ISO8601"], "log_format", "text"),
        (["--exit-timeout-secs", "7"], "drain_timeout", 7),
        (["--exit_timeout", "7"], "drain_timeout", 7),
        (["--model-control-mode", "none"], "model_control_mode", "none"),
        (["--model-control-mode=explicit"], "model_control_mode", "explicit"),
        (["--tensorrt_llm_model_name", "tensorrt_llm"], "model", ""),
    ],
)
def test_flag_sets_option(capsys: pytest.CaptureFixture[str], arguments: list[str], setting: str, value: Any) -> None:
    assert config(capsys, *arguments)[setting] == value


@pytest.mark.row("triton", "--id")
@pytest.mark.row("triton", "--strict-readiness", "--exit-on-error", "--disable-auto-complete-config")
@pytest.mark.row("triton", "--strict-model-config", "--repository-poll-secs")
@pytest.mark.row("triton", "--backend-directory", "--backend-config", "--cuda-memory-pool-byte-size")
@pytest.mark.row("triton", "--pinned-memory-pool-byte-size", "--buffer-manager-thread-count")
@pytest.mark.row("triton", "--model-load-thread-count", "--http-thread-count", "--grpc-infer-thread-count")
@pytest.mark.row("triton", "--allow-gpu-metrics", "--allow-cpu-metrics", "--metrics-interval-ms", "--metrics-config")
@pytest.mark.row("triton", "--disable-spawn-processes", "--trtllm_llmapi_launch", "-f")
@pytest.mark.row("triton", "--multimodal_gpu0_cuda_mem_pool_bytes")
@pytest.mark.row("triton", "--multi-model", "--tritonserver", "--force", "--oversubscribe", "--no-mpi")
@pytest.mark.parametrize(
    "flag",
    [
        "--id=a",
        *("--strict-readiness=true", "--exit-on-error=false", "--disable-auto-complete-config"),
        *("--strict-model-config=true", "--repository-poll-secs=15"),
        *("--backend-directory=/b", "--backend-config=python,a=b", "--cuda-memory-pool-byte-size=0:64"),
        *("--pinned-memory-pool-byte-size=64", "--buffer-manager-thread-count=2", "--model-load-thread-count=2"),
        *("--http-thread-count=8", "--grpc-infer-thread-count=2", "--allow-gpu-metrics=false"),
        *("--allow-cpu-metrics=false", "--metrics-interval-ms=2000", "--metrics-config=summary_latencies=true"),
        *("--multi-model", "--tritonserver=/opt/tritonserver", "--force", "--oversubscribe", "--no-mpi"),
        *("-f", "--disable-spawn-processes", "--trtllm_llmapi_launch", "--multimodal_gpu0_cuda_mem_pool_bytes=64"),
        "--enable-peer-access=false",
    ],
)
def test_ignored_flag_is_reported(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, flag: str
) -> None:
    name = "--force" if flag == "-f" else flag.partition("=")[0]
    assert main(["config", "--compat", "triton", flag]) == 0
    ignored = capsys.readouterr().out.rpartition("\nignored\n")[2]
    underscored = f"--{name[2:].replace('-', '_')}"
    assert re.search(rf"^  {underscored} +\S", ignored, flags=re.M), ignored
    assert f"{underscored} is ignored: " in caplog.text


@pytest.mark.row("triton", "--grpc-address", "--metrics-address", "--trace-config")
@pytest.mark.row("triton", "--allow-http", "--grpc-use-ssl", "--http-restricted-api", "--world_size")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--allow-http", "false", "--allow-grpc", "false"], "port: is -1 (no HTTP) without grpc_port"),
        (["--allow-http", "perhaps"], "it is not one of true"),
        (["--trace-config", "level=TIMESTAMPS"], "use --otlp-endpoint and --trace-sampling-ratio"),
        (
            ["--metrics-address", "127.0.0.1"],
            "'127.0.0.1' must equal --http-",
        ),
        (["--grpc-address=::1", "--http-address=127.0.0.1"], "must equal --http-address (127.0.0.1)"),
        (["--grpc-use-ssl", "true"], "--grpc_use_ssl: 'true' is wrong: TLS is configured for HTTP and gRPC together"),
        (
            ["--http-restricted-api", "health:k=v"],
            "--http_restricted_api: its value is wrong: single routes cannot be restricted",
        ),
        (["--world_size", "4"], "the number of ranks is that of the engine folder"),
        (["--tensorrt_llm_model_name", "a,b"], "model names cannot be changed"),
        (["--model-control-mode", "poll"], "the repository is not polled; set none or explicit"),
        (["--rate-limit", "execution_count"], "requests wait in one queue"),
        (["--log-error", "false"], "errors are always logged"),
    ],
)
def test_invalid_flag_is_rejected(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["config", "--compat", "triton", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.row("triton", "--model-repository", "--model-store", "--model_repo")
@pytest.mark.parametrize("flag", ["--model-repository", "--model-store", "--model_repo", "--model-repo"])
def test_repository_flag_has_several_names(capsys: pytest.CaptureFixture[str], repository: Path, flag: str) -> None:
    assert config(capsys, flag, str(repository))["model"] == str(demo.CHAT)
    assert config(capsys, f"{flag}={repository}", "--model", "/other")["model"] == "/other"


# --- config.pbtxt ---------------------------------------------------------------------------------------------------


@pytest.mark.row("triton", "tokenizer_dir", "triton_max_batch_size", "tensorrt_llm", "max_tokens_in_paged_kv_cache")
@pytest.mark.row("triton", "kv_cache_free_gpu_mem_fraction", "batch_scheduler_policy", "batching_strategy")
@pytest.mark.row("triton", "enable_chunked_context", "enable_kv_cache_reuse", "kv_cache_host_memory_bytes")
@pytest.mark.row("triton", "exclude_input_in_output", "accumulate_tokens", "max_beam_width", "engine_dir")
@pytest.mark.parametrize(
    ("model", "key", "value", "setting", "expected"),
    [
        ("preprocessing", "tokenizer_dir", str(demo.CHAT), "tokenizer", str(demo.CHAT)),
        ("tensorrt_llm", "gpt_model_path", str(demo.DRAFT), "model", str(demo.DRAFT)),
        ("tensorrt_llm", "kv_cache_free_gpu_mem_fraction", "0.4", "kv_cache_free_memory_fraction", 0.4),
        ("tensorrt_llm", "max_tokens_in_paged_kv_cache", "6400", "num_gpu_blocks_override", 100),
        ("tensorrt_llm", "batch_scheduler_policy", "MAX_UTILIZATION", "batch_scheduler_policy", "max_utilization"),
        ("tensorrt_llm", "gpt_model_type", "inflight_batching", "batching_type", "inflight"),
        ("tensorrt_llm", "gpt_model_type", "V1", "batching_type", "static"),
        ("tensorrt_llm", "enable_chunked_context", "false", "enable_chunked_prefill", False),
        ("tensorrt_llm", "enable_kv_cache_reuse", "false", "enable_prefix_caching", False),
        ("tensorrt_llm", "kv_cache_host_memory_bytes", str(2**31), "kv_offloading_size", 2.0),
        ("tensorrt_llm", "exclude_input_in_output", "true", "exclude_input_in_output", True),
        ("tensorrt_llm", "max_beam_width", "4", "max_beam_width", 4),
        ("tensorrt_llm", "gpu_device_ids", "0;1;2", "data_parallel_size", 3),
        ("tensorrt_llm", "decoding_mode", "lookahead", "speculative_config", '{"method": "ngram"}'),
        ("tensorrt_llm", "decoding_mode", "Medusa", "speculative_config", '{"method": "medusa"}'),
        *[
            (
                "tensorrt_llm",
                f"{method}_choices",
                "{0}, {0, 0, 0}, {0, 1}",
                "speculative_config",
                f'{{"method": "{method}", "{method}_choices": [[0], [0, 0, 0], [0, 1]]}}',
            )
            for method in ("medusa", "eagle")
        ],
        ("tensorrt_llm_bls", "accumulate_tokens", "true", "accumulate_tokens", True),
    ],
)
def test_parameter_sets_option(
    capsys: pytest.CaptureFixture[str],
    repository: Path,
    tmp_path: Path,
    model: str,
    key: str,
    value: str,
    setting: str,
    expected: Any,
) -> None:
    assert config(capsys, *changed(repository, tmp_path / "models", model, parameter(key, value)))[setting] == expected
    assert config(capsys, "--model-repository", str(repository))["max_num_seqs"] == 128, "triton_max_batch_size"


@pytest.mark.row("triton", "gpu_device_ids", "decoding_mode", "normalize_log_probs", "add_special_tokens")
@pytest.mark.row("triton", "skip_special_tokens", "max_attention_window_size", "sink_token_length")
@pytest.mark.row("triton", "medusa_choices", "eagle_choices", "tensorrt_llm_draft_model_name")
@pytest.mark.parametrize(
    ("model", "key", "good", "wrong", "message"),
    [
        ("tensorrt_llm", "gpu_device_ids", "0", "0,1", "has 2 devices per instance, but must have 1"),
        ("tensorrt_llm", "gpu_device_ids", "2;3", "0;2", "devices must have consecutive numbers"),
        ("tensorrt_llm", "decoding_mode", "top_k_top_p", "redrafter", "requests select the decoding mode"),
        ("tensorrt_llm", "normalize_log_probs", "true", "false", "it must be true"),
        ("tensorrt_llm", "max_attention_window_size", "2048", "512", "attends to 2048 tokens, which cannot be changed"),
        ("tensorrt_llm", "sink_token_length", "0", "4", "the attention of a model cannot be changed"),
        ("tensorrt_llm", "medusa_choices", "{0}", "[0]", "not a tree of choices"),
        ("tensorrt_llm", "eagle_choices", "", "{0", "not a tree of choices"),
        ("tensorrt_llm_bls", "tensorrt_llm_draft_model_name", "", "draft", "--speculative-config"),
        ("preprocessing", "add_special_tokens", "True", "False", "the tokenizer's special tokens are always added"),
        ("postprocessing", "skip_special_tokens", "True", "False", "special tokens are never part of the text"),
        ("tensorrt_llm", "kv_cache_free_gpu_mem_fraction", "0.9", "1.0", "kv_cache_free_memory_fraction"),
        ("tensorrt_llm", "gpt_model_type", "v1", "V2", "it is not one of inflight_fused_batching"),
    ],
)
def test_parameter_accepts_only_supported_values(
    capsys: pytest.CaptureFixture[str],
    repository: Path,
    tmp_path: Path,
    model: str,
    key: str,
    good: str,
    wrong: str,
    message: str,
) -> None:
    config(capsys, *changed(repository, tmp_path / "good", model, parameter(key, good)))
    flags = changed(repository, tmp_path / "wrong", model, parameter(key, wrong))
    assert main(["config", "--compat", "triton", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "key", "values"),
    [
        ("tensorrt_llm", "max_attention_window_size", ("2048", "2560", "2560,4096", "{4096, 2560}")),
        ("tensorrt_llm", "sink_token_length", ("0",)),
        ("tensorrt_llm", "gpu_weights_percent", ("1", "1.0")),
        ("tensorrt_llm", "speculative_decoding_fast_logits", ("false",)),
        ("tensorrt_llm", "num_nodes", ("1",)),
        ("tensorrt_llm", "normalize_log_probs", ("true", "True")),
        ("tensorrt_llm", "stats_check_period_ms", ("100",)),
        ("tensorrt_llm", "multi_block_mode", ("true", "false")),
        ("tensorrt_llm", "cuda_graph_mode", ("false",)),
        ("tensorrt_llm", "cuda_graph_cache_size", ("0",)),
        ("tensorrt_llm", "enable_context_fmha_fp32_acc", ("true",)),
        ("tensorrt_llm", "cross_kv_cache_fraction", ("0.5",)),
        ("tensorrt_llm", "participant_ids", ("1,2",)),
        ("tensorrt_llm", "xgrammar_tokenizer_info_path", ("/models/tokenizer_info.json",)),
        ("tensorrt_llm", "encoder_model_path", ("",)),
        ("preprocessing", "max_num_images", ("1",)),
        ("preprocessing", "visual_model_path", ("${visual_model_path}",)),
        ("tensorrt_llm_bls", "multimodal_encoders_name", ("",)),
        ("tensorrt_llm_bls", "tensorrt_llm_draft_model_name", ("",)),
    ],
)
@pytest.mark.row("triton", "gpu_weights_percent", "num_nodes", "speculative_decoding_fast_logits")
@pytest.mark.row("triton", "participant_ids", "cross_kv_cache_fraction", "cuda_graph_mode", "cuda_graph_cache_size")
@pytest.mark.row("triton", "multi_block_mode", "enable_context_fmha_fp32_acc", "stats_check_period_ms")
@pytest.mark.row("triton", "max_num_images", "xgrammar_tokenizer_info_path")
def test_neutral_parameter_values_are_accepted(
    capsys: pytest.CaptureFixture[str], repository: Path, tmp_path: Path, model: str, key: str, values: tuple[str, ...]
) -> None:
    plain = config(capsys, "--model-repository", str(repository))
    for i, value in enumerate(values):
        flags = changed(repository, tmp_path / str(i), model, parameter(key, value))
        assert config(capsys, *flags) == plain


def test_gpu_device_ids_set_device_and_data_parallel_size(
    capsys: pytest.CaptureFixture[str], repository: Path, tmp_path: Path
) -> None:
    """In the orchestrator mode of TensorRT-LLM's guide, several models run, each on separate GPUs."""
    gpus = has_gpus()
    for devices, expected, count in (("0", "auto", 1), ("2", "cuda:2", 1), ("2;3", "cuda:2", 2)):
        flags = changed(repository, tmp_path / devices, "tensorrt_llm", parameter("gpu_device_ids", devices))
        found = config(capsys, *flags)
        assert (found["device"], found["data_parallel_size"]) == (expected if gpus else "auto", count)


@pytest.mark.row("triton", "guided_decoding_backend", "encoder_model_path", "lora_prefetch_dir", "visual_model_path")
@pytest.mark.row("triton", "multimodal_model_path", "multimodal_encoders_name")
@pytest.mark.parametrize("value", ["nothing", "0.7"])
@pytest.mark.parametrize(
    ("model", "key"),
    [(model, key) for model, known in PARAMETERS.items() for key, entry in known.items() if not entry.why],
)
def test_parameter_error_names_value(
    capsys: pytest.CaptureFixture[str], repository: Path, tmp_path: Path, model: str, key: str, value: str
) -> None:
    """The message contains the value, and does not end with an empty list of allowed values."""
    flags = changed(repository, tmp_path / "models", model, parameter(key, value))
    if main(["config", "--compat", "triton", *flags]) == 2:
        (line,) = capsys.readouterr().err.splitlines()
        assert value in line or "max_" in line, line
        assert not re.search(r"(is|of|to|are|or)\s*$", line), line


@pytest.mark.row("triton", "decoupled_mode", "max_queue_delay_microseconds", "bls_instance_count")
@pytest.mark.row("triton", "preprocessing_instance_count", "postprocessing_instance_count")
@pytest.mark.parametrize(
    ("model", "line", "message"),
    [
        ("tensorrt_llm", "model_transaction_policy { decoupled: false }", "decoupled is ignored"),
        (
            "tensorrt_llm",
            "dynamic_batching { max_queue_delay_microseconds: 100 }",
            "max_queue_delay_microseconds is ignored",
        ),
        *[
            (model, "instance_group [ { count: 4 kind: KIND_CPU } ]", "instance_group is ignored")
            for model in ("tensorrt_llm_bls", "preprocessing", "postprocessing")
        ],
        ("tensorrt_llm", parameter("lora_cache_host_memory_bytes", "9"), "lora_cache_host_memory_bytes is ignored"),
        ("tensorrt_llm", parameter("recv_poll_period_ms", "9"), "recv_poll_period_ms is ignored"),
        ("tensorrt_llm", parameter("executor_worker_path", "/a"), "executor_worker_path is ignored"),
    ],
)
def test_ignored_parameter_is_reported(
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    repository: Path,
    tmp_path: Path,
    model: str,
    line: str,
    message: str,
) -> None:
    config(capsys, *changed(repository, tmp_path / "models", model, line))
    assert re.search(rf"{model}/config.pbtxt: {message}", caplog.text), caplog.text


@pytest.mark.row("triton", "triton_backend")
def test_other_models_batch_size_and_backend_have_no_effect(
    capsys: pytest.CaptureFixture[str], repository: Path, tmp_path: Path
) -> None:
    expected = config(capsys, "--model-repository", str(repository))
    folder = tmp_path / "models"
    changed(repository, folder, "", "")
    for model, old, new in (("ensemble", ": 256", ": 7"), ("tensorrt_llm", '"tensorrtllm"', '"python"')):
        file = folder / model / "config.pbtxt"
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))
    assert config(capsys, "--model-repository", str(folder)) == expected


@pytest.mark.row("triton", "folders whose models have other names")
def test_unknown_model_in_repository_is_rejected(
    capsys: pytest.CaptureFixture[str], repository: Path, tmp_path: Path
) -> None:
    arguments = changed(repository, tmp_path / "models", "", "")
    (tmp_path / "models" / "resnet").mkdir()
    (tmp_path / "models" / "resnet" / "config.pbtxt").write_text('name: "resnet" backend: "onnxruntime"')
    assert main(["config", "--compat", "triton", *arguments]) == 2
    assert (
        "the model 'resnet' is not a TensorRT-LLM model; supported are ensemble, preprocessing"
        in capsys.readouterr().err
    )
