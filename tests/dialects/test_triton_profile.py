"""The triton profile: flags of tritonserver and its launcher, model repositories, and filled templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import tritonclient.grpc as triton
from serving import CommandResult, Served, run_in_process
from triton_templates import write_templates

from penstock import demo
from penstock.cli.compat import fill_template
from penstock.cli.main import main


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """Engine folder with the files that ``trtllm-build`` writes."""
    folder = tmp_path / "engine"
    folder.mkdir()
    built = {"max_batch_size": 256, "max_num_tokens": 10000, "max_input_len": 512, "max_output_len": 256}
    (folder / "config.json").write_text(json.dumps({"version": "0.10.0", "build_config": built}))
    (folder / "rank0.engine").write_bytes(b"of TensorRT")
    return folder


@pytest.fixture
def templates(tmp_path: Path) -> Path:
    return write_templates(tmp_path / "models")


def fill(templates: Path, model: str, values: str) -> CommandResult:
    return run_in_process(fill_template.main, "-i", str(templates / model / "config.pbtxt"), values)


def pairs(values: dict[str, str]) -> str:
    return ",".join(f"{name}:{value}" for name, value in values.items())


def filled(templates: Path, engine: Path, **changes: str) -> Path:
    """Fill the documented repository with the documented commands and ``changes`` of values; return its folder."""
    tokenizer = f"tokenizer_dir:{demo.CHAT},triton_max_batch_size:256"
    bls = {"triton_max_batch_size": "256", "decoupled_mode": "False", "bls_instance_count": "1"}
    values = {
        "preprocessing": f"{tokenizer},preprocessing_instance_count:1",
        "postprocessing": f"{tokenizer},postprocessing_instance_count:1",
        "tensorrt_llm_bls": pairs(bls | {"accumulate_tokens": "False"}),
        "ensemble": "triton_max_batch_size:256",
    }
    engine_values = {"triton_backend": "tensorrtllm", "triton_max_batch_size": "128", "decoupled_mode": "True"}
    engine_values |= {"max_beam_width": "1", "engine_dir": str(engine), "kv_cache_free_gpu_mem_fraction": "0.95"}
    engine_values |= {"exclude_input_in_output": "True", "batching_strategy": "inflight_fused_batching"}
    engine_values |= {"max_queue_delay_microseconds": "0", "enable_chunked_context": "True"}
    engine_values |= {"batch_scheduler_policy": "max_utilization"}
    values["tensorrt_llm"] = pairs(engine_values | changes)
    for model, text in values.items():
        ran = fill(templates, model, text)
        assert ran.returncode == 0 and not ran.stderr, ran.stderr
    return templates


def config(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["config", "--json", "--compat", "triton", *arguments]) == 0, capsys.readouterr().err
    return {name: found["value"] for name, found in json.loads(capsys.readouterr().out).items()}


def test_flags_set_options(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    defaults = config(capsys)
    assert (defaults["port"], defaults["grpc_port"], defaults["metrics_port"]) == (8000, 8001, 8002)
    assert defaults["kv_cache_free_memory_fraction"] == 0.9
    found = config(
        capsys, "--http-port", "8200", "--log-info", "true", "--log-verbose", "4", "--exit-timeout-secs", "7"
    )
    assert (found["port"], found["log_level"], found["drain_timeout"]) == (8200, "debug", 7)
    disabled = config(capsys, "--log-info=false", "--allow-grpc=0", "--allow-metrics", "off")
    assert config(capsys, "--http-port", "8200", "--allow-http=false")["port"] == -1
    assert (disabled["log_level"], disabled["grpc_port"], disabled["metrics_port"]) == ("warning", -1, -1)
    launcher_flags = ["--world_size=1", "--tritonserver", "/opt/tritonserver/bin/tritonserver", "--force", "--log"]
    launcher_flags += ["--log-file", "log.txt", "--http_port", "8300", "--tensorrt_llm_model_name=tensorrt_llm"]
    assert config(capsys, *launcher_flags)["port"] == 8300
    assert "--force is ignored" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world_size", "2"], "--world_size: '2' is wrong: the number of ranks is that of the engine folder"),
        (["--model-control-mode", "poll"], "set none or explicit"),
        (["--allow-http", "false", "--allow-grpc", "false"], "port: is -1 (no HTTP) without grpc_port"),
        (["--allow-grpc", "perhaps"], "not one of true"),
        (["--http-prot", "1"], "did you mean --http-port"),
        (["--model-repository", "/nowhere"], "model_repository: /nowhere has no folders"),
    ],
)
def test_invalid_flags_are_rejected(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["config", "--compat", "triton", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_repository_sets_options(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, templates: Path, engine: Path
) -> None:
    repository = filled(templates, engine, batch_scheduler_policy="GUARANTEED_NO_EVICT")
    found = config(capsys, "--model-repository", str(repository))
    expected = {
        "model": str(demo.CHAT),
        "tokenizer": str(demo.CHAT),
        "max_num_seqs": 128,
        "max_num_batched_tokens": 10000,
        "max_model_len": 768,
        "max_prompt_len": 512,
        "max_beam_width": 1,
        "batching_type": "inflight",
        "kv_cache_free_memory_fraction": 0.95,
        "batch_scheduler_policy": "guaranteed_no_evict",
        "enable_chunked_prefill": True,
        "exclude_input_in_output": True,
        "accumulate_tokens": False,
    }
    assert found.items() >= expected.items()
    assert f"{engine} is ignored" in caplog.text
    assert config(capsys, "--model_repo", str(repository), "--max-num-seqs", "3")["max_num_seqs"] == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batching_strategy": "V2"}, "gpt_model_type: 'V2' is wrong: it is not one of inflight_fused_batching"),
        ({"normalize_log_probs": "false"}, "normalize_log_probs: 'false' is wrong"),
        ({"kv_cache_free_gpu_mem_fraction": "1.0"}, "kv_cache_free_memory_fraction"),
        ({"batch_scheduler_policy": "best"}, "batch_scheduler_policy"),
        ({"enable_chunked_context": "maybe"}, "enable_chunked_context: 'maybe' is wrong"),
        ({"decoding_mode": "redrafter"}, "decoding_mode: 'redrafter' is wrong"),
        ({"medusa_choices": "[0]"}, "medusa_choices: '[0]' is wrong"),
        ({"gpu_device_ids": r"0\,1"}, "gpu_device_ids: has 2 devices per instance"),
        ({"max_queue_delay_microseconds": "${other}"}, "${other} is not filled"),
        ({"triton_max_batch_size": "many"}, "is not a model configuration"),
    ],
)
def test_invalid_repository_value_is_rejected_by_name(
    capsys: pytest.CaptureFixture[str], templates: Path, engine: Path, changes: dict[str, str], message: str
) -> None:
    repository = filled(templates, engine, **changes)
    assert main(["config", "--compat", "triton", "--model-repository", str(repository)]) == 2
    assert message in capsys.readouterr().err


def test_contradicting_or_unknown_parameters_are_rejected(
    capsys: pytest.CaptureFixture[str], templates: Path, engine: Path, tmp_path: Path
) -> None:
    repository = filled(templates, engine)
    arguments = ["config", "--compat", "triton", "--model-repository", str(repository)]
    file = repository / "postprocessing" / "config.pbtxt"
    good = file.read_text()
    file.write_text(good.replace(str(demo.CHAT), str(tmp_path)))
    assert main(arguments) == 2
    assert "postprocessing/config.pbtxt: tokenizer_dir" in capsys.readouterr().err
    file.write_text(good.replace("tokenizer_dir", "tokeniser_dir"))
    assert main(arguments) == 2
    assert "did you mean tokenizer_dir?" in capsys.readouterr().err
    for model in ("preprocessing", "postprocessing"):
        path = repository / model / "config.pbtxt"
        path.write_text(
            path.read_text().replace("tokeniser_dir", "tokenizer_dir").replace(str(demo.CHAT), str(tmp_path))
        )
    assert main(arguments) == 2
    assert "has no Hugging Face checkpoint" in capsys.readouterr().err


def test_templates_are_filled(templates: Path) -> None:
    assert fill(templates, "ensemble", "triton_max_batch_size").returncode == 2
    failed = fill(templates, "ensemble", "triton_max_batchsize:3")
    assert "did you mean triton_max_batch_size?" in failed.stderr
    assert fill(templates, "ensemble", "triton_max_batch_size:3").returncode == 0
    assert "max_batch_size: 3" in (templates / "ensemble" / "config.pbtxt").read_text()


@pytest.mark.row("triton", ":8002/metrics")
def test_documented_server_answers(templates: Path, engine: Path) -> None:
    repository = filled(templates, engine, max_tokens_in_paged_kv_cache="8192")
    flags = ["--compat", "triton", "--model-repository", str(repository), "--grpc-port", "0", "--metrics-port", "0"]
    with Served(*flags, "--log-info", "true", "--log-verbose", "4") as served:
        body = {
            "text_input": "如何保持正能量?",
            "parameters": {"max_tokens": 10, "bad_words": [""], "stop_words": [""]},
        }
        answer = httpx.post(f"{served.root}/v2/models/ensemble/generate", json=body, timeout=60).json()
        assert answer["model_name"] == "ensemble" and "如何" not in answer["text_output"]
        metrics = served.find(r"health and metrics at (\S+)")[1]
        assert 'nv_inference_count{model="ensemble",version="1"} 1.0' in httpx.get(f"{metrics}/metrics").text
        assert httpx.get(f"{metrics}/v2/health/ready").status_code == 200
        assert httpx.post(f"{metrics}/v2/models/ensemble/generate", json=body).json().keys() == {"error"}
        with triton.InferenceServerClient(served.find(r"gRPC at (\S+)")[1]) as client:
            assert client.is_model_ready("tensorrt_llm")
