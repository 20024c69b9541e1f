"""Rotary embedding parameters in the metadata of a GGUF file."""

from __future__ import annotations

import math
import struct
from typing import Any

from penstock.core.errors import invalid

from .gguf_metadata import Metadata

FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)
"""Tensors with divisors of the rotary frequencies: ``rope_freqs`` of Llama 3.1, and those of LongRoPE."""
(UNROTATED,) = struct.unpack("<f", struct.pack("<f", 1e30))
"""Divisor of the frequencies of dimensions that are not rotated (Gemma 4)."""
TENSORS = frozenset((FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS))


def rope_parameters(metadata: Metadata, rotary_dim: int) -> dict[str, Any]:
    """``rope_parameters`` of ``config.json``.

    Args:
        rotary_dim: number of rotary dimensions of a head.

    Raises ``PenstockError``: ``unsupported`` for an unknown scaling, ``invalid`` for broken values.
    """
    theta = metadata.number("rope.freq_base", 10_000.0)
    # Older files name the factor ``rope.scale_linear``.
    factor = metadata.number("rope.scaling.factor", 0.0) or metadata.number("rope.scale_linear", 0.0)
    kind = metadata.text("rope.scaling.type", "linear")
    if kind == "linear" and factor in (0.0, 1.0):
        kind = "none"
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise metadata.unsupported(f"RoPE scaling {kind!r}")
    if LONG_FACTORS in metadata.tensors:
        return {"rope_theta": theta, "rope_type": "longrope", **_longrope(metadata, rotary_dim)}
    if FREQUENCY_FACTORS in metadata.tensors:
        if kind != "none":
            raise metadata.unsupported(f"{FREQUENCY_FACTORS} together with RoPE scaling {kind!r}")
        factors = _factors(metadata, FREQUENCY_FACTORS, rotary_dim)
        rotated = factors.count(1.0)
        if rotated < len(factors) and factors == [1.0] * rotated + [UNROTATED] * (len(factors) - rotated):
            share = {"partial_rotary_factor": rotated / len(factors)}
            return {"rope_theta": theta, "rope_type": "proportional", **share}
        return {"rope_theta": theta, "rope_type": "frequency_factors", "frequency_factors": factors}
    if kind == "longrope":
        raise invalid("model", f"{metadata.file.path} has no tensor {LONG_FACTORS}, which LongRoPE requires")
    if kind == "none":
        return {"rope_theta": theta, "rope_type": "default"}
    rope: dict[str, Any] = {"rope_theta": theta, "rope_type": kind, "factor": factor or 1.0}
    return rope | _yarn(metadata) if kind == "yarn" else rope


def _yarn(metadata: Metadata) -> dict[str, Any]:
    context = metadata.size("context_length")
    rope: dict[str, Any] = {
        "original_max_position_embeddings": metadata.size("rope.scaling.original_context_length", context)
    }
    for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if value := metadata.number(f"rope.scaling.{key}", 0.0):
            rope[name] = value
    if (scale := metadata.number("rope.scaling.yarn_attn_factor", 1.0)) != 1.0:
        rope["attention_factor"] = scale
    for key in ("yarn_ext_factor", "attn_factor"):
        if metadata.number(f"rope.scaling.{key}", 1.0) != 1.0:
            raise metadata.unsupported(f"rope.scaling.{key} other than 1")
    if metadata.unread(("rope.scaling.yarn_log_multiplier",)):
        raise metadata.unsupported("a nonzero rope.scaling.yarn_log_multiplier")
    return rope


def _longrope(metadata: Metadata, rotary_dim: int) -> dict[str, Any]:
    context = metadata.size("context_length")
    rope: dict[str, Any] = {
        "short_factor": _factors(metadata, SHORT_FACTORS, rotary_dim),
        "long_factor": _factors(metadata, LONG_FACTORS, rotary_dim),
        "original_max_position_embeddings": metadata.size("rope.scaling.original_context_length", context),
    }
    if scale := metadata.number("rope.scaling.attn_factor", 0.0):
        rope["attention_factor"] = scale
    return rope


def _factors(metadata: Metadata, name: str, rotary_dim: int) -> list[float]:
    if (tensor := metadata.tensors.get(name)) is None:
        raise invalid("model", f"{metadata.file.path} has no tensor {name}, which its RoPE scaling requires")
    if tensor.type.name != "F32" or tensor.shape != (rotary_dim // 2,):
        message = f"{name} is {tensor.type.name} of shape {tensor.shape}; it must be F32 of shape ({rotary_dim // 2},)"
        raise invalid("model", f"{metadata.file.path}: {message}")
    factors = struct.unpack_from(f"<{rotary_dim // 2}f", metadata.content_of(name), tensor.offset)
    if bad := [factor for factor in factors if not (math.isfinite(factor) and factor > 0)]:
        raise invalid("model", f"{metadata.file.path}: {name} has the value {bad[0]}; all must be finite and above 0")
    return list(factors)
