"""What a model's ``config.json`` says of its size: numbers in its matrices, and numbers kept of each token.

Standard library only, so that memory can be planned where no model runs. The engine's own reading is in
``models/config.py``; architectures that it does not run yet can be planned for here, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.core.errors import invalid

QUANT_METHOD = "penstock"
"""``quant_method`` of a ``config.json`` whose weights are rounded when they are loaded, to its ``format``."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder."""

    architecture: str
    context: int
    """Tokens that it is good for."""
    dtype: str
    layers: int
    layer_weights: int
    """Numbers in the matrices of all layers together."""
    hidden: int
    """Numbers of a hidden state."""
    embedding_weights: int
    """Numbers in the embedding, and again in the head where that is a matrix of its own."""
    kv_heads: int
    """1 where all heads share a latent vector."""
    kv_dim: int
    """Numbers in a head's key, and in its value; with ``latent``, in the latent vector and its rotary key together."""
    latent: bool
    """Whether a token keeps one latent vector in place of keys and values (multi-head latent attention)."""
    ahead_weights: int
    """Numbers in the layers that guess ahead, which are loaded only where they do."""
    ahead_layers: int
    quantization: str
    """What the weights are rounded to at load where nothing else is asked for, as the option."""


def shape_of(config: Mapping[str, Any]) -> Shape:
    """Read a ``config.json``. Raises ``PenstockError`` (``invalid``) where it lacks what the sums need."""
    try:
        return _shape(config)
    except KeyError as error:
        raise invalid("model", f"config.json lacks {error}") from error
    except (TypeError, ValueError) as error:
        raise invalid("model", f"config.json has a value of the wrong kind: {error}") from error


def _shape(config: Mapping[str, Any]) -> Shape:
    hidden, heads, layers = (int(config[k]) for k in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    vocabulary, latent = int(config["vocab_size"]), bool(config.get("kv_lora_rank"))
    kv_heads = 1 if latent else int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    if latent:
        attention, kv_dim = _latent_attention(config, hidden, heads)
    else:
        attention = 2 * hidden * head_dim * (heads + kv_heads)
        kv_dim = head_dim
    dense = 3 * hidden * int(config["intermediate_size"])
    sparse, first = _experts(config, hidden), int(config.get("first_k_dense_replace") or 0)
    plain = min(first, layers) if sparse else layers
    ahead = int(config.get("num_nextn_predict_layers") or 0)
    return Shape(
        architecture=str(next(iter(config.get("architectures") or ["unknown"]))),
        context=context_of(int(config.get("max_position_embeddings") or 2048), rope_of(config)),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
        layers=layers,
        layer_weights=layers * attention + plain * dense + (layers - plain) * sparse,
        hidden=hidden,
        embedding_weights=vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2),
        kv_heads=kv_heads,
        kv_dim=kv_dim,
        latent=latent,
        ahead_weights=ahead * (attention + (sparse or dense) + 2 * hidden * hidden),
        ahead_layers=ahead,
        quantization=format_of(config) or "none",
    )


def format_of(config: Mapping[str, Any]) -> str | None:
    """The format that a ``config.json`` asks for at load; nothing for none, None for weights that are quantized
    already, in a form of others."""
    own = config.get("quantization_config")
    if not own:
        return ""
    ours = isinstance(own, Mapping) and own.get("quant_method") == QUANT_METHOD
    return str(own.get("format", "")) if ours else None


def _latent_attention(config: Mapping[str, Any], hidden: int, heads: int) -> tuple[int, int]:
    """Numbers in a layer's matrices, and numbers kept of a token (DeepSeek-V2, section 2.1)."""
    rope, nope = int(config["qk_rope_head_dim"]), int(config["qk_nope_head_dim"])
    rank, value, queries = int(config["kv_lora_rank"]), int(config["v_head_dim"]), heads * (nope + rope)
    low = int(config.get("q_lora_rank") or 0)
    q = low * (hidden + queries) if low else hidden * queries
    return q + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden, rank + rope


def _experts(config: Mapping[str, Any], hidden: int) -> int:
    """Numbers in a layer of experts, with what chooses among them; 0 where there are none."""
    routed = int(config.get("n_routed_experts") or config.get("num_experts") or 0)
    if not routed:
        return 0
    shared = int(config.get("n_shared_experts") or 0)
    return routed * hidden + (routed + shared) * 3 * hidden * int(config["moe_intermediate_size"])


def rope_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Of a ``config.json``: from ``rope_parameters``, or the older ``rope_theta`` and ``rope_scaling``."""
    rope = dict(given.get("rope_parameters") or given.get("rope_scaling") or {})
    rope["rope_theta"] = float(rope.get("rope_theta") or given.get("rope_theta") or 10_000.0)
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", "default")
    return rope


def context_of(trained: int, rope: Mapping[str, Any]) -> int:
    """Tokens that a model is good for. ``llama3`` checkpoints write down the stretched length, the others the trained
    one or both."""
    match rope["rope_type"]:
        case "linear" | "dynamic":
            return int(trained * rope["factor"])
        case "yarn" if "factor" in rope:
            return int(rope.get("original_max_position_embeddings", trained) * rope["factor"])
        case _:
            return trained
