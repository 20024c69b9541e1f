"""Rotary position embedding (RoPE), and its extensions beyond the original context length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.rope import check_rope_type


def rope_table(
    head_dim: int,
    max_len: int,
    parameters: Mapping[str, Any],
    max_position_embeddings: int,
    device: torch.device | None = None,
) -> Tensor:
    """Rotary table, ``[max_len, head_dim]`` float32: a row has ``head_dim / 2`` cosines, then as many sines.

    Args:
        max_len: maximum sequence length in tokens.
        parameters: ``rope_parameters`` of ``config.json``: ``rope_type``, ``rope_theta`` and parameters of the type.
        max_position_embeddings: field of ``config.json``: the original context length if ``parameters`` has none.

    Raises ``PenstockError`` (``unsupported``) for an unknown type.
    """
    kind = str(parameters.get("rope_type", "default"))
    check_rope_type(kind)
    frequencies, scale = TYPES[kind](head_dim, max_len, parameters, max_position_embeddings)
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), frequencies)
    return (torch.cat((angles.cos(), angles.sin()), -1) * scale).to(device)


def depends_on_length(parameters: Mapping[str, Any]) -> bool:
    """Whether the frequencies depend on ``max_len``. They are computed once, at load, so keys in the KV cache stay
    valid, but engines with another ``max_len`` compute other bits."""
    return parameters.get("rope_type") in ("dynamic", "longrope")


def _default(dim: int, max_len: int, parameters: Mapping[str, Any], trained: int) -> tuple[Tensor, float]:
    """Frequencies ``[dim / 2]`` in radians per position, and a factor of cosines and sines (attention scaling)."""
    return _frequencies(dim, parameters["rope_theta"]), 1.0


def _linear(dim: int, max_len: int, parameters: Mapping[str, Any], trained: int) -> tuple[Tensor, float]:
    """Positions divided by a factor (Chen et al., 2023)."""
    return _frequencies(dim, parameters["rope_theta"]) / parameters["factor"], 1.0


def _dynamic(dim: int, max_len: int, parameters: Mapping[str, Any], trained: int) -> tuple[Tensor, float]:
    """Dynamic NTK: the base grows with the length beyond the original context."""
    factor = parameters["factor"]
    stretch = factor * max(max_len, trained) / trained - (factor - 1)
    return _frequencies(dim, parameters["rope_theta"] * stretch ** (dim / (dim - 2))), 1.0


def _llama3(dim: int, max_len: int, parameters: Mapping[str, Any], trained: int) -> tuple[Tensor, float]:
    """Low frequencies divided by a factor, high frequencies unchanged, with interpolation between (Llama 3.1)."""
    frequencies, factor = _frequencies(dim, parameters["rope_theta"]), parameters["factor"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / factor, 1.0


def _yarn(dim: int, max_len: int, parameters: Mapping[str, Any], trained: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al., 2023): interpolation by the number of rotations in the original context, scaled attention."""
    theta = parameters["rope_theta"]
    original = parameters.get("original_max_position_embeddings") or trained
    factor = parameters.get("factor") or trained / original

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first = dimension_of(parameters.get("beta_fast") or 32)
    last = dimension_of(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    stretched = ((torch.arange(dim // 2) - first) / max(last - first, 1e-3)).clamp(0, 1)
    wavelengths, kept = _wavelengths(dim, theta), 1 - stretched
    frequencies = 1.0 / (factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept

    def attention_factor(scale: float = 1.0) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    scale = parameters.get("attention_factor")
    if scale is None:
        mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
        if mscale and mscale_all_dim:
            scale = attention_factor(mscale) / attention_factor(mscale_all_dim)
        else:
            scale = attention_factor()
    return frequencies, scale


def _longrope(dim: int, max_len: int, parameters: Mapping[str, Any], trained: int) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al., 2024): one divisor per frequency, and other divisors beyond the original context."""
    original = parameters.get("original_max_position_embeddings") or trained
    factors = torch.tensor(parameters["long_factor" if max_len > original else "short_factor"])
    scale, factor = parameters.get("attention_factor"), parameters.get("factor") or trained / original
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return 1.0 / (factors * _wavelengths(dim, parameters["rope_theta"])), scale


def _proportional(dim: int, max_len: int, parameters: Mapping[str, Any], trained: int) -> tuple[Tensor, float]:
    """Frequencies of the leading fraction ``partial_rotary_factor`` of the dimensions; all later frequencies are 0."""
    rotated = int(parameters.get("partial_rotary_factor", 1.0) * dim // 2)
    frequencies = _frequencies(dim, parameters["rope_theta"])
    frequencies[rotated:] = 0.0
    return frequencies / (parameters.get("factor") or 1.0), 1.0


def _frequency_factors(dim: int, max_len: int, parameters: Mapping[str, Any], trained: int) -> tuple[Tensor, float]:
    """One divisor per frequency (``rope_freqs.weight`` of GGUF files)."""
    return _frequencies(dim, parameters["rope_theta"]) / torch.tensor(parameters["frequency_factors"]), 1.0


def _frequencies(dim: int, theta: float) -> Tensor:
    return 1.0 / _wavelengths(dim, theta)


def _wavelengths(dim: int, theta: float) -> Tensor:
    """Positions per radian, ``[dim / 2]``. Frequencies are computed from them, as in transformers: with other rounding,
    angles differ at high positions."""
    wavelengths: Tensor = theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    return wavelengths


TYPES = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
    "frequency_factors": _frequency_factors,
}
