"""Rotary position embedding and the ways to stretch it beyond the trained context."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.core import Code, PenstockError


def rope_table(
    head_dim: int, longest: int, parameters: Mapping[str, Any], trained: int, device: torch.device | None = None
) -> Tensor:
    """Cosines and sines of every position, ``[longest, head_dim]`` float32.

    Args:
        longest: tokens a sequence may have. The kind ``dynamic`` depends on it and is fixed by it, so that keys in
            the cache stay true.
        parameters: ``rope_type``, ``rope_theta`` and what the type needs, as in ``config.json``.
        trained: tokens of context the model was trained with, where ``parameters`` do not say.

    Raises ``PenstockError`` (``unsupported``) for an unknown type.
    """
    kind = parameters.get("rope_type", "default")
    if kind not in KINDS:
        raise PenstockError(Code.UNSUPPORTED, f"rope type {kind!r}; known are {', '.join(KINDS)}", "rope_type")
    speeds, size = KINDS[kind](head_dim, longest, parameters, trained)
    angles = torch.outer(torch.arange(longest, dtype=torch.float32), speeds)
    return (torch.cat((angles.cos(), angles.sin()), -1) * size).to(device)


def _default(dim: int, longest: int, parameters: Mapping[str, Any], trained: int) -> tuple[Tensor, float]:
    """Radians a position of each pair, and what all is multiplied with."""
    return _speeds(dim, parameters["rope_theta"]), 1.0


def _linear(dim: int, longest: int, parameters: Mapping[str, Any], trained: int) -> tuple[Tensor, float]:
    """Positions divided by a factor (Chen et al., 2023)."""
    return _speeds(dim, parameters["rope_theta"]) / parameters["factor"], 1.0


def _dynamic(dim: int, longest: int, parameters: Mapping[str, Any], trained: int) -> tuple[Tensor, float]:
    """A base that grows with the length beyond the trained one, "NTK-aware"."""
    factor, trained = parameters["factor"], parameters.get("original_max_position_embeddings") or trained
    stretch = factor * max(longest, trained) / trained - (factor - 1)
    return _speeds(dim, parameters["rope_theta"] * stretch ** (dim / (dim - 2))), 1.0


def _llama3(dim: int, longest: int, parameters: Mapping[str, Any], trained: int) -> tuple[Tensor, float]:
    """Slow pairs divided by a factor, fast ones kept, those between blended (Llama 3.1)."""
    speeds, factor = _speeds(dim, parameters["rope_theta"]), parameters["factor"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] * speeds / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * speeds + (1 - kept) * speeds / factor, 1.0


def _yarn(dim: int, longest: int, parameters: Mapping[str, Any], trained: int) -> tuple[Tensor, float]:
    """Pairs blended by how often they turn within the trained context, and sharper attention (Peng et al., 2023)."""
    theta = parameters["rope_theta"]
    original = parameters.get("original_max_position_embeddings") or trained
    factor = parameters.get("factor") or trained / original

    def pair_that_turns(times: float) -> float:
        return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    first = pair_that_turns(parameters.get("beta_fast") or 32)
    last = pair_that_turns(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    stretched = ((torch.arange(dim // 2) - first) / max(last - first, 1e-3)).clamp(0, 1)
    speeds = _speeds(dim, theta)
    speeds = speeds * (1 - stretched) + speeds / factor * stretched

    def sharpness(scale: float = 1.0) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    size = parameters.get("attention_factor")
    if size is None:
        both, every = parameters.get("mscale"), parameters.get("mscale_all_dim")
        size = sharpness(both) / sharpness(every) if both and every else sharpness()
    return speeds, size


def _speeds(dim: int, theta: float) -> Tensor:
    return theta ** -(torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)


KINDS = {"default": _default, "linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn}
