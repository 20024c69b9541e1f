"""Configuration of multi-head latent attention (MLA) and sparse attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_INDEX_HEADS = 128
"""Maximum number of index heads."""
MAX_INDEX_DIM = 256
"""Maximum size of an index head."""
MAX_INDEX_TOPK = 8192
"""Maximum number of positions that a query selects."""


@dataclass(frozen=True)
class IndexerConfig:
    """Settings of sparse attention (DeepSeek-V3.2; DeepSeek-AI, 2025): an indexer with small heads scores all positions
    up to a query's, and attention reads those with the largest scores."""

    topk: int
    """Number of positions to which a query attends, at most."""
    heads: int
    dim: int
    """Elements per index head; the first ``qk_rope_head_dim`` are rotated."""
    interleave: bool
    """Rotate adjacent elements (GLM-5) instead of halves (DeepSeek-V3.2)."""
    shared_layers: frozenset[int] = frozenset()
    """Layers without an indexer, which attend to the positions that the last layer with one has selected (GLM-5)."""


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
    indexer: IndexerConfig | None = None
    """Sparse attention; None: attention to all positions."""


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


def read_indexer_config(
    raw: Mapping[str, Any], latent: LatentConfig, interleave: bool, shared_layers: frozenset[int] = frozenset()
) -> IndexerConfig:
    """Read the settings of sparse attention. Raises ``KeyError``, ``TypeError`` or ``ValueError`` for a missing,
    invalid or unsupported size."""
    topk, heads, dim = (int(raw[name]) for name in ("index_topk", "index_n_heads", "index_head_dim"))
    if not latent.q_lora_rank:
        raise ValueError("q_lora_rank is missing or 0, which the indexer of sparse attention requires")
    if not 1 <= topk <= MAX_INDEX_TOPK:
        raise ValueError(f"index_topk is {topk}; it must be from 1 to {MAX_INDEX_TOPK}")
    if not 1 <= heads <= MAX_INDEX_HEADS:
        raise ValueError(f"index_n_heads is {heads}; it must be from 1 to {MAX_INDEX_HEADS}")
    if dim % 16 or not latent.qk_rope_head_dim <= dim <= MAX_INDEX_DIM:
        message = f"a multiple of 16 from qk_rope_head_dim ({latent.qk_rope_head_dim}) to {MAX_INDEX_DIM}"
        raise ValueError(f"index_head_dim is {dim}; it must be {message}")
    return IndexerConfig(topk, heads, dim, interleave, shared_layers)


def layers_without_indexer(raw: Mapping[str, Any]) -> frozenset[int]:
    """Layers that reuse the selection of an earlier layer: the entries ``shared`` of ``indexer_types``; without these,
    the letters S of ``index_topk_pattern``, or all but every ``index_topk_freq``-th layer from the one before
    ``index_skip_topk_offset`` on. Raises ``ValueError`` for invalid values."""
    layers = int(raw["num_hidden_layers"])
    kinds = raw.get("indexer_types") or raw.get("index_topk_pattern")
    if not kinds:
        frequency, offset = max(int(raw.get("index_topk_freq") or 1), 1), int(raw.get("index_skip_topk_offset", 2))
        return frozenset(layer for layer in range(layers) if max(layer - offset + 1, 0) % frequency)
    names = {"full": False, "F": False, "shared": True, "S": True}
    if len(kinds) != layers or any(kind not in names for kind in kinds) or names[kinds[0]]:
        message = f"one of full and shared for each of {layers} layers, and full for the first"
        raise ValueError(f"indexer_types is {kinds!r:.80}; it must have {message}")
    return frozenset(layer for layer, kind in enumerate(kinds) if names[kind])
