"""TensorRT-LLM's convert, quantize and build commands: their output folders, errors, and effect on server options."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from serving import CommandResult, run_in_process
from test_triton_profile import config, filled
from triton_templates import write_templates

from penstock import LLM, demo
from penstock.cli.compat.trtllm import COMMANDS


def run(command: str, **flags: Any) -> CommandResult:
    """Run a command in this process. A flag with the value True is passed as a switch, without a value."""
    arguments = [
        argument
        for name, value in flags.items()
        for argument in (f"--{name}", *([] if value is True else [str(value)]))
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [command, *arguments])
        return run_in_process(lambda _: COMMANDS[command]())


def convert(command: str, folder: Path, **flags: Any) -> tuple[dict[str, Any], str]:
    """Run a command successfully; return its ``config.json`` and its standard error output."""
    ran = run(command, output_dir=folder, **flags)
    assert ran.returncode == 0, ran.stderr
    files = {path.name for path in folder.iterdir()}
    assert (
        files == {"config.json"} if command != "trtllm-build" else files > {"config.json", "tokenizer.json", "rank_0"}
    )
    return json.loads((folder / "config.json").read_text()), ran.stderr


@pytest.mark.row("triton", "convert_checkpoint.py --model_dir --output_dir", "--dtype")
@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float32"])
def test_converted_folder_refers_to_checkpoint(tmp_path: Path, dtype: str) -> None:
    found, _ = convert("convert_checkpoint.py", tmp_path / "new" / "checkpoint", model_dir=demo.CHAT, dtype=dtype)
    known = json.loads((demo.CHAT / "config.json").read_text())
    assert "has no weights" in found["about"] and found["checkpoint"] == str(demo.CHAT)
    assert (found["architecture"], found["dtype"]) == ("Qwen3ForCausalLM", dtype)
    assert found["mapping"] == {"world_size": 1, "tp_size": 1, "pp_size": 1}
    assert found["quantization"] == {"quant_algo": None, "kv_cache_quant_algo": None}
    assert found["num_hidden_layers"] == known["num_hidden_layers"] and found["vocab_size"] == known["vocab_size"]


@pytest.mark.row("triton", "quantize.py --model_dir --output_dir", "--qformat", "--kv_cache_dtype")
@pytest.mark.parametrize(
    ("qformat", "algorithm", "quantization"),
    [
        ("full_prec", None, "none"),
        ("int8_wo", "W8A16", "wint8"),
        ("int4_wo", "W4A16", "wint4"),
    ],
)
def test_weight_only_formats_set_server_options(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, qformat: str, algorithm: str | None, quantization: str
) -> None:
    calibration = {"calib_size": 512, "calib_dataset": "/workspace/datas"}
    dtype = "bfloat16" if quantization.startswith("wint") else "float32"
    flags = {"model_dir": demo.CHAT, "qformat": qformat, "kv_cache_dtype": "int8", "dtype": dtype, **calibration}
    found, stderr = convert("quantize.py", tmp_path / "checkpoint", **flags)
    assert found["quantization"] == {"quant_algo": algorithm, "kv_cache_quant_algo": "INT8"}
    for name in calibration:
        assert f"--{name} is ignored" in stderr
    convert("trtllm-build", tmp_path / "engine", checkpoint_dir=tmp_path / "checkpoint")
    repository = filled(write_templates(tmp_path / "models"), tmp_path / "engine")
    settings = config(capsys, "--model-repository", str(repository))
    expected = {"quantization": quantization, "kv_cache_dtype": "int8", "dtype": dtype}
    assert settings.items() >= {"model": str(tmp_path / "engine"), **expected}.items()


@pytest.mark.row("triton", "quantize.py --model_dir --output_dir", "--qformat", "--calib_size", "--calib_dataset")
@pytest.mark.row("triton", "--calib_max_seq_length", "--awq_block_size", "--batch_size")
@pytest.mark.parametrize(
    ("qformat", "algorithm", "method", "quantization"),
    [
        ("int8_sq", "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN", "smoothquant", "none"),
        ("w4a8_awq", "W4A8_AWQ", "awq", "w4a8"),
    ],
)
def test_calibrated_formats_write_checkpoint(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, qformat: str, algorithm: str, method: str, quantization: str
) -> None:
    """The calibration data is a folder of JSON Lines files. A second run of the command succeeds."""
    (tmp_path / "datas").mkdir()
    lines = [json.dumps({"text": f"Tell me about number {number}."}) for number in range(60)]
    (tmp_path / "datas" / "texts.jsonl").write_text("\n".join(lines))
    flags = {"model_dir": demo.CHAT, "qformat": qformat, "calib_size": 2, "calib_dataset": tmp_path / "datas"}
    flags |= {"calib_max_seq_length": 64, "batch_size": 8, "output_dir": tmp_path / "checkpoint"}
    if method == "awq":
        flags["awq_block_size"] = 64
    for _ in range(2):
        ran = run("quantize.py", **flags)
        assert ran.returncode == 0, ran.stderr
    assert "--batch_size is ignored" in ran.stderr and "KL divergence" in ran.stdout
    found = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    assert found["quantization"] == {"quant_algo": algorithm, "kv_cache_quant_algo": None}
    assert found["checkpoint"] == str(tmp_path / "checkpoint" / "checkpoint")
    job = json.loads((tmp_path / "checkpoint" / "checkpoint" / "quantization_report.json").read_text())["job"]
    assert (job["method"], job["calib_size"], job["group_size"]) == (method, 2, 64 if method == "awq" else 0)
    convert("trtllm-build", tmp_path / "engine", checkpoint_dir=tmp_path / "checkpoint")
    repository = filled(write_templates(tmp_path / "models"), tmp_path / "engine")
    settings = config(capsys, "--model-repository", str(repository))
    assert (settings["model"], settings["quantization"]) == (str(tmp_path / "engine"), quantization)
    assert LLM(settings["model"], quantization=quantization, num_gpu_blocks_override=40)


LIMITS = {
    "max_batch_size": ("max_num_seqs", 7),
    "max_num_tokens": ("max_num_batched_tokens", 300),
    "max_input_len": ("max_prompt_len", 100),
    "max_seq_len": ("max_model_len", 500),
    "max_beam_width": ("max_beam_width", 3),
}


@pytest.mark.row("triton", "trtllm-build --checkpoint_dir --output_dir", "--max_batch_size", "--max_num_tokens")
@pytest.mark.row("triton", "--max_input_len", "--max_output_len", "--max_seq_len", "--max_beam_width", "engine_dir")
def test_build_limits_set_server_limits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    convert("convert_checkpoint.py", tmp_path / "checkpoint", model_dir=demo.CHAT)
    flags = {name: value for name, (_, value) in LIMITS.items()}
    found, _ = convert("trtllm-build", tmp_path / "engine", checkpoint_dir=tmp_path / "checkpoint", **flags)
    assert found["build_config"].items() >= flags.items()
    assert found["pretrained_config"]["checkpoint"] == str(demo.CHAT)
    repository = filled(write_templates(tmp_path / "a"), tmp_path / "engine", triton_max_batch_size="7")
    text = (repository / "tensorrt_llm" / "config.pbtxt").read_text()
    (repository / "tensorrt_llm" / "config.pbtxt").write_text(text.replace('"1"', '""'))  # max_beam_width is unset
    settings = config(capsys, "--model-repository", str(repository))
    assert {option: settings[option] for option, _ in LIMITS.values()} == dict(LIMITS.values())
    both = {"max_input_len": 60, "max_output_len": 40}
    convert("trtllm-build", tmp_path / "other", checkpoint_dir=tmp_path / "checkpoint", **both)
    repository = filled(write_templates(tmp_path / "b"), tmp_path / "other")
    assert config(capsys, "--model-repository", str(repository))["max_model_len"] == 100


SWITCHES = {
    **{"gpt_attention_plugin": "bfloat16", "gemm_plugin": "disable", "context_fmha": "enable"},
    **{"use_custom_all_reduce": "enable", "reduce_fusion": "enable", "use_paged_context_fmha": "enable"},
    **{"multiple_profiles": "enable", "gather_all_token_logits": True},
}


@pytest.mark.row("triton", "--gpt_attention_plugin", "--gemm_plugin", "--context_fmha", "--use_custom_all_reduce")
@pytest.mark.row("triton", "--reduce_fusion", "--use_paged_context_fmha", "--multiple_profiles")
@pytest.mark.row("triton", "--gather_all_token_logits", "--gather_context_logits", "--gather_generation_logits")
def test_build_switches_are_recorded_and_ignored(tmp_path: Path) -> None:
    convert("convert_checkpoint.py", tmp_path / "checkpoint", model_dir=demo.CHAT)
    found, stderr = convert("trtllm-build", tmp_path / "engine", checkpoint_dir=tmp_path / "checkpoint", **SWITCHES)
    assert found["build_config"]["plugin_config"] == SWITCHES
    for name in SWITCHES:
        assert f"--{name} is ignored: " in stderr
    flags = {"gather_context_logits": True, "gather_generation_logits": True}
    _, stderr = convert("trtllm-build", tmp_path / "other", checkpoint_dir=tmp_path / "checkpoint", **flags)
    assert stderr.count("requests can ask for logits") == 2


@pytest.mark.row("triton", "--tp_size", "--pp_size", "--workers")
@pytest.mark.parametrize("command", ["convert_checkpoint.py", "quantize.py"])
def test_tp_and_pp_size_set_server_parallelism(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    workers = 2 if command == "quantize.py" else 1
    found, _ = convert(command, tmp_path / "checkpoint", model_dir=demo.CHAT, tp_size=2, pp_size=3)
    assert found["mapping"] == {"world_size": 6, "tp_size": 2, "pp_size": 3}
    convert("trtllm-build", tmp_path / "engine", checkpoint_dir=tmp_path / "checkpoint", tp_size=2, workers=workers)
    assert len(list((tmp_path / "engine").glob("rank_*/*"))) == 6
    repository = str(filled(write_templates(tmp_path / "models"), tmp_path / "engine"))
    for size in ("1", "6"):
        settings = config(capsys, "--model-repository", repository, "--world_size", size)
        assert (settings["tensor_parallel_size"], settings["pipeline_parallel_size"]) == (2, 3)


@pytest.mark.row("triton", "--tp_size", "--pp_size", "--paged_kv_cache")
@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        ("convert_checkpoint.py", {"tp_size": 0}, "--tp_size: must be at least 1, is 0"),
        ("convert_checkpoint.py", {"pp_size": -1}, "--pp_size: must be at least 1, is -1"),
        ("convert_checkpoint.py", {"dtype": "fp8"}, "--dtype: 'fp8' is not one of auto, float32, float16, bfloat16"),
        ("convert_checkpoint.py", {"model_dir": "/nowhere"}, "model_dir: /nowhere has no Hugging Face checkpoint"),
        ("convert_checkpoint.py", {"model_dirs": "x"}, "did you mean --model_dir?"),
        ("quantize.py", {"qformat": "fp4"}, "--qformat: 'fp4' is not supported"),
        ("quantize.py", {"qformat": "int4_awq", "calib_dataset": "cnn_mail"}, "cnn_mail does not exist"),
        ("quantize.py", {"qformat": "int8_w0"}, "did you mean int8_wo?"),
        ("quantize.py", {"kv_cache_dtype": "fp4"}, "--kv_cache_dtype: 'fp4' is not supported, only int8 and fp8"),
        ("trtllm-build", {"paged_kv_cache": "disable"}, "the KV cache is always paged"),
        ("trtllm-build", {"max_batch_size": 0}, "--max_batch_size: must be at least 1, is 0"),
        ("trtllm-build", {"tp_size": 2}, "--tp_size: is 2, but the checkpoint was converted for 1"),
        ("trtllm-build", {"checkpoint_dir": demo.CHAT}, "run one of them with --model_dir"),
        ("trtllm-build", {"max_batchsize": 3}, "did you mean --max_batch_size?"),
        ("trtllm-build", {"workers": 0}, "--workers: must be at least 1, is 0"),
        ("trtllm-build", {"output_dir": demo.CHAT}, "is the folder of the model: name another"),
        ("trtllm-build", {"output_dir": demo.CHAT.parent}, ": name an empty or new folder"),
    ],
)
def test_invalid_flag_is_rejected_by_name(tmp_path: Path, command: str, flags: dict[str, Any], message: str) -> None:
    required: dict[str, Any] = {"model_dir": demo.CHAT}
    if command == "trtllm-build":
        convert("convert_checkpoint.py", tmp_path / "checkpoint", model_dir=demo.CHAT)
        required = {"checkpoint_dir": tmp_path / "checkpoint"}
    ran = run(command, **{"output_dir": tmp_path / "new", **required, **flags})
    assert ran.returncode == 2 and message in ran.stderr, ran.stderr
    assert ran.stderr.startswith(f"{command}: ") and not (tmp_path / "new").exists()
