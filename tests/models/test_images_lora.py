"""LoRA adapters of models with image input, compared with PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import image_checkpoints as images
import pytest
import test_vision_families as composites
import torch
import vision_checkpoints
from image_checkpoints import PLACEHOLDER, noise, prompt
from peft import LoraConfig, PeftModel, get_peft_model
from test_images import SMALL, table

from penstock import LLM, LoRARequest, PenstockError, SamplingParams
from penstock.core import Code

LAYERS = r".*language_model.*\.(q_proj|v_proj|o_proj|up_proj|down_proj)"
MODELS = {
    "qwen2-vl": images.qwen2_vl,
    "ernie4.5-vl": images.ernie4_5_vl,
    "qwen2.5-vl": images.qwen2_5_vl,
    "qwen3-vl": images.qwen3_vl,
}


def save_adapter(model: Any, folder: Path, **config: Any) -> Path:
    """Save an adapter of random weights that are large enough to change the generated tokens."""
    torch.manual_seed(0)
    given = {"r": 4, "lora_alpha": 8, "target_modules": LAYERS, "init_lora_weights": False} | config
    changed = get_peft_model(model, LoraConfig(**given))
    changed.save_pretrained(folder)
    changed.unload()
    return folder


@pytest.mark.parametrize("family", MODELS)
def test_lora_with_images_matches_peft(family: str, tmp_path: Path) -> None:
    """Requests with and without images and adapter run in one batch, and again with the prefix cache."""
    model = images.save_random(MODELS[family](), tmp_path / "model")
    pattern = {"rank_pattern": {"model.language_model.layers.1.self_attn.q_proj": 8}}
    path = save_adapter(model, tmp_path / "adapter", **pattern)
    llm = LLM(tmp_path / "model", enable_lora=True, max_num_batched_tokens=37, **SMALL)
    shown = [[noise(0, 40, 56)], [noise(0, 40, 56)], [], [noise(1, 30, 30), noise(2, 24, 60)]]
    adapters = [None, LoRARequest("a", 1, str(path)), LoRARequest("a", 1, str(path)), LoRARequest("a", 1, str(path))]
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True)
    params = params.replace(logit_bias={PLACEHOLDER: -100.0})
    prompts = [prompt(each, text=20) for each in shown]
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
    again = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
    assert [each.outputs[0].token_ids for each in again] == [each.outputs[0].token_ids for each in outputs]
    assert all(each.num_cached_tokens for each in again[:2])
    with_adapter = type(model).from_pretrained(tmp_path / "model", dtype=torch.float32)
    with_adapter = PeftModel.from_pretrained(with_adapter, path).eval()
    generated = []
    for pictures, adapter, output in zip(shown, adapters, outputs, strict=True):
        (completion,) = output.outputs
        tokens = output.prompt_token_ids + completion.token_ids
        found = table(with_adapter if adapter else model, tokens, pictures).clone()
        found[:, PLACEHOLDER] -= 100
        assert found[len(output.prompt_token_ids) - 1 : -1].argmax(-1).tolist() == completion.token_ids
        generated.append(completion.token_ids)
    assert generated[0] != generated[1]


@pytest.mark.parametrize("family", vision_checkpoints.FAMILIES)
def test_lora_of_language_model_after_projector_matches_peft(family: str, tmp_path: Path) -> None:
    model = vision_checkpoints.save(family, tmp_path / "model")
    path = save_adapter(model, tmp_path / "adapter")
    llm = LLM(tmp_path / "model", enable_lora=True, **SMALL)
    given = composites.prompt(family, [noise(0, 40, 56)])
    params = composites.no_marks(family, max_tokens=6, logprobs=0, ignore_eos=True)
    adapters = [None, LoRARequest("a", 1, str(path))]
    outputs = llm.generate([given, given], params, use_tqdm=False, lora_request=adapters)
    with_adapter = type(model).from_pretrained(tmp_path / "model", dtype=torch.float32)
    with_adapter = PeftModel.from_pretrained(with_adapter, path).eval().base_model.model
    reported = []
    for library, output in zip((model, with_adapter), outputs, strict=True):
        (completion,) = output.outputs
        tokens, found = composites.table(family, library, given, completion.token_ids)
        assert composites.best(family, found, tokens) == completion.token_ids
        reported.append([next(iter(position.values())).logprob for position in completion.logprobs or []])
        at = range(len(tokens) - 1, len(found) - 1)
        assert reported[-1] == pytest.approx(found[at, completion.token_ids].tolist(), abs=1e-4)
    assert reported[0] != pytest.approx(reported[1], abs=1e-2)


def test_lora_of_vision_tower_is_refused(tmp_path: Path) -> None:
    model = images.save_random(images.qwen2_vl(), tmp_path / "model")
    path = save_adapter(model, tmp_path / "adapter", target_modules=r".*visual.*\.(fc1|q_proj)")
    llm = LLM(tmp_path / "model", enable_lora=True, **SMALL)
    with pytest.raises(PenstockError) as error:
        llm.generate([prompt([])], lora_request=LoRARequest("a", 1, str(path)), use_tqdm=False)
    assert error.value.failure.code is Code.UNSUPPORTED
    assert "visual" in error.value.failure.message
