"""Examples of documentation on Triton and TensorRT-LLM, run unmodified.

Only paths, hosts, ports and the number of devices are replaced: ``/workspace`` is a temporary folder with the
documented layout, and the built-in model has the documented model's name.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc as triton
from safetensors.torch import load_file
from serving import Served
from shell import write_programs
from triton_templates import write_templates

from penstock import demo
from penstock.cli.main import main

CONVERT = """
python convert_checkpoint.py --model_dir /workspace/models/Qwen1.5-14B-Chat \\
--output_dir /workspace/models/Qwen1.5-14B-Chat-1tp-bf16-trt \\
--dtype bfloat16 \\
--tp_size 1
"""
BUILD = """
trtllm-build --checkpoint_dir /workspace/models/Qwen1.5-14B-Chat-1tp-bf16-trt \\
--output_dir /workspace/models/Qwen1.5-14B-Chat-1tp-bf16-trt-engine-2 \\
--gpt_attention_plugin bfloat16 \\
--gemm_plugin bfloat16 \\
--max_num_tokens 10000 \\
--use_custom_all_reduce enable \\
--paged_kv_cache enable \\
--workers 1 \\
--use_paged_context_fmha enable \\
--multiple_profiles enable \\
--max_input_len 1024 \\
--max_output_len 1024 \\
--max_batch_size 256
"""
QUANTIZE = """
cd /workspace/TensorRT-LLM/examples/quantization/
python quantize.py --model_dir /workspace/models/Qwen1.5-14B-Chat \\
--dtype bfloat16 \\
--qformat fp8 \\
--kv_cache_dtype fp8 \\
--output_dir /workspace/models/Qwen1.5-14B-Chat-1tp-fp8-kvfp8 \\
--calib_size 512 \\
--calib_dataset /workspace/datas
"""
BUILD_QUANTIZED = """
trtllm-build --checkpoint_dir /workspace/models/Qwen1.5-14B-Chat-1tp-fp8-kvfp8 \\
--output_dir /workspace/models/Qwen1.5-14B-Chat-1tp-fp8-kvfp8-trt-engine-2 \\
--gemm_plugin disable \\
--max_num_tokens 10000 \\
--use_custom_all_reduce enable \\
--paged_kv_cache enable \\
--workers 1 \\
--use_paged_context_fmha enable \\
--multiple_profiles enable \\
--max_input_len 1024 \\
--max_output_len 1024 \\
--max_batch_size 256
"""
FILL = """
# 指定Tokenizer文件路径
export HF_LLAMA_MODEL=/workspace/models/Qwen1.5-14B-Chat
# 指定模型TensorRT引擎路径
export ENGINE_PATH=/workspace/models/Qwen1.5-14B-Chat-1tp-bf16-trt-engine-2
# 指定模型部署配置文件路径
export TEMPLATE_PATH=/workspace/models/qwen2-14b-trt-engine-h20-1tp
cd /workspace/tensorrtllm_backend

# 修改配置文件
python3 tools/fill_template.py -i ${TEMPLATE_PATH}/preprocessing/config.pbtxt \\
tokenizer_dir:${HF_LLAMA_MODEL},triton_max_batch_size:256,preprocessing_instance_count:1

python3 tools/fill_template.py -i ${TEMPLATE_PATH}/postprocessing/config.pbtxt \\
tokenizer_dir:${HF_LLAMA_MODEL},triton_max_batch_size:256,postprocessing_instance_count:1

python3 tools/fill_template.py -i ${TEMPLATE_PATH}/tensorrt_llm_bls/config.pbtxt \\
triton_max_batch_size:256,decoupled_mode:False,bls_instance_count:1,accumulate_tokens:False

python3 tools/fill_template.py -i ${TEMPLATE_PATH}/ensemble/config.pbtxt \\
triton_max_batch_size:256

python3 tools/fill_template.py -i ${TEMPLATE_PATH}/tensorrt_llm/config.pbtxt \\
triton_backend:tensorrtllm,triton_max_batch_size:256,decoupled_mode:True,\\
max_beam_width:1,engine_dir:${ENGINE_PATH},\\
kv_cache_free_gpu_mem_fraction:0.95,\\
exclude_input_in_output:True,\\
batching_strategy:inflight_fused_batching,max_queue_delay_microseconds:0,\\
enable_chunked_context:True,batch_scheduler_policy:max_utilization

