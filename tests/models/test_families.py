"""Every family of text models, with random configurations, compared with transformers."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from checkpoints import save
from families import (
    FAMILIES,
    VOCABULARY,
    WITH_EXPERTS,
    draw,
    draw_llama_without_biases,
    rewrite_as_internlm2,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from penstock.core import PenstockError, SamplingParams
from penstock.frontend.llm import LLM
from penstock.models import read_config

pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)

DRAWS = int(os.environ.get("PENSTOCK_FAMILY_DRAWS", "20"))
"""Number of configurations per family in the thorough test."""
TOLERANCE = 2e-5
PROMPTS = [[Random(length).randrange(2, VOCABULARY) for _ in range(length)] for length in (1, 7, 40, 99, 170, 300)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=2, ignore_eos=True)
WITH_PROMPT = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 16,
    "max_num_batched_tokens": 50,  # prompts are computed in chunks
    "max_model_len": 320,
    "num_gpu_blocks_override": 26,  # too few for all prompts together, so that some sequences are preempted
    "weight_cache_dir": "none",
}


def check(
    folder: Path, model: PreTrainedModel, error_ratio: float = 3.0, prompts: Sequence[list[int]] = PROMPTS
) -> None:
    """Compare a model with transformers: in a batch, in chunks, with preemption, and again from the prefix cache.

    Greedy tokens must be equal. Log probabilities may differ by at most ``TOLERANCE``, or by three times the error of
    transformers in float32, relative to float64.
    """
    llm = LLM(folder, **OPTIONS)
    first, again = (llm.generate(prompts, GREEDY, use_tqdm=False) for _ in range(2))
    assert llm.engine.scheduler.num_preemptions > 0
    assert any(output.num_cached_tokens for output in again)
    whole = llm.generate(prompts, WITH_PROMPT, use_tqdm=False)
    exact = deepcopy(model).double()
    exact.config._experts_implementation = "eager"  # other implementations do not compute in float64
    error, library_error = 0.0, 0.0
    for prompt, output, repeated, with_prompt in zip(prompts, first, again, whole, strict=True):
        (completion,) = output.outputs
        assert repeated.outputs[0].token_ids == completion.token_ids
        assert repeated.outputs[0].logprobs == completion.logprobs
        with torch.inference_mode():
            given = torch.tensor([prompt + completion.token_ids])
            library, table = (each(given).logits[0].log_softmax(-1) for each in (model, exact))
        assert library[len(prompt) - 1 : -1].argmax(-1).tolist() == completion.token_ids
        reported = [*(with_prompt.prompt_logprobs or [])[1:], *(completion.logprobs or [])]
        assert len(reported) == len(prompt) + len(completion.token_ids) - 1
        for row, library_row, position in zip(table, library, reported, strict=False):
            assert position
            for token_id, found in position.items():
                error = max(error, abs(found.logprob - library_row[token_id].item()))
                library_error = max(library_error, abs(library_row[token_id].item() - row[token_id].item()))
    assert error <= max(TOLERANCE, error_ratio * library_error)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", FAMILIES | WITH_EXPERTS)
def test_family_matches_transformers(family: str, tmp_path: Path) -> None:
    check(tmp_path, draw(family, 0, tmp_path))


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES | WITH_EXPERTS)
def test_drawn_configs_match_transformers(family: str, tmp_path: Path) -> None:
    for seed in range(1, DRAWS + 1):
        check(tmp_path / str(seed), draw(family, seed, tmp_path / str(seed)))


def test_falcon_with_alibi_matches_transformers(tmp_path: Path) -> None:
    """transformers rounds the biases to bfloat16, which changes them from position 257 on."""
    config = FAMILIES["Falcon"](Random("Falcon 1"))
    fields = {"new_decoder_architecture": False, "parallel_attn": False, "multi_query": False, "num_kv_heads": 4}
    for name, value in (fields | {"alibi": True, "bias": True, "num_attention_heads": 4}).items():
        setattr(config, name, value)
    check(tmp_path, save(config, tmp_path), prompts=[prompt[:240] for prompt in (*PROMPTS, *PROMPTS[3:])])


def test_fields_of_mpt_without_support_are_refused(tmp_path: Path) -> None:
    draw("Mpt", 0, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    for field, value in (("clip_qkv", 6.0), ("qk_ln", True), ("alibi", False), ("alibi_bias_max", 16)):
        changed = raw | {"attn_config": raw["attn_config"] | {field: value}}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(PenstockError, match=f"attn_config.{field} is {value}, which is not supported for MPT"):
            read_config(tmp_path)


@torch.inference_mode()
def bfloat16_errors(folder: Path, model: PreTrainedModel) -> tuple[float, float]:
    """Errors of prompt log probabilities in bfloat16, of Penstock and transformers, relative to float32."""
    rough = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    if model.config._experts_implementation == "eager":  # other implementations do not support every size
        rough.set_experts_implementation("eager")
    llm = LLM(folder, **OPTIONS | {"dtype": "bfloat16", "max_num_batched_tokens": 512})
    prompts = [[Random(seed).randrange(2, VOCABULARY) for _ in range(200)] for seed in range(4)]
    errors = torch.zeros(2, dtype=torch.float64)
    for prompt, output in zip(prompts, llm.generate(prompts, WITH_PROMPT, use_tqdm=False), strict=True):
        expected, theirs = (
            each(torch.tensor([prompt])).logits[0].float().log_softmax(-1)[range(199), prompt[1:]]
            for each in (model, rough)
        )
        prompt_logprobs = output.prompt_logprobs or []
        mine = torch.tensor(
            [found[token].logprob for found, token in zip(prompt_logprobs[1:], prompt[1:], strict=True) if found]
        )
        errors += torch.tensor([float((got - expected).square().sum()) for got in (mine, theirs)])
    ours, library = errors.sqrt().tolist()
    return ours, library


@pytest.mark.parametrize("family", ["Gemma3", "Olmo2", "Cohere2", "Granite"])
def test_bfloat16_error_is_near_that_of_transformers(family: str, tmp_path: Path) -> None:
    ours, library = bfloat16_errors(tmp_path, draw(family, 0, tmp_path))
    assert ours <= 1.2 * library


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES | WITH_EXPERTS)
def test_mean_bfloat16_error_is_near_that_of_transformers(family: str, tmp_path: Path) -> None:
    """Averages over several configurations: the errors of a single model are correlated, as all positions attend to the
    first positions, where another rounding halves or doubles all errors. Compares the mean of the logarithms of the
    ratios, minus twice its standard error."""
    ratios = []
    for seed in range(1, 9):
        ours, library = bfloat16_errors(tmp_path / str(seed), draw(family, seed, tmp_path / str(seed)))
        ratios.append(math.log(ours / library))
    error = statistics.stdev(ratios) / len(ratios) ** 0.5
    assert statistics.mean(ratios) - 2 * error <= math.log(1.2)


@pytest.mark.slow
def test_internlm2_matches_llama(tmp_path: Path) -> None:
    model = draw_llama_without_biases(tmp_path)
    rewrite_as_internlm2(tmp_path)
    check(tmp_path, model)


def test_composite_llama4_runs_text_and_refuses_images(tmp_path: Path) -> None:
    model, text = draw("Llama4", 0, tmp_path / "text"), json.loads((tmp_path / "text" / "config.json").read_text())
    whole = tmp_path / "whole"
    whole.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (whole / name).symlink_to(tmp_path / "text" / name)
    names = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "vision_config": {}}
    tied = {"tie_word_embeddings": text["tie_word_embeddings"]}
    (whole / "config.json").write_text(json.dumps({**names, **tied, "text_config": text}))
    tensors = load_file(tmp_path / "text" / "model.safetensors")
    save_file({f"language_model.{name}": tensor for name, tensor in tensors.items()}, whole / "model.safetensors")
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    llm = LLM(whole, **OPTIONS)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPTS[2]])).logits[0, -1].argmax().item()
    (output,) = llm.generate([PROMPTS[2]], GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids[0] == expected
    with pytest.raises(PenstockError, match="images: are not supported by this model"):
        llm.chat([{"role": "user", "content": image}])


def test_early_config_json_has_the_same_meaning(tmp_path: Path) -> None:
    """Early files lack ``rope_parameters`` and ``layer_types``."""
    for family in ("Gemma3", "Phi3", "Cohere2", "Gemma2"):
        folder = tmp_path / family
        model = draw(family, 0, folder)
        text = model.config
        raw = json.loads((folder / "config.json").read_text())
        now = read_config(folder)
        rope, kinds = raw.pop("rope_parameters"), raw.pop("layer_types", [])
        if family == "Gemma3":
            whole = rope["full_attention"]
            raw |= {"rope_theta": whole.pop("rope_theta"), "rope_local_base_freq": 10_000.0}
            raw |= {"rope_scaling": whole if whole["rope_type"] != "default" else None}
            raw |= {"sliding_window_pattern": kinds.index("full_attention") + 1}
        else:
            raw |= {"rope_theta": rope.pop("rope_theta")}
            raw |= {"partial_rotary_factor": rope.pop("partial_rotary_factor", 1.0)} if family == "Phi3" else {}
            if rope.get("rope_type") == "longrope":
                raw |= {"rope_scaling": {**rope, "type": "su", "rope_type": None}}
            if family == "Cohere2":
                raw |= {"sliding_window_pattern": kinds.index("full_attention") + 1}
        if family != "Phi3" and text.tie_word_embeddings:
            raw.pop("tie_word_embeddings")
        (folder / "config.json").write_text(json.dumps(raw))
        early = read_config(folder)
        for name in ("sliding_windows", "tie_word_embeddings", "options", "max_model_len", "num_layers"):
            assert getattr(early, name) == getattr(now, name), (family, name)
        for layer in range(now.num_layers):
            ours, theirs = early.rope_of(layer) or {}, now.rope_of(layer) or {}
            for name in ("rope_type", "rope_theta", "factor", "short_factor", "original_max_position_embeddings"):
                assert ours.get(name) == theirs.get(name), (family, name)
