"""Values of ``config.json`` that differ in meaning between families, or differ between layers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import quantized
import torch
from checkpoints import SMALL, save
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3Config,
)

from penstock.calibration.options import QuantizeOptions
from penstock.calibration.quantize import quantize
from penstock.checkpoint.config_json import read_config_json
from penstock.core import PenstockError, SamplingParams
from penstock.frontend.llm import LLM
from penstock.models import ModelConfig, read_config
from penstock.planning.model_size import model_size_of

PROMPT = list(range(2, 60))
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 8, "weight_cache_dir": "none"}
LATENT = {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "kv_lora_rank": 32, "q_lora_rank": None}
LATENT |= {"num_key_value_heads": 4}
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 32}
GEMMAS: dict[str, PreTrainedConfig] = {
    "Gemma, gelu is the tanh approximation": GemmaConfig(**SMALL, head_dim=16, hidden_act="gelu"),
    "Gemma, relu": GemmaConfig(**SMALL, head_dim=16, hidden_act="relu"),
    "Gemma 2, exact": Gemma2Config(**SMALL, head_dim=16, hidden_activation="gelu"),
    "Gemma 2": Gemma2Config(**SMALL, head_dim=16),
    "Gemma 3, exact": Gemma3TextConfig(**SMALL, head_dim=16, hidden_activation="gelu"),
}


def write(folder: Path, **fields: Any) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | fields))


def check(folder: Path, model: Any, **options: Any) -> None:
    """Compare log probabilities of a prompt with transformers."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = LLM(folder, **OPTIONS | options).generate([PROMPT], params, use_tqdm=False)
    with torch.inference_mode():
        table = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    reported = [found.logprob for position in (output.prompt_logprobs or [])[1:] for found in (position or {}).values()]
    assert reported == pytest.approx(table[range(len(PROMPT) - 1), PROMPT[1:]].tolist(), abs=1e-4)


@pytest.mark.parametrize("name", GEMMAS)
def test_activation_of_gemma_matches_transformers(name: str, tmp_path: Path) -> None:
    check(tmp_path, save(GEMMAS[name], tmp_path))


def test_moe_layer_freq_may_list_all_layers(tmp_path: Path) -> None:
    model = save(DeepseekV3Config(**SMALL | LATENT, **EXPERTS, first_k_dense_replace=1), tmp_path)
    plain, size = read_config(tmp_path), model_size_of(read_config_json(tmp_path))
    write(tmp_path, first_k_dense_replace=0, moe_layer_freq=[0, 1, 1])
    marked = read_config(tmp_path)
    for field in dataclasses.fields(ModelConfig):
        assert field.name == "raw" or getattr(plain, field.name) == getattr(marked, field.name)
    assert model_size_of(read_config_json(tmp_path)) == size
    check(tmp_path, model)
    write(tmp_path, moe_layer_freq=[0, 1])
    with pytest.raises(PenstockError, match="moe_layer_freq has 2 entries; it must have one for each of 3 layers"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sliding_window": [16, None, 16]}, "a list as sliding_window; only a single value"),
        ({"rope_parameters": {"rope_theta": [1e4, 1e5, 1e4]}}, "a list as rope_theta"),
        ({"rope_theta": [1e4, 1e5, 1e4], "rope_parameters": None}, "a list as rope_theta"),
    ],
)
@pytest.mark.parametrize("model_impl", ["penstock", "auto"])
def test_unsupported_value_per_layer_is_refused(
    fields: dict[str, Any], message: str, model_impl: Any, tmp_path: Path
) -> None:
    save(MistralConfig(**SMALL), tmp_path)
    write(tmp_path, **fields)
    with pytest.raises(PenstockError, match=message):
        read_config(tmp_path, model_impl)