# 查看一些关键配置文件是否修改成功。
echo ${TEMPLATE_PATH}
cat ${TEMPLATE_PATH}/tensorrt_llm/config.pbtxt | grep -C 5 "kv_cache_free_gpu_mem_fraction"
cat ${TEMPLATE_PATH}/tensorrt_llm/config.pbtxt | grep -C 5 "inflight_fused_batching"
cat ${TEMPLATE_PATH}/tensorrt_llm/config.pbtxt | grep -C 5 "batch_scheduler_policy"
cat ${TEMPLATE_PATH}/tensorrt_llm/config.pbtxt | grep -C 5 "enable_chunked_context"
"""
SERVE = """
exec tritonserver --model-repository /workspace/models/qwen2-14b-trt-engine-h20-1tp \\
--log-info true \\
--log-verbose 4"""
LAUNCH = """
cd /workspace/tensorrtllm_backend
exec python3 scripts/launch_triton_server.py --world_size=1 \\
--tritonserver=/opt/tritonserver/bin/tritonserver --log --log-file=triton.log \\
--model_repo=/workspace/models/qwen2-14b-trt-engine-h20-1tp --tensorrt_llm_model_name=tensorrt_llm"""
ANYWHERE = ' --grpc-port 0 --metrics-port 0 "$@"'
SMALL = {"PENSTOCK_NUM_GPU_BLOCKS_OVERRIDE": "200"}
"""Number of KV blocks, for a small KV cache instead of 95 % of the machine's free memory."""
GENERATE = """
curl -X POST HOST/v2/models/ensemble/generate -d \\
'{"text_input": "如何保持正能量?","parameters": {"max_tokens": 100,"bad_words":[""],"stop_words":[""]}}'
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with Penstock's commands in ``bin``, and with the scripts at their documented paths."""
    folder = tmp_path_factory.mktemp("workspace")
    assert main(["shims", str(folder), "triton"]) == 0
    (folder / "models").mkdir()
    (folder / "models" / "Qwen1.5-14B-Chat").symlink_to(demo.CHAT)
    write_templates(folder / "models" / "qwen2-14b-trt-engine-h20-1tp")
    write_programs(folder / "bin")
    return folder


def environment(workspace: Path) -> dict[str, str]:
    return {**os.environ, **SMALL, "PATH": f"{workspace / 'bin'}:{os.environ['PATH']}"}


