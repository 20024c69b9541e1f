"""``penstock plan``: compared with transformers' parameter counts, the engine's log and published numbers."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from checkpoints import SMALL, save
from encoder_checkpoints import draw_config, save_encoder
from test_hub import Hub
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from penstock import LLM, demo
from penstock.checkpoint.kv_spec import KV_QUANTIZATION, bytes_per_block
from penstock.cli.main import main
from penstock.models.loader import LoadOptions, load_model
from penstock.ops import reference
from penstock.planning.kv_size import CachePlan, block_ratio, kv_cache_ratio
from penstock.planning.model_size import model_size_of
from penstock.planning.paddlenlp_table import DEEPSEEK_V3

LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "num_kv_shared_layers": 1,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 300,
    "use_double_wide_mlp": True,
}
GEMMA3N = {
    "head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "num_kv_shared_layers": 1,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 300,
    "intermediate_size": [96, 64, 128],
    "activation_sparsity_pattern": [0.9, 0.0, 0.0],
    "laurel_rank": 8,
}
CONFIGS = {
    "llama": LlamaConfig(**SMALL),
    "mistral": MistralConfig(**SMALL, sliding_window=32),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=32, tie_word_embeddings=True),
    "gemma3n": Gemma3nTextConfig(**SMALL | GEMMA3N),
    "gemma4": Gemma4TextConfig(**SMALL, **GEMMA4),
    "deepseek_v3": DeepseekV3Config(**SMALL, **LATENT),
    "deepseek_v3 without low-rank queries": DeepseekV3Config(**SMALL, **{**LATENT, "q_lora_rank": None}),
}


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", "memory", "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_planned_weights_equal_transformers_parameters(config: PreTrainedConfig) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = sum(weight.numel() for weight in model.parameters() if weight.dim() > 1)
    shape = model_size_of({**config.to_dict(), "architectures": ["Some"], "num_nextn_predict_layers": 0})
    assert shape.layer_weights + shape.embedding_weights == expected


def test_deepseek_v3_has_671_billion_parameters() -> None:
    assert round((DEEPSEEK_V3.layer_weights + DEEPSEEK_V3.embedding_weights) / 1e9) == 671
    assert DEEPSEEK_V3.kv_dim == 576


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma4", "gemma3n"])
def test_plan_equals_engine_log(
    name: str,
    kv_cache_dtype: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    save(CONFIGS[name], tmp_path)
    given = {"kv_cache_sequences": 2.5, "kv_cache_ratio": 0.75, "block_size": 16, "kv_cache_dtype": kv_cache_dtype}
    with caplog.at_level(logging.INFO):
        llm = LLM(str(tmp_path), **given)
    flags = [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    found = planned(capsys, "--model", str(tmp_path), *flags)
    scheduler = llm.engine.scheduler
    assert found["total_block_num"] == scheduler.device_pool.total == 40
    assert found["max_model_len"] == llm.engine.max_model_len
    logged = next(message for message in caplog.messages if message.startswith("memory: "))
    numbers = re.findall(r"[\d.]+", logged)
    assert numbers[2:] == [str(n) for n in (found["kv_bytes_per_token"], 640, 2.5, 256, 30)]
    assert found["total_tokens"] == 640 and found["kv_cache_sequences"] == 2.5
    assert found["prefill_kvcache_block_num"] == 30
    model = load_model(tmp_path, reference, LoadOptions(load_format="dummy"))
    assert found["kv_bytes_per_block"] == bytes_per_block(model.kv_specs(16, KV_QUANTIZATION[kv_cache_dtype]))


def test_plan_of_draft_model_and_encoder_equals_engine_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    save_encoder(draw_config("bert", Random(3)), tmp_path, labels=2)
    draft = {"speculative_config": '{"method": "draft_model"}'}
    for given in ({}, draft, {"model": str(tmp_path)}):
        flags = [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", value)]
        found = planned(capsys, "--kv-cache-sequences", "4", *flags)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            LLM(kv_cache_sequences=4, **given)
        logged = next(message for message in caplog.messages if message.startswith("memory: "))
        assert logged.startswith(f"memory: weights {found['weight_bytes'] / 1e9:.2f} GB, KV cache ")
        assert f"({found['kv_bytes_per_token']} bytes per token) for {found['total_tokens']} tokens" in logged


def test_plan_includes_weights_of_draft_model(capsys: pytest.CaptureFixture[str]) -> None:
    plain, both = (planned(capsys, *flags) for flags in ((), ("--speculative-config", '{"method": "draft_model"}')))
    expected = (demo.DRAFT / "model.safetensors").stat().st_size
    assert both["weight_bytes"] - plain["weight_bytes"] == pytest.approx(expected, rel=0.02)


def test_ranks_and_replicas_share_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """Each of two ranks stores half of every block. Each of two replicas has half of the blocks."""
    single, ranks, replicas = (
        planned(capsys, *flags)["total_block_num"]
        for flags in ((), ("--tensor-parallel-size", "2"), ("--data-parallel-size", "2"))
    )
    assert ranks == pytest.approx(single, rel=0.2) and replicas == pytest.approx(single / 2, rel=0.2)


@pytest.mark.parametrize("quantization", ["wint8", "w4a8", "wint4-g32"])
def test_quantized_weights_take_planned_bytes(
    quantization: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LLM(quantization=quantization, weight_cache_dir=str(tmp_path), num_gpu_blocks_override=40)
    deadline = time.monotonic() + 60
    while not (files := [path for path in tmp_path.iterdir() if path.suffix == ".packed"]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    expected = planned(capsys, "--quantization", quantization)["weight_bytes"]
    # tolerance: the header of the file is padded to whole huge pages (2 MiB)
    assert files[0].stat().st_size == pytest.approx(expected, rel=0.15, abs=2 * 2**21)


def test_plan_is_for_largest_pipeline_stage(capsys: pytest.CaptureFixture[str]) -> None:
    """The plan applies to every rank: it is the memory of the largest stage."""
    whole, halves = planned(capsys), planned(capsys, "--pipeline-parallel-size", "2")
    layers = json.loads((demo.CHAT / "config.json").read_text())["num_hidden_layers"]
    largest = round(halves["kv_bytes_per_token"] / whole["kv_bytes_per_token"] * layers)
    expected = planned(
        capsys, "--pipeline-parallel-size", "2", "--pipeline-parallel-layers", f"{largest},{layers - largest}"
    )
    assert layers / 2 <= largest < layers and halves["weight_bytes"] == expected["weight_bytes"] < whole["weight_bytes"]


def test_planned_weights_equal_size_of_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    expected = (demo.CHAT / "model.safetensors").stat().st_size
    assert planned(capsys)["weight_bytes"] == pytest.approx(expected, rel=0.01)


def test_formulas_give_documented_numbers() -> None:
    assert block_ratio(300, 1500) == pytest.approx(0.25, abs=0.015)
    assert block_ratio(3000, 100) == 1
    assert kv_cache_ratio(3, 1) == 0.75
    found = CachePlan(17220, 64, 1, 8192, 0.75)
    assert found.prompt_blocks == 12915  # number of prompt blocks in FastDeploy's log
    assert found.max_num_seqs(1000) == 128 and found.max_num_seqs(10_000) == 27
    assert CachePlan(40 * 128, 64, 1, 8192, 0.75).sequences == 40
    assert CachePlan(40 * 128, 64, 1, 32768, 0.75).sequences == 10
    assert CachePlan(40 * 128, 64, 1, 8192, 0.75).tokens == 320 * 1024
    assert CachePlan(40 * 128, 64, 1, 8192, 0.75).batch_size(6000, 2000) == 40
    assert CachePlan(40 * 128, 64, 1, 8192, 0.75).max_num_seqs(2000) == 40
    assert CachePlan(1, 64, 1, 64, 1.0).max_num_seqs(2000) == 1


def test_plan_uses_given_gpu_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(CONFIGS["llama"], tmp_path)
    found = planned(capsys, "--model", str(tmp_path), "--gpu-memory", "1", "--gpu-memory-utilization", "0.5")
    assert found["room_bytes"] == 2**29 - found["weight_bytes"]
    halved = planned(
        capsys,
        "--model",
        str(tmp_path),
        "--gpu-memory",
        "1",
        "--tensor-parallel-size",
        "2",
        "--activation-memory",
        "0.1",
    )
    assert halved["kv_bytes_per_token"] == found["kv_bytes_per_token"] / 2
    assert halved["weight_bytes"] == found["weight_bytes"] // 2
    assert halved["room_bytes"] == pytest.approx((0.9 - 0.1) * 2**30 - halved["weight_bytes"], abs=2)


def test_recommendations_depend_on_input_and_output_length(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--kv-cache-sequences", "40", "--input-len", "300", "--output-len", "1500")
    assert found["recommended"] == {
        "kv_cache_ratio": 0.167,
        "block_ratio": 0.238,
        "max_num_seqs": 45,
        "batch_size": 45,
    }
    wider = planned(capsys, "--input-len", "300", "--output-len", "1500", "--extend-ratio", "1.3")
    assert wider["recommended"]["block_ratio"] == 0.309


def test_plan_prints_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "memory", "--kv-cache-sequences", "5", "--quantization", "wint8"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^longest sequences +5 +kv_cache_sequences, BLOCK_BS$", printed, re.M)
    assert re.search(r"^tokens +10,240 +NUM_TOTAL_TOKEN$", printed, re.M)
    assert main(["plan", "memory", "--kv-cache-sequences", "1e9"]) == 0
    assert "too little" in (printed := capsys.readouterr().out) and "ranks" not in printed
    assert main(["plan", "memory", "--kv-cache-sequences", "5", "--tensor-parallel-size", "2"]) == 0
    assert re.search(r"^ranks +2 +bytes are per rank$", capsys.readouterr().out, re.M)


@pytest.mark.row(
    "paddlenlp",
    "DeepSeek-R1/a8w8_fp8_wint4",
    "DeepSeek-R1-MTP/a8w8_fp8_wint4",
    "DeepSeek-R1/weight_only_int4",
    "DeepSeek-R1-MTP/weight_only_int4",
    "DeepSeek-R1-2nodes/a8w8_fp8",
    "DeepSeek-R1-MTP-2nodes/a8w8_fp8",
    "DeepSeek-R1-2nodes/weight_only_int8",
    "DeepSeek-R1-MTP-2nodes/weight_only_int8",
)
def test_block_bs_equals_paddlenlp_recommendation_on_one_node(capsys: pytest.CaptureFixture[str]) -> None:
    """PaddleNLP's table has eight rows. The computed values equal those for one node, but not those for two nodes."""
    assert main(["plan", "block-bs", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["recommended"] for row in rows] == [40, 36, 40, 36, 50, 36, 40, 36]
    assert [row["gpus"] for row in rows if row["summed"] == row["recommended"]] == [8] * 4
    assert all(row["gpus"] == 16 for row in rows if row["summed"] != row["recommended"])
    assert all(row["weight_bytes"] + row["recommended"] * row["sequence_bytes"] < 0.9 * 80 * 2**30 for row in rows)
    assert main(["plan", "block-bs"]) == 0
    assert re.search(r"R1-2nodes/a8w8_fp8 .* 50 +45  \+5$", capsys.readouterr().out, re.M)


def test_plan_needs_no_torch_and_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"].to_dict()))
    code = "import sys; from penstock.cli.main import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "plan", "memory", "--model", str(tmp_path)]
    assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0


def test_plan_of_hub_model_downloads_only_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub()
    hub.files = {
        commit: {**files, "config.json": (demo.CHAT / "config.json").read_bytes()}
        for commit, files in hub.files.items()
    }
    try:
        for name, value in {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}.items():
            monkeypatch.setenv(name, value)
        command = [sys.executable, "-m", "penstock.cli.main", "plan", "memory", "--model", "org/chat", "--json"]
        ran = subprocess.run(command, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        folder = Path(json.loads(ran.stdout)["model"])
        assert [path.name for path in folder.iterdir()] == ["config.json"]
    finally:
        hub.stop()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "."], "has no config.json"),
        (["--model", "/nowhere"], "/nowhere does not exist"),
        (["--input-len", "0"], "input_len: must be above 0"),
        (["--gpu-memory", "0.001"], "its weights leave"),
        (["--max-model-length", "5"], "did you mean --max-model-len?"),
        (["--speculative-config", '{"method": "eagle3"}'], "set it to the folder of the eagle3 heads"),
        (["--speculative-config", '{"model": "/nowhere"}'], "/nowhere has no config.json"),
    ],
)
def test_invalid_plan_arguments_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "memory", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_damaged_configuration_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, message in (("{", "is not JSON"), ("[]", "is not a JSON object"), ("{}", "lacks 'hidden_size'")):
        (tmp_path / "config.json").write_text(text)
        assert main(["plan", "memory", "--model", str(tmp_path)]) == 2
        assert message in capsys.readouterr().err
