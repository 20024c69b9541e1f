"""Random RoPE settings of ``config.json`` in all spellings, and the tables that transformers computes from them."""

from __future__ import annotations

import importlib
from random import Random
from typing import Any

import torch
from config_classes import class_of
from torch import Tensor

LENGTH = 96
"""Number of positions in the tables."""
SIZES = {
    **{"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0},
}
CLASSES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "mixtral": {"head_dim": 16},
    "gpt_oss": {"head_dim": 32},
    "gemma3_text": {"head_dim": 16, "sliding_window_pattern": 2},
    "gemma2": {"head_dim": 16},
    "olmo3": {},
    "phi3": {},
    "glm": {"head_dim": 32},
    "glm4_moe": {"head_dim": 32},
    "minimax_m2": {"head_dim": 32},
    "smollm3": {"no_rope_layers": [1, 1, 1, 1]},
    "ernie4_5": {"head_dim": 16},
    "deepseek_v3": {
        **{"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "kv_lora_rank": 32, "q_lora_rank": 16},
        **{"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    },
}
"""Additional fields of ``config.json`` by ``model_type``."""
KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "mrope", "unheard-of", None)


def draw(model_type: str, rng: Random) -> dict[str, Any]:
    """A random ``config.json`` of a model type."""
    config: dict[str, Any] = {**SIZES, **CLASSES[model_type], "model_type": model_type}
    places = rng.choice((("rope_parameters",), ("rope_scaling",), ("rope_parameters", "rope_scaling"), ()))
    for place in places:
        config[place] = _object(model_type, rng)
        if rng.random() < 0.2:
            kinds = ("full_attention", "sliding_attention")
            config[place] = {kind: _object(model_type, rng) for kind in kinds}
    for name, values in (
        ("rope_theta", (5_000.0, 700_000.0)),
        ("original_max_position_embeddings", (16, 32)),
        ("partial_rotary_factor", (0.5, 1.0)),
        ("rope_local_base_freq", (20_000.0,)),
        ("rotary_dim", (16,)),
    ):
        if rng.random() < 0.35:
            config[name] = rng.choice(values)
    return config


def _object(model_type: str, rng: Random) -> dict[str, Any]:
    kind = rng.choice(KINDS)
    given: dict[str, Any] = {}
    spelling = rng.choice(("rope_type", "type", "both"))
    if kind is not None:
        given |= {name: kind for name in ("rope_type", "type") if spelling in (name, "both")}
        if spelling == "both" and rng.random() < 0.3:
            given["type"] = rng.choice(("linear", "mrope"))
    half = 8 if model_type != "glm" else 4
    for name, values, share in (
        ("factor", (2.0, 4.0, 1.0, None if model_type != "deepseek_v3" else 1.5), 0.85),
        ("rope_theta", (3_000.0, 90_000.0), 0.4),
        ("original_max_position_embeddings", (16, 48), 0.4),
        ("low_freq_factor", (1.0,), 0.8),
        ("high_freq_factor", (4.0,), 0.8),
        ("short_factor", ([1.0 + 0.1 * number for number in range(half)],), 0.6),
        ("long_factor", ([2.0 + 0.2 * number for number in range(half)],), 0.6),
        ("attention_factor", (1.3,), 0.2),
        ("beta_fast", (16,), 0.2),
        ("beta_slow", (2,), 0.2),
        ("mscale", (0.7,), 0.2),
        ("mscale_all_dim", (0.5,), 0.2),
        ("partial_rotary_factor", (0.5, 1.0), 0.3),
        ("mrope_section", ([2, 3, 3],), 0.1),
    ):
        if rng.random() < share:
            given[name] = rng.choice(values)
    if model_type == "phi3" and kind != "longrope":  # transformers validates Phi-3's factor lists even if unused
        given = {name: value for name, value in given.items() if not isinstance(value, list)}
    return given


class Refused(Exception):
    """transformers does not support a configuration."""


def library_tables(config: dict[str, Any]) -> dict[str, tuple[Tensor, Tensor, int]]:
    """RoPE tables of transformers by layer type: cosines and sines, ``[positions, rotary_dim / 2]``, and rotary_dim.

    Raises ``Refused`` if transformers computes no tables.
    """
    model_type = config["model_type"]
    try:
        parsed = class_of(model_type).from_dict(config)
        folder = model_type.removesuffix("_text")
        module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
        (rotary_class,) = (each for name, each in vars(module).items() if name.endswith("RotaryEmbedding"))
        rotary = rotary_class(parsed)
        positions = torch.arange(LENGTH)[None]
        x = torch.zeros(1, 1, 1)
        if isinstance(rotary.rope_type, dict):
            outputs = {kind: rotary(x, positions, layer_type=kind) for kind in rotary.rope_type}
        else:
            outputs = {"": rotary(x, positions)}
    except Exception as error:
        raise Refused(f"{type(error).__name__}: {error}") from error
    head_dim = parsed.qk_rope_head_dim if model_type == "deepseek_v3" else getattr(parsed, "head_dim", None) or 16
    tables = {}
    for kind, (cos, sin) in outputs.items():
        half = cos.shape[-1] // (1 if model_type == "gpt_oss" else 2)  # other models repeat the table for both halves
        if 2 * half != head_dim and model_type not in ("glm", "glm4_moe", "minimax_m2", "phi3"):
            raise Refused("the table is narrower than the heads")
        tables[kind] = cos[0, :, :half], sin[0, :, :half], 2 * half
    return tables