ODD_HEADS: dict[str, PreTrainedConfig] = {
    "Llama, 8": LlamaConfig(**SMALL, head_dim=8, attention_bias=True),
    "Llama, 100": LlamaConfig(**SMALL, head_dim=100),
    "Gemma 2, 24": Gemma2Config(**SMALL, head_dim=24),
    "Phi-3, 20, a part rotated": Phi3Config(**SMALL | {"hidden_size": 80}, partial_rotary_factor=0.5),
    "GPT-OSS, 24": GptOssConfig(**SMALL, head_dim=24, num_local_experts=4, num_experts_per_tok=2),
}


@pytest.mark.parametrize("name", ODD_HEADS)
def test_heads_of_any_even_size_match_transformers(name: str, tmp_path: Path) -> None:
    model = save(ODD_HEADS[name], tmp_path)
    check(tmp_path, model, max_num_batched_tokens=25, max_model_len=128)
    size, config = model_size_of(read_config_json(tmp_path)), read_config(tmp_path)
    assert size.kv_dim == config.head_dim == -(-config.checkpoint_head_dim // 16) * 16


def test_qk_norms_with_padded_heads_run_only_with_transformers(tmp_path: Path) -> None:
    model = save(Qwen3Config(**SMALL, head_dim=24), tmp_path)
    with pytest.raises(PenstockError, match="head_dim is 24; for a model with q/k norms it must be a multiple of 16"):
        read_config(tmp_path)
    check(tmp_path, model, model_impl="auto")


def test_lora_and_quantize_refuse_padded_heads(tmp_path: Path) -> None:
    save(LlamaConfig(**SMALL, head_dim=24), tmp_path / "model")
    with pytest.raises(PenstockError, match="not supported for a model with head_dim 24; it must be a multiple of 16"):
        LLM(tmp_path / "model", enable_lora=True, **OPTIONS)
    with pytest.raises(PenstockError, match="has head_dim 24, which must be a multiple of 16"):
        quantize(tmp_path / "model", tmp_path / "new", QuantizeOptions("wint4"))


@pytest.mark.thorough
def test_heads_of_any_even_size_are_split_between_ranks(tmp_path: Path) -> None:
    model = save(LlamaConfig(**SMALL, head_dim=20), tmp_path)
    check(tmp_path, model, tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("self_attn.q_proj.bias", (64,)),
        ("self_attn.q_norm.weight", (16,)),
        ("mlp.shared_expert.up_proj.weight", (8, 8)),
    ],
)
def test_tensors_not_in_the_config_are_ignored_with_a_warning(
    name: str, shape: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in transformers, the fields of the config determine the modules; additional tensors are logged."""
    save(LlamaConfig(**SMALL), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    torch.manual_seed(0)
    more = {f"model.layers.{layer}.{name}": torch.randn(shape) for layer in range(3)}
    save_file(tensors | more, tmp_path / "model.safetensors", {"format": "pt"})
    check(tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    (record,) = [each for each in caplog.records if "tensors of the checkpoint are ignored" in each.getMessage()]
    assert "3 tensors of the checkpoint are ignored, as config.json does not say" in record.getMessage()
    assert f"model.layers.0.{name}" in record.getMessage()


@pytest.mark.parametrize(("value", "warned"), [(0.0, False), (1.0, True)])
def test_ignored_biases_of_gptq_are_logged_unless_zero(
    value: float, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """GPTQ files have biases for all matrices."""
    quantized.quantize(tmp_path, quantized.KINDS["gptq 8 bits, act-order"])
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("q_proj.qweight"))
    bias = torch.full((tensors[name].shape[1],), value, dtype=torch.float16)
    tensors[name.replace("qweight", "bias")] = bias
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    LLM(tmp_path, **OPTIONS)
    assert ("are ignored" in caplog.text) is warned


def test_checkpoint_without_extra_tensors_logs_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = save(LlamaConfig(**SMALL, attention_bias=True), tmp_path)
    check(tmp_path, model)
    assert "ignored" not in caplog.text
