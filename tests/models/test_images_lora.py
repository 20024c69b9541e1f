"""Adapters of models that see images, against PEFT."""

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
    """One of random weights, large enough to change what is said."""
    torch.manual_seed(0)
    given = {"r": 4, "lora_alpha": 8, "target_modules": LAYERS, "init_lora_weights": False} | config
    changed = get_peft_model(model, LoraConfig(**given))
    changed.save_pretrained(folder)
    changed.unload()
    return folder


@pytest.mark.parametrize("family", MODELS)
def test_adapters_with_images(family: str, tmp_path: Path) -> None:
    """With an image and without, with an adapter and without, in one batch; and again from the prefix cache."""
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
    told = []
    for pictures, adapter, output in zip(shown, adapters, outputs, strict=True):
        (made,) = output.outputs
        tokens = output.prompt_token_ids + made.token_ids
        found = table(with_adapter if adapter else model, tokens, pictures).clone()
        found[:, PLACEHOLDER] -= 100
        assert found[len(output.prompt_token_ids) - 1 : -1].argmax(-1).tolist() == made.token_ids
        told.append(made.token_ids)
    assert told[0] != told[1]


@pytest.mark.parametrize("family", vision_checkpoints.FAMILIES)
def test_adapters_of_language_models_behind_a_projector(family: str, tmp_path: Path) -> None:
    model = vision_checkpoints.save(family, tmp_path / "model")
    path = save_adapter(model, tmp_path / "adapter")
    llm = LLM(tmp_path / "model", enable_lora=True, **SMALL)
    given = composites.prompt(family, [noise(0, 40, 56)])
    params = composites.no_marks(family, max_tokens=6, logprobs=0, ignore_eos=True)
    adapters = [None, LoRARequest("a", 1, str(path))]
    outputs = llm.generate([given, given], params, use_tqdm=False, lora_request=adapters)
    with_adapter = type(model).from_pretrained(tmp_path / "model", dtype=torch.float32)
    with_adapter = PeftModel.from_pretrained(with_adapter, path).eval().base_model.model
    told = []
    for library, output in zip((model, with_adapter), outputs, strict=True):
        (made,) = output.outputs
        tokens, found = composites.table(family, library, given, made.token_ids)
        assert composites.best(family, found, tokens) == made.token_ids
        told.append([next(iter(one.values())).logprob for one in made.logprobs or []])
        at = range(len(tokens) - 1, len(found) - 1)
        assert told[-1] == pytest.approx(found[at, made.token_ids].tolist(), abs=1e-4)
    assert told[0] != pytest.approx(told[1], abs=1e-2)


def test_one_of_the_vision_tower_is_refused(tmp_path: Path) -> None:
    model = images.save_random(images.qwen2_vl(), tmp_path / "model")
    path = save_adapter(model, tmp_path / "adapter", target_modules=r".*visual.*\.(fc1|q_proj)")
    llm = LLM(tmp_path / "model", enable_lora=True, **SMALL)
    with pytest.raises(PenstockError) as error:
        llm.generate([prompt([])], lora_request=LoRARequest("a", 1, str(path)), use_tqdm=False)
    assert error.value.failure.code is Code.UNSUPPORTED
    assert "visual" in error.value.failure.message
