"""Gemma 4: heads that differ between layers, shared keys and values, inputs of each layer, experts next to the MLP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from checkpoints import SMALL, randomize, save
from families import gemma4, gemma4_moe
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from test_families import GREEDY, OPTIONS, PROMPTS, check
from transformers import Gemma4ForCausalLM, Gemma4TextConfig, Gemma4UnifiedTextConfig, PreTrainedModel

from penstock import LoRARequest
from penstock.checkpoint.config_json import read_config_json
from penstock.checkpoint.kv_spec import bytes_per_token
from penstock.core import PenstockError, SamplingParams
from penstock.engine.engine import Engine
from penstock.frontend.llm import LLM
from penstock.models import read_config
from penstock.planning.kv_size import kv_specs, weight_bytes
from penstock.planning.model_size import model_size_of

pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)

KINDS = ["sliding_attention", "full_attention"]
FIELDS = SMALL | {
    "max_position_embeddings": 512,
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 48,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "layer_types": KINDS * 3,
    "sliding_window": 24,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 300,
}
"""A small model with everything in which layers can differ, except experts. Layers 3 to 5 attend to the keys and values of
layers 1 and 2."""
REPEATED = [prompt[:20] * 4 for prompt in PROMPTS if len(prompt) >= 20]
"""Prompts with repetitions, for drafts of n-grams."""
NGRAMS = json.dumps({"method": "ngram", "num_speculative_tokens": 4, "adaptive": False})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma4")
    save(Gemma4TextConfig(**FIELDS), folder)
    return folder


def outputs(folder: Path, prompts: list[list[int]], **options: Any) -> list[Any]:
    """Greedy tokens and log probabilities."""
    llm = LLM(folder, **OPTIONS | options)
    found = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in found]


def draw_with_experts(seed: int, folder: Path) -> PreTrainedModel:
    model = save(gemma4_moe(Random(f"Gemma4 {seed}")), folder)
    model.set_experts_implementation("eager")  # the other implementations do not support float64
    return model


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("seed", range(3))
def test_model_with_experts_matches_transformers(seed: int, tmp_path: Path) -> None:
    check(tmp_path, draw_with_experts(seed, tmp_path))


@pytest.mark.slow
def test_unified_model_matches_transformers(tmp_path: Path) -> None:
    fields = {name: value for name, value in FIELDS.items() if "per_layer_input" not in name}
    config = Gemma4UnifiedTextConfig(**fields | {"num_kv_shared_layers": 0})
    check(tmp_path, save(config, tmp_path))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_bits_do_not_depend_on_drafts_ranks_and_stages(experts: bool, folder: Path, tmp_path: Path) -> None:
    if experts:
        draw_with_experts(3, folder := tmp_path)
    expected = outputs(folder, REPEATED, max_num_batched_tokens=512, num_gpu_blocks_override=400)
    stages = {"pipeline_parallel_size": 2, "pipeline_parallel_layers": "1,5"}
    for options in (
        {"speculative_config": NGRAMS},
        {"tensor_parallel_size": 2},
        {**stages, "speculative_config": NGRAMS},
        {"preemption_mode": "swap", "swap_space": 0.01},
        {"tensor_parallel_size": 2, "enable_expert_parallel": True} if experts else {**stages, "tensor_parallel_size": 2},
    ):
        assert outputs(folder, REPEATED, **options) == expected, options
