"""The table of features in docs/models.md: each feature runs or is refused as its cell documents.

The default suite runs the families with special layers; the thorough tests run every cell.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from families import (
    FAMILIES,
    VOCABULARY,
    WITH_EXPERTS,
    draw,
    draw_llama_without_biases,
    rewrite_as_internlm2,
)
from peft import LoraConfig, PeftModel, get_peft_model
from repository import ROOT
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from penstock import GuidedDecodingParams, LoRARequest, PenstockError
from penstock.calibration.options import QuantizeOptions
from penstock.calibration.quantize import quantize
from penstock.core import Code, EngineRequest, SamplingParams
from penstock.frontend.llm import LLM
from penstock.models import registry
from penstock.planning.kv_size import weight_bytes
from penstock.planning.model_size import model_size_of

pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)
from test_exactness import ADAPTERS, start
from test_prefill_decode import Cluster
from test_prefill_decode import run as run_requests

TABLE = ROOT / "docs" / "models.md"
YES, NO = "✓", "–"
NGRAM = json.dumps({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1})
OPTIONS: dict[str, Any] = {"block_size": 16, "num_gpu_blocks_override": 60, "weight_cache_dir": "none"}
OPTIONS |= {"max_model_len": 320}
PROMPTS = [[Random(length).randrange(2, VOCABULARY) for _ in range(length)] for length in (3, 40, 120)]
TOKENS = 3584
"""Vocabulary size of the tokenizer, for grammars."""
GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
TARGETS = "q_proj k_proj v_proj qkv_proj o_proj gate_proj up_proj gate_up_proj down_proj c_fc c_proj".split()
TARGETS += ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"]
TARGETS += ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h", "Wqkv", "out_proj"]
SPECIAL = ("Gemma3", "Olmo2", "Cohere", "Phi3")
"""Families in the default suite. They have float32 norms, norms over all heads, norms by head, and fused
projections."""


def rows() -> dict[str, dict[str, str]]:
    """The cells of the first table by architecture and column."""
    lines = TABLE.read_text(encoding="utf-8").partition("\n## ")[0].splitlines()
    lines = [line for line in lines if line.startswith("|")]
    head, _, *others = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    table: dict[str, dict[str, str]] = {}
    for cells in others:
        for name in re.findall(r"`(\w+)`", cells[1]):
            table[name] = dict(zip(head[2:], cells[2:], strict=True))
    return table


def results(llm: LLM, lora: LoRARequest | None = None) -> list[Any]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=lora)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def adapter(folder: Path) -> Path:
    """Save an adapter of all linear modules in the folder of the checkpoint."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    present = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if any(
        hasattr(model.config, name) for name in ("num_experts_per_tok", "moe_topk")
    ):  # PEFT adapts experts as tensors, which Penstock refuses
        present -= {"gate_proj", "up_proj", "down_proj"}
    changed = get_peft_model(
        model, LoraConfig(r=3, target_modules=sorted(present & set(TARGETS)), init_lora_weights=False)
    )
    changed.save_pretrained(folder / "adapter")
    return folder / "adapter"


