"""Configuration of multi-head latent attention: what families read from ``config.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LatentConfig:
    """Sizes of a layer's latent attention. Names are those of ``config.json`` where it has one."""

    q_lora_rank: int | None
    """None where queries are projected at once."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool
    scale: float
    """Of the products of queries and keys."""


def read_latent_config(raw: Mapping[str, Any], rope: Mapping[str, Any], rope_interleave: bool) -> LatentConfig:
    """Read a ``config.json``. Raises ``KeyError``, ``TypeError`` or ``ValueError`` where a size is missing or wrong.

    Args:
        rope: ``rope_parameters``. YaRN scales the softmax, too (``mscale_all_dim``).
    """
    names = "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
    latent, nope, rotary, value = (int(raw[name]) for name in names)
    if min(latent, nope, rotary, value) < 1 or rotary % 2:
        raise ValueError(f"sizes of latent attention are {latent}, {nope}, {rotary} and {value}")
    q_rank = int(raw["q_lora_rank"]) if raw.get("q_lora_rank") else None
    scale, all_dim = (nope + rotary) ** -0.5, float(rope.get("mscale_all_dim") or 0)
    if rope["rope_type"] != "default" and all_dim and (factor := float(rope["factor"])) > 1:
        scale *= (0.1 * all_dim * math.log(factor) + 1) ** 2
    return LatentConfig(q_rank, latent, nope, rotary, value, rope_interleave, scale)
