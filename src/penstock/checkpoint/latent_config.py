"""Configuration of multi-head latent attention (MLA)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LatentConfig:
    """Settings of latent attention, named as in ``config.json``."""

    q_lora_rank: int | None
    """Rank of the query projection; None: a full-rank projection."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool
    scale: float
    """Softmax scale."""
    rope: bool = True
    """False: no rotary embedding (Kimi-Linear)."""


def read_latent_config(raw: Mapping[str, Any], rope: Mapping[str, Any], rope_interleave: bool) -> LatentConfig:
    """Read the settings. Raises ``KeyError``, ``TypeError`` or ``ValueError`` for a missing or invalid size.

    Args:
        rope: ``rope_parameters``. YaRN also changes the softmax scale (``mscale_all_dim``).
    """
    names = "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
    latent, nope, rotary, value = (int(raw[name]) for name in names)
    if min(latent, nope, rotary, value) < 1 or rotary % 2:
        found = ", ".join(f"{name}={raw[name]}" for name in names)
        raise ValueError(f"{found}: these must be positive, and qk_rope_head_dim even")
    q_rank = int(raw["q_lora_rank"]) if raw.get("q_lora_rank") else None
    scale, all_dim = (nope + rotary) ** -0.5, float(rope.get("mscale_all_dim") or 0)
    if rope["rope_type"] != "default" and all_dim and (factor := float(rope["factor"])) > 1:
        scale *= (0.1 * all_dim * math.log(factor) + 1) ** 2
    return LatentConfig(q_rank, latent, nope, rotary, value, rope_interleave, scale)