def bash(workspace: Path, text: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-c", text.replace("/workspace", str(workspace))]
    return subprocess.run(command, capture_output=True, text=True, env=environment(workspace), cwd=workspace)


@pytest.fixture(scope="module")
def repository(workspace: Path) -> str:
    """Build and fill the model repository with the documented commands; return the output of the last command."""
    ran = bash(workspace, f"set -e; cd /workspace/TensorRT-LLM/examples/qwen; {CONVERT}")
    assert ran.returncode == 0, ran.stderr
    ran = bash(workspace, f"set -e; {BUILD}")
    assert ran.returncode == 0, ran.stderr
    ran = bash(workspace, f"set -e; {FILL}")
    assert ran.returncode == 0 and not ran.stderr, ran.stderr
    return ran.stdout


def served_by(workspace: Path, text: str) -> Served:
    command = ("bash", "-c", text.replace("/workspace", str(workspace)) + ANYWHERE, "bash")
    return Served(command=command, environment=environment(workspace))


@pytest.fixture(scope="module")
def served(workspace: Path, repository: str) -> Iterator[Served]:
    with served_by(workspace, SERVE) as served:
        yield served


def test_engine_folders_have_documented_config(workspace: Path, repository: str) -> None:
    found = {}
    for name in ("Qwen1.5-14B-Chat-1tp-bf16-trt", "Qwen1.5-14B-Chat-1tp-bf16-trt-engine-2"):
        found[name] = json.loads((workspace / "models" / name / "config.json").read_text())
    checkpoint, engine = found.values()
    assert checkpoint.items() >= {"dtype": "bfloat16", "logits_dtype": "float32", "hidden_act": "silu"}.items()
    assert engine["pretrained_config"] == checkpoint
    limits = {"max_input_len": 1024, "max_output_len": 1024, "max_batch_size": 256, "max_num_tokens": 10000}
    assert engine["build_config"].items() >= limits.items()
    plugins = {"gpt_attention_plugin": "bfloat16", "gemm_plugin": "bfloat16", "multiple_profiles": "enable"}
    assert engine["build_config"]["plugin_config"].items() >= plugins.items()


@pytest.mark.row("triton", "kv_cache_free_gpu_mem_fraction", "batching_strategy", "batch_scheduler_policy")
@pytest.mark.row("triton", "enable_chunked_context")
def test_templates_are_filled(repository: str) -> None:
    where, *lines = repository.splitlines()
    assert where.endswith("/models/qwen2-14b-trt-engine-h20-1tp")
    for name, value in {
        "kv_cache_free_gpu_mem_fraction": "0.95",
        "gpt_model_type": "inflight_fused_batching",
        "batch_scheduler_policy": "max_utilization",
        "enable_chunked_context": "True",
    }.items():
        line = f'parameters: {{ key: "{name}" value: {{ string_value: "{value}" }} }}'
        assert line in lines


@pytest.mark.row("triton", "--use_fp8_context_fmha", "--qformat", "--kv_cache_dtype", "--calib_dataset")
def test_checkpoint_is_quantized_to_fp8(workspace: Path) -> None:
    """The documented calibration data is Parquet; the test uses JSON Lines, which need no additional package."""
    (workspace / "datas").mkdir(exist_ok=True)
    lines = [json.dumps({"text": f"Tell me about number {number}."}) for number in range(400)]
    (workspace / "datas" / "alpaca.jsonl").write_text("\n".join(lines))
    ran = bash(workspace, QUANTIZE)
    assert ran.returncode == 0, ran.stderr
    assert "--kv_cache_dtype fp8: on CPUs, the KV cache is quantized to int8" in ran.stderr
    tensors = load_file(workspace / "models/Qwen1.5-14B-Chat-1tp-fp8-kvfp8/checkpoint/model.safetensors")
    assert tensors["model.layers.0.mlp.up_proj.weight"].dtype is torch.float8_e4m3fn
    ran = bash(workspace, BUILD_QUANTIZED.rstrip() + " \\\n--use_fp8_context_fmha enable\n")
    assert ran.returncode == 0, ran.stderr
    assert "--use_fp8_context_fmha is ignored: attention uses the data type of the KV cache" in ran.stderr
    assert "has an FP8 KV cache; int8 is used" in ran.stderr
    engine = workspace / "models" / "Qwen1.5-14B-Chat-1tp-fp8-kvfp8-trt-engine-2"
    found = json.loads((engine / "config.json").read_text())["pretrained_config"]["quantization"]
    assert found == {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    repository = workspace / "repository"
    (repository / "tensorrt_llm").mkdir(parents=True)
    parameter = f'parameters {{ key: "gpt_model_path" value {{ string_value: "{engine}" }} }}'
    (repository / "tensorrt_llm" / "config.pbtxt").write_text(f'name: "tensorrt_llm" {parameter}')
    config = [sys.executable, "-m", "penstock.cli.main", "config", "--json", "--compat", "triton"]
    ran = subprocess.run([*config, "--model-repository", repository], capture_output=True, text=True)
    settings = json.loads(ran.stdout)
    assert (settings["quantization"]["value"], settings["kv_cache_dtype"]["value"]) == ("none", "int8")


def curl(served: Served, text: str) -> str:
    return subprocess.run(["bash", "-c", text.replace("HOST", served.root)], capture_output=True, text=True).stdout


def test_documented_request_is_answered(served: Served) -> None:
    found = json.loads(curl(served, GENERATE))
    expected = {"model_name": "ensemble", "model_version": "1", "sequence_id": 0}
    expected |= {"sequence_start": False, "sequence_end": False}
    assert found.items() >= expected.items()
    assert found["text_output"] and "如何" not in found["text_output"]  # exclude_input_in_output:True


def test_stream_equals_whole_answer(served: Served) -> None:
    whole = json.loads(curl(served, GENERATE))["text_output"]
    request = GENERATE.replace("ensemble/generate", "ensemble/generate_stream").replace("100,", '100,"stream": true,')
    events = curl(served, request.replace("curl", "curl -N")).split("\n\n")
    assert events.pop() == ""
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "".join(chunk["text_output"] for chunk in chunks) == whole
    assert {chunk["model_name"] for chunk in chunks} == {"ensemble"}


FIELDS: dict[str, Any] = {
    "text_input": "如何保持正能量?",
    "max_tokens": 20,
    "stop_words": ["。"],
    "return_log_probs": True,
    "top_k": 5,
    "top_p": 0.9,
    "temperature": 0.7,
}


def test_documented_parameters_take_effect(served: Served) -> None:
    found = json.loads(curl(served, f"curl -X POST HOST/v2/models/ensemble/generate -d '{json.dumps(FIELDS)}'"))
    assert found["cum_log_probs"] < 0 and sum(np.atleast_1d(found["output_log_probs"])) == pytest.approx(
        found["cum_log_probs"], rel=1e-5
    )
    assert "。" not in found["text_output"]


def test_metadata_config_and_metrics_are_served(served: Served) -> None:
    metadata = json.loads(curl(served, "curl HOST/v2/models/ensemble"))
    assert {"name", "versions", "platform", "inputs", "outputs"} == metadata.keys()
    config = json.loads(curl(served, "curl HOST/v2/models/tensorrt_llm/config"))
    assert config["model_transaction_policy"] == {"decoupled": True} and config["backend"] == "tensorrtllm"
    metrics = served.find(r"health and metrics at (\S+)")[1]
    assert "nv_inference_request_success" in curl(served, f"curl {metrics}/metrics")


def test_end_to_end_grpc_client_gets_same_text(served: Served) -> None:
    """``test_kserve_clients.py`` tests the other calls of ``end_to_end_grpc_client.py``."""
    answers: list[Any] = []
    with triton.InferenceServerClient(served.find(r"gRPC at (\S+)")[1]) as client:
        client.start_stream(callback=lambda result, error: answers.append(error or result))
        inputs = []
        for name, kind, value in (
            ("text_input", "BYTES", np.array([["如何保持正能量?".encode()]], object)),
            ("max_tokens", "INT32", np.array([[100]], np.int32)),
            ("stream", "BOOL", np.array([[True]])),
        ):
            inputs.append(triton.InferInput(name, [1, 1], kind).set_data_from_numpy(value))
        client.async_stream_infer("ensemble", inputs, request_id="1")
        client.stop_stream()
    text = "".join(answer.as_numpy("text_output")[0].decode() for answer in answers)
    assert text == json.loads(curl(served, GENERATE))["text_output"]


@pytest.mark.row("triton", "--world_size", "--tritonserver", "--log", "--log-file", "--model_repo")
def test_launch_script_starts_same_server(workspace: Path, served: Served) -> None:
    with served_by(workspace, LAUNCH) as launched:
        launched.find(r"--tritonserver is ignored")
        log = (workspace / "tensorrtllm_backend" / "triton.log").read_text()
        assert f"at {launched.url}" in log
        found = json.loads(curl(launched, "curl HOST/v2/logging"))
        assert found["log_file"].endswith("/tensorrtllm_backend/triton.log")
        assert json.loads(curl(launched, GENERATE)) == json.loads(curl(served, GENERATE))


@pytest.mark.row("triton", "--world_size", "--tp_size", "--pp_size")
def test_engine_for_two_ranks_gives_same_answer(workspace: Path, served: Served) -> None:
    write_templates(workspace / "models" / "qwen2-14b-trt-engine-h20-2tp")
    texts = ["cd /workspace/TensorRT-LLM/examples/qwen", CONVERT.replace("--tp_size 1", "--tp_size 2"), BUILD, FILL]
    built = bash(workspace, "\n".join(["set -e", *texts]).replace("1tp", "2tp"))
    assert built.returncode == 0, built.stderr
    launch = LAUNCH.replace("1tp", "2tp")
    refused = bash(workspace, launch.replace("--world_size=1", "--world_size=3"))
    assert refused.returncode == 2
    assert "world_size: is 3, but the engine of tensorrt_llm has 2 ranks (tp_size times pp_size)" in refused.stderr
    with served_by(workspace, launch.replace("--world_size=1", "--world_size=2")) as launched:
        assert json.loads(curl(launched, GENERATE)) == json.loads(curl(served, GENERATE))


def test_help_lists_documented_flags(workspace: Path) -> None:
    for command in ("tritonserver --help", "python3 /workspace/tensorrtllm_backend/scripts/launch_triton_server.py -h"):
        ran = bash(workspace, command)
        assert ran.returncode == 0
        for flag in ("--model-repository", "--log-verbose", "--world_size", "--multi-model"):
            assert re.search(rf"{flag}\b", ran.stdout), flag