def lora(folder: Path) -> None:
    """Check that greedy tokens with an adapter match PEFT."""
    path = adapter(folder)
    llm = LLM(folder, dtype="float32", enable_lora=True, max_loras=1, **OPTIONS)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), path)
    for prompt, (token_ids, _) in zip(PROMPTS, results(llm, LoRARequest("a", 1, str(path))), strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == token_ids


def combined(folder: Path) -> None:
    """Check that drafts do not change answers with an adapter, a grammar, and quantized weights and KV cache."""
    path = folder / "adapter"
    options = OPTIONS | {
        "dtype": "bfloat16",
        "quantization": "w8a8",
        "kv_cache_dtype": "int8",
        "enable_lora": True,
        "max_loras": 1,
    }
    guided = SamplingParams(temperature=0, max_tokens=8, guided_decoding=GuidedDecodingParams(regex="[ab]{4}"))
    answers = []
    for more in ({}, {"speculative_config": NGRAM}):
        llm = LLM(folder, **options, **more)
        (chosen,) = llm.generate([PROMPTS[0]], guided, use_tqdm=False)
        assert re.fullmatch("[ab]{4}", chosen.outputs[0].text)
        answers.append([results(llm), results(llm, LoRARequest("a", 1, str(path)))])
    assert answers[0] == answers[1]


def ranks_and_stages(folder: Path) -> None:
    """Check that two ranks, and two stages, compute the same bits as one rank."""
    alone = results(LLM(folder, dtype="float32", **OPTIONS))
    for sizes in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        llm = LLM(folder, dtype="float32", **OPTIONS, **sizes)
        assert results(llm) == alone, sizes
        llm.engine.close()


def prefill_and_decode(folder: Path) -> None:
    """Check that prefill and decode instances compute the tokens and log probabilities of a single instance."""
    secret = folder / "secret"
    secret.write_text("of this test's cluster")
    secret.chmod(0o600)
    for name in ADAPTERS:
        (folder / name).symlink_to(folder / "adapter")
    requests = [EngineRequest(request_id=str(i), prompt=prompt, sampling=GREEDY) for i, prompt in enumerate(PROMPTS)]
    kind = "float32 none auto"
    alone = start(folder, kind)
    cluster = Cluster(folder, kind, str(secret), Random(0), [{}], [{}])
    try:
        assert run_requests(cluster, requests) == run_requests(alone, requests)
        cluster.wait_until_free()
        assert cluster.counts("completed")
    finally:
        cluster.close()


def calibration(method: str) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        texts = folder / "texts.txt"
        texts.write_text("\n".join(f"A short text, number {i}." for i in range(8)))
        options = QuantizeOptions(
            method=method, group_size=8, calib_dataset=str(texts), calib_size=4, calib_seq_len=16, eval_size=1
        )
        quantize(folder, folder / method, options, progress=False)
        assert results(LLM(folder / method, dtype="bfloat16", **OPTIONS))

    return run


CHECKS: dict[str, Callable[[Path], None]] = {
    "LoRA": lora,
    "guided, speculation, w8a8, int8 cache": combined,
    "tensor and pipeline parallel": ranks_and_stages,
    "prefill/decode": prefill_and_decode,
    "`quantize` (GPTQ)": calibration("gptq"),
    "`quantize` (AWQ)": calibration("awq"),
}
"""Function that checks each column of the table, in the order in which they run on one checkpoint."""
QUICK = ("LoRA", "guided, speculation, w8a8, int8 cache")


def check(name: str, folder: Path, cell: str) -> None:
    """Check that a feature runs, or is refused, as its cell documents."""
    if cell == YES:
        CHECKS[name](folder)
        return
    assert cell == NO
    with pytest.raises(PenstockError) as refused:
        CHECKS[name](folder)
    assert refused.value.failure.code is Code.UNSUPPORTED


def test_table_has_every_architecture() -> None:
    table = rows()
    assert table.keys() >= {f"{family}ForCausalLM" for family in FAMILIES | WITH_EXPERTS}
    named = set(re.findall(r"`(\w+ForCausalLM)`", TABLE.read_text(encoding="utf-8")))
    assert table.keys() <= set(registry.architectures())
    assert named >= {name for name in registry.architectures() if name.endswith("ForCausalLM")}
    assert all(row.keys() == CHECKS.keys() for row in table.values())


@pytest.mark.parametrize("family", FAMILIES | WITH_EXPERTS)
def test_planned_weight_bytes_equal_the_checkpoint(family: str, tmp_path: Path) -> None:
    model = draw(family, 1, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    matrices = {
        id(each): each.numel()
        for name, each in model.named_parameters()
        if each.dim() > 1 and "norm" not in name and "statics" not in name and "bias" not in name
    }
    assert weight_bytes(model_size_of(config), dtype="float32") == 4 * sum(matrices.values())


@pytest.mark.slow
@pytest.mark.parametrize("family", SPECIAL)
def test_quick_features_of_default_suite_families_are_as_documented(family: str, tmp_path: Path) -> None:
    row = rows()[f"{family}ForCausalLM"]
    draw(family, 1, tmp_path, TOKENS)
    for name in QUICK:
        check(name, tmp_path, row[name])


@pytest.mark.slow
@pytest.mark.parametrize("family", SPECIAL)
def test_ranks_and_stages_compute_the_same_bits_as_one(family: str, tmp_path: Path) -> None:
    draw(family, 2, tmp_path)
    ranks_and_stages(tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES | WITH_EXPERTS)
def test_all_features_are_as_documented(family: str, tmp_path: Path) -> None:
    row = rows()[f"{family}ForCausalLM"]
    draw(family, 3, tmp_path, TOKENS)
    for name in CHECKS:
        check(name, tmp_path, row[name])


@pytest.mark.thorough
def test_all_features_of_internlm2_are_as_documented(tmp_path: Path) -> None:
    """An adapter with one of InternLM 2's module names computes the same as with Llama's names, which the other columns
    use."""
    row = rows()["InternLM2ForCausalLM"]
    draw_llama_without_biases(tmp_path, TOKENS)
    llama = adapter(tmp_path)
    rewrite_as_internlm2(tmp_path)
    own = shutil.copytree(llama, tmp_path / "own")
    tensors = load_file(own / "adapter_model.safetensors")
    renamed = {name.replace("self_attn.o_proj", "attention.wo"): tensor for name, tensor in tensors.items()}
    save_file(renamed, own / "adapter_model.safetensors")
    assert row.pop("LoRA") == YES
    llm = LLM(tmp_path, enable_lora=True, max_loras=2, **OPTIONS)
    assert results(llm, LoRARequest("own", 1, str(own))) == results(llm, LoRARequest("llama", 2, str(llama)))
    for name, cell in row.items():
        check(name, tmp_path, cell)
