"""Quantized checkpoints of models run by transformers' modules, against transformers with the dequantized weights."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized import KINDS, draw_matrix, quantize_checkpoint, set_quantization
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config, PreTrainedModel
from transformers_architectures import OPTIONS, compare, save, tiny

from penstock.core import PenstockError
from penstock.frontend.llm import LLM

UNQUANTIZED = ("embed", "lm_head", "norm", "router", "gate.weight", "conv1d")
FAST = ["gptq asymmetric, act-order, v2", "fp8 blocks"]
FORMATS = [*FAST, *(kind for kind in KINDS if kind not in FAST and KINDS[kind].activations[0] != "int8")]
"""Kinds whose activations are not quantized on CPUs, those of the fast tests first."""
ARCHITECTURES = [
    "AfmoeForCausalLM",
    "ArceeForCausalLM",
    "DeepseekV32ForCausalLM",
    "Dots1ForCausalLM",
    "FalconForCausalLM",
    "FlexOlmoForCausalLM",
    "GPTNeoXForCausalLM",
    "HeliumForCausalLM",
    "JambaForCausalLM",
    "MixtralForCausalLM",
    "NemotronForCausalLM",
    "OPTForCausalLM",
    "PhiForCausalLM",
    "YoutuForCausalLM",
]


def is_quantized(name: str, outputs: int, inputs: int) -> bool:
    return not any(part in name for part in UNQUANTIZED) and not outputs % 32 and not inputs % 32


def quantized(architecture: str, kind: str, folder: Path) -> PreTrainedModel:
    save(architecture, tiny(architecture), folder)
    return quantize_checkpoint(folder, KINDS[kind], is_quantized)


def check(folder: Path, model: PreTrainedModel, **options: Any) -> None:
    """Compare tokens and log probabilities."""
    found = compare(LLM(folder, **OPTIONS, **options), model)
    assert (found.wrong_tokens, found.difference < 1e-3) == (0, True), found


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("kind", FORMATS)
def test_tokens_match_transformers_for_each_format(kind: str, tmp_path: Path) -> None:
    check(tmp_path, quantized("StableLmForCausalLM", kind, tmp_path))


@pytest.mark.parametrize(
    ("architecture", "kind", "dequantized"),
    [
        ("StableLmForCausalLM", "compressed-tensors w4a16 asymmetric", False),
        ("StableLmForCausalLM", "bitsandbytes nf4", True),
        ("AfmoeForCausalLM", "gptq", False),
    ],
)
def test_linear_layers_and_experts_keep_format_that_kernels_support(
    architecture: str, kind: str, dequantized: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The CPU kernels for float32 dequantize; those for bfloat16, and the reference, do not."""
    model = quantized(architecture, kind, tmp_path)
    with caplog.at_level(logging.INFO):
        check(tmp_path, model, ops="reference")
    assert any("dequantized weights" in message for message in caplog.messages) == dequantized


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", ["gptq", "compressed-tensors w4a16 asymmetric", "bitsandbytes nf4"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_match_transformers_for_each_architecture(architecture: str, kind: str, tmp_path: Path) -> None:
    check(tmp_path, quantized(architecture, kind, tmp_path))


def test_transposed_layers_of_gpt2_are_quantized_by_outputs(tmp_path: Path) -> None:
    """GPTQ and AWQ store the transposed layers of GPT-2 like others."""
    model, kind = save("GPT2LMHeadModel", tiny("GPT2LMHeadModel"), tmp_path), KINDS["gptq"]
    generator, tensors = torch.Generator().manual_seed(0), dict[str, torch.Tensor]()
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        if ".c_" not in name or weight.dim() < 2:
            tensors[name] = weight
            continue
        stored, numbers = draw_matrix(kind, generator, *weight.T.shape)
        model.get_parameter(name).data = numbers.T.contiguous()
        tensors |= {name.replace("weight", part): tensor for part, tensor in stored.items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    set_quantization(tmp_path, kind)
    check(tmp_path, model)


def test_quantized_tensor_in_unknown_layout_is_refused(tmp_path: Path) -> None:
    quantized("StableLmForCausalLM", "fp8 blocks", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    del tensors[f"{name}_scale_inv"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(PenstockError, match=f"tensor {name} is stored in float8_e4m3fn, in a layout.*use a checkpoint"):
        LLM(tmp_path, **OPTIONS)


@pytest.mark.parametrize(("field", "message"), [("quant_method", "unsupported quant_method 'quip'"), ("bits", "GPTQ")])
def test_unsupported_quantization_is_refused(field: str, message: str, tmp_path: Path) -> None:
    save("StableLmForCausalLM", tiny("StableLmForCausalLM"), tmp_path)
    path = tmp_path / "config.json"
    described = {"quant_method": "gptq", "bits": 4} | {field: "quip" if field == "quant_method" else 5}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": described}))
    with pytest.raises(PenstockError, match=message):
        LLM(tmp_path, **OPTIONS)


def test_head_stored_instead_of_tied_embedding_is_loaded(tmp_path: Path) -> None:
    """Some tools write tied tensors under the name of the language model head alone."""
    config = tiny("StableLmForCausalLM", tie_word_embeddings=True)
    model = save("StableLmForCausalLM", config, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert compare(LLM(tmp_path, **OPTIONS), model).wrong_tokens == 0


@pytest.mark.slow
def test_experts_of_gpt_oss_in_mxfp4_match_transformers(tmp_path: Path) -> None:
    save("GptOssForCausalLM", tiny("GptOssForCausalLM"), tmp_path)
    generator, tensors = torch.Generator().manual_seed(1), dict[str, torch.Tensor]()
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        drawn = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*drawn, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(120, 126, drawn, generator=generator, dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}))
    options = {"quantization_config": Mxfp4Config(dequantize=True), "dtype": torch.float32}
    check(tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path, **options).float())
