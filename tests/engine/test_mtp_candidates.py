"""Drafts of MTP layers, compared with the draft tokens of transformers' ``generate(use_mtp=True)``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SMALL, save
from safetensors.torch import load_file, save_file
from test_plan import LATENT
from transformers import AutoModelForCausalLM, DeepseekV3Config, Glm4MoeConfig, PreTrainedConfig
from transformers.generation.candidate_generator import MTPCandidateGenerator

from penstock import LLM
from penstock.core import EngineRequest, SamplingParams

PROMPTS = [[2 + (7 * i + n) % 290 for i in range(n)] for n in (1, 5, 20, 70)]
LATENT_CONFIG = {**SMALL, **LATENT, "num_key_value_heads": 4, "qk_rope_head_dim": 16}
EXPERTS = {"moe_intermediate_size": 48, "n_routed_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
NEW_TOKENS = 12


def add_mtp_layer(folder: Path, config: PreTrainedConfig) -> str:
    """Add an MTP layer with random weights after the last layer; return the prefix of its tensor names."""
    torch.manual_seed(4)
    tensors = load_file(folder / "model.safetensors")
    size, last = config.hidden_size, config.num_hidden_layers - 1
    name = f"model.layers.{last + 1}"
    for other, tensor in list(tensors.items()):
        if other.startswith(f"model.layers.{last}."):
            drawn = torch.rand_like(tensor) + 0.5 if "norm" in other else torch.randn_like(tensor) * 0.2
            tensors[other.replace(f"model.layers.{last}", name)] = drawn
    tensors |= {f"{name}.{norm}.weight": torch.rand(size) + 0.5 for norm in ("enorm", "hnorm", "shared_head.norm")}
    tensors[f"{name}.eh_proj.weight"] = torch.randn(size, 2 * size) * 0.2
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return name


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "config",
    [DeepseekV3Config(**LATENT_CONFIG, num_mtp_layers=1), Glm4MoeConfig(**SMALL, **EXPERTS, num_mtp_layers=1)],
    ids=lambda config: config.model_type,
)
def test_mtp_drafts_equal_candidates_of_transformers(
    config: PreTrainedConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(config, tmp_path)
    name = add_mtp_layer(tmp_path, config)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    model._keys_to_ignore_on_load_unexpected = [
        rf"{name}\."
    ]  # transformers lists the MTP layers of published checkpoints only
    candidates: dict[tuple[int, ...], list[int]] = {}
    compute = MTPCandidateGenerator.get_candidates

    def record(self: Any, input_ids: Any, *args: Any, **options: Any) -> Any:
        found = compute(self, input_ids, *args, **options)
        candidates[tuple(input_ids[0].tolist())] = found[0][0, input_ids.shape[1] :].tolist()
        return found

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", record)
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    expected = [
        model.generate(torch.tensor([prompt]), use_mtp=True, pad_token_id=0, **options)[0].tolist()
        for prompt in PROMPTS
    ]
    engine = LLM(
        tmp_path,
        speculative_config={"method": "mtp", "adaptive": False, "num_speculative_tokens": 1},
        enable_prefix_caching=False,
        block_size=16,
        dtype="float32",
        weight_cache_dir="none",
        num_gpu_blocks_override=40,
        max_model_len=256,
    ).engine
    compared = 0
    for prompt, output in zip(PROMPTS, expected, strict=True):
        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        engine.add(EngineRequest(request_id="one", prompt=prompt, sampling=params))
        tokens = list(prompt)
        while engine.busy:
            before = tuple(tokens)
            tokens += [token for delta in engine.step() for token in delta.token_ids]
            assert engine.last_plan
            for draft in [item.draft for item in engine.last_plan.scheduled if item.draft]:
                assert list(draft) == candidates[before]
                compared += 1
        assert tokens == output
    assert compared > 30
