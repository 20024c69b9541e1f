"""What ``config.json`` says, for the architectures that are known."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.planning.model_size import context_of, format_of, rope_of
from penstock.quant import SCHEMES


@dataclass(frozen=True)
class DecoderConfig:
    """A dense decoder with grouped-query attention, rotary positions and a gated MLP."""

    architecture: str
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    """Tokens the model is good for, with its positions stretched as ``rope`` says."""
    trained: int
    """Tokens it was trained with before that, ``max_position_embeddings``."""
    eps: float
    rope: Mapping[str, Any]
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    headless: bool
    """Whether there is no matrix to give tokens their scores: then it is for embeddings alone."""
    windows: tuple[int, ...]
    """Positions that attention of each layer looks back; 0 is all."""
    heads_ahead: int
    """Layers behind the others that guess tokens further on (``num_nextn_predict_layers``)."""
    dtype: torch.dtype
    """What the checkpoint is written in."""
    quantization: str
    """What it asks its weights to be rounded to at load, as the option."""


ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
BARE = "Model"
"""Ends the names of the same without a head."""
ACTIVATIONS = ("silu", "swish")


def read_config(folder: Path) -> DecoderConfig:
    """Read a checkpoint's ``config.json``.

    Raises ``PenstockError``: ``invalid`` where it is missing or broken, ``unsupported`` where it asks for what no
    code here does.
    """
    path = folder / "config.json"
    if not path.exists():
        raise invalid("model", f"{folder} has no config.json: name a folder with a Hugging Face checkpoint")
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise invalid("model", f"{path} is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise invalid("model", f"{path} does not hold an object")
    named = str(next(iter(given.get("architectures") or ["none"])))
    headless = named.endswith(BARE)
    architecture = named.removesuffix(BARE) + "ForCausalLM" if headless else named
    if architecture not in ARCHITECTURES:
        raise PenstockError(Code.UNSUPPORTED, f"architecture {named}; known are {', '.join(ARCHITECTURES)}", "model")
    if given.get("hidden_act", "silu") not in ACTIVATIONS:
        raise PenstockError(Code.UNSUPPORTED, f"activation {given['hidden_act']!r} in {path}", "model")
    if given.get("is_causal") is False or given.get("use_bidirectional_attention"):
        raise PenstockError(Code.UNSUPPORTED, f"{path} asks for attention in both directions", "model")
    quantization = format_of(given)
    if quantization is None or (quantization and quantization not in SCHEMES):
        raise PenstockError(Code.UNSUPPORTED, f"{path} asks for quantized weights, which are not read yet", "model")
    try:
        config = _decoder(architecture, headless, given)
    except KeyError as error:
        raise invalid("model", f"{path} lacks {error}") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise invalid("model", f"{path} has a value of the wrong kind: {error}") from error
    if config.heads % config.kv_heads:
        raise invalid("model", f"{path} shares {config.kv_heads} key-value heads among {config.heads} heads unevenly")
    if len(config.windows) != config.layers:
        raise invalid("model", f"{path} has layer_types for {len(config.windows)} of {config.layers} layers")
    return config


def _decoder(architecture: str, headless: bool, given: Mapping[str, Any]) -> DecoderConfig:
    heads, layers = int(given["num_attention_heads"]), int(given["num_hidden_layers"])
    trained, rope = int(given.get("max_position_embeddings") or 2048), rope_of(given)
    qwen2, bias = architecture == "Qwen2ForCausalLM", bool(given.get("attention_bias", False))
    return DecoderConfig(
        architecture=architecture,
        vocabulary=given["vocab_size"],
        hidden=given["hidden_size"],
        intermediate=given["intermediate_size"],
        layers=layers,
        heads=heads,
        kv_heads=given.get("num_key_value_heads") or heads,
        head_dim=given.get("head_dim") or int(given["hidden_size"]) // heads,
        context=context_of(trained, rope),
        trained=trained,
        eps=float(given.get("rms_norm_eps") or 1e-6),
        rope=rope,
        tied=bool(given.get("tie_word_embeddings") or False),
        qkv_bias=qwen2 or bias,
        output_bias=bias and not qwen2,
        mlp_bias=bool(given.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        headless=headless,
        windows=_windows(architecture, layers, given),
        quantization=format_of(given) or "none",
        heads_ahead=int(given.get("num_nextn_predict_layers") or 0),
        dtype=getattr(torch, given.get("dtype") or given.get("torch_dtype") or "bfloat16"),
    )


def _windows(architecture: str, layers: int, given: Mapping[str, Any]) -> tuple[int, ...]:
    window = given.get("sliding_window") or 0
    if kinds := given.get("layer_types"):
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    if architecture == "MistralForCausalLM":
        return (window,) * layers
    if architecture == "LlamaForCausalLM" or not given.get("use_sliding_window", False):
        return (0,) * layers
    full = given.get("max_window_layers", layers)
    return tuple(0 if layer < full else window for layer in range(layers))
