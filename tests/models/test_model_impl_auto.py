"""``--model-impl auto``: transformers runs a configuration that Penstock's implementation of the family lacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SMALL, save
from transformers import (
    AutoModelForCausalLM,
    Ernie4_5_MoeConfig,
    Llama4TextConfig,
    LlamaConfig,
    OlmoeConfig,
    PreTrainedConfig,
)

from penstock.core import PenstockError, SamplingParams
from penstock.frontend.llm import LLM
from penstock.models import read_config

PROMPT = list(range(2, 40))
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 8, "weight_cache_dir": "none"}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
LLAMA4: dict[str, Any] = {
    "tie_word_embeddings": False,
    "num_local_experts": 4,
    "intermediate_size_mlp": 96,
    "head_dim": 16,
}
ERNIE: dict[str, Any] = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1}
UNSUPPORTED: dict[str, tuple[PreTrainedConfig, str]] = {
    "OLMoE with clip_qkv": (OlmoeConfig(**SMALL, **EXPERTS, clip_qkv=0.5), "clip_qkv"),
    "ERNIE with use_bias": (Ernie4_5_MoeConfig(**SMALL, **ERNIE, use_bias=True), "use_bias"),
    "Llama with mish": (LlamaConfig(**SMALL, hidden_act="mish"), "activation 'mish'"),
    "Llama with tanh": (LlamaConfig(**SMALL, hidden_act="tanh"), "activation 'tanh'"),
    "Llama 4 with two experts": (
        Llama4TextConfig(**SMALL, **LLAMA4, num_experts_per_tok=2),
        "num_experts_per_tok in config.json is 2",
    ),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_auto_runs_unsupported_config_with_transformers(name: str, tmp_path: Path) -> None:
    config, message = UNSUPPORTED[name]
    model = save(config, tmp_path)
    with pytest.raises(PenstockError, match=message):
        read_config(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = LLM(tmp_path, **OPTIONS, model_impl="auto").generate([PROMPT], params, use_tqdm=False)
    with torch.inference_mode():
        table = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    reported = [found.logprob for position in (output.prompt_logprobs or [])[1:] for found in (position or {}).values()]
    assert reported == pytest.approx(table[range(len(PROMPT) - 1), PROMPT[1:]].tolist(), abs=1e-3)


def test_auto_selects_penstock_implementation_if_supported(tmp_path: Path) -> None:
    save(LlamaConfig(**SMALL), tmp_path)
    assert read_config(tmp_path, "auto").model_impl == "penstock"


@pytest.mark.parametrize("model_impl", ["penstock", "auto"])
def test_config_without_architectures_is_read_by_model_type(model_impl: Any, tmp_path: Path) -> None:
    model = save(LlamaConfig(**SMALL), tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "architectures": None}))
    (output,) = LLM(tmp_path, **OPTIONS, model_impl=model_impl).generate(
        [PROMPT], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False
    )
    expected = model.generate(torch.tensor([PROMPT]), max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert output.outputs[0].token_ids == expected[0, len(PROMPT) :].tolist()


def test_transformers_model_without_architectures_is_found(tmp_path: Path) -> None:
    save(LlamaConfig(**SMALL), tmp_path / "llama")
    config = {"model_type": "gpt_neox", "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "intermediate_size": 96, "max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path, "auto").architecture == "GPTNeoXForCausalLM"
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "none-of-these"}))
    with pytest.raises(PenstockError, match="architecture none"):
        read_config(tmp_path, "auto")


@pytest.mark.parametrize("dtype_field", [{"torch_dtype": "auto"}, {"dtype": "auto"}, {}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_missing_or_auto_dtype_is_dtype_of_the_weights(dtype_field: dict[str, str], dtype: str, tmp_path: Path) -> None:
    save(LlamaConfig(**SMALL), tmp_path).to(getattr(torch, dtype)).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    kept = {name: value for name, value in raw.items() if name not in ("dtype", "torch_dtype")}
    (tmp_path / "config.json").write_text(json.dumps(kept | dtype_field))
    if not dtype_field:
        assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == getattr(torch, dtype)
    assert read_config(tmp_path).dtype == dtype
