"""Configuration of models run by transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from penstock.checkpoint.model_config import COUNTED_WEIGHTS, ModelConfig, dense_config, dtype_of
from penstock.checkpoint.rope import max_model_len_of, rope_parameters_of
from penstock.checkpoint.state_config import LibraryStateConfig
from penstock.checkpoint.stored_format import quantization_config_of, quantization_of
from penstock.core import Code, PenstockError
from penstock.quant import read_quantization_config

from .attention import NAME, register
from .library import cache_windows, first_line, library_config, model_class, unsupported

DEFAULT_LENGTH = 2048
"""Default context length, e.g. for models without learned positions."""
LIBRARY_CONFIG = "library_config"
"""Key of ``ModelConfig.raw`` with the ``config.json`` for transformers."""
GATHERED = "library_gathered"
"""Key of ``ModelConfig.raw``: the model can only be run one sequence at a time (``GatheredBody``)."""
QUANTIZATION = ("quantization_config", "compression_config", "expert_dtype")
"""Fields of ``config.json`` about quantization, which transformers does not get."""
POSITION_OFFSET = "library_position_offset"
"""Key of ``ModelConfig.raw``: number of the first position, which is not 0 in RoBERTa and its like."""


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the configuration of any causal language model of transformers.

    Raises ``PenstockError``: ``unsupported`` if transformers is missing or does not have the architecture, or the
    weights are in an unsupported format; ``invalid`` if transformers rejects the configuration.
    """
    architecture, dtype = str(next(iter(raw.get("architectures") or ["none"]))), dtype_of(raw)
    model_class(architecture)
    if raw.get("gguf"):
        message = f"{architecture} is run by transformers, for which GGUF files are not supported"
        raise PenstockError(Code.UNSUPPORTED, f"{message}: use a checkpoint of safetensors files", "model")
    if quantization_of(raw) is None:
        read_quantization_config(quantization_config_of(raw))
    described = {name: value for name, value in raw.items() if name not in QUANTIZATION}
    whole = library_config(architecture, described)
    text_config = whole.get_text_config(decoder=True)
    if getattr(whole, "is_encoder_decoder", False):
        raise unsupported(architecture, "it has an encoder")

    def count(name: str, default: int = 0) -> int:
        try:
            value = getattr(text_config, name, None)
        except Exception:  # transformers raises for attributes that differ between layers
            value = None
        return value if isinstance(value, int) and value > 0 else default

    hidden, heads, layers = count("hidden_size"), count("num_attention_heads", 1), count("num_hidden_layers", 1)
    rope = getattr(text_config, "rope_parameters", None) or {}
    rope = rope_parameters_of({"rope_parameters": rope} if isinstance(rope.get("rope_type"), str) else {})
    built, gathered = skeleton(architecture, whole)
    weights, offset = _count_weights(built), _position_offset(built)
    length = count("max_position_embeddings", DEFAULT_LENGTH) - offset
    sizes = {
        "architectures": [architecture],
        "vocab_size": count("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": count("intermediate_size", 4 * hidden),
        "num_attention_heads": heads,
        "num_key_value_heads": count("num_key_value_heads", heads),
        "num_hidden_layers": layers,
        "head_dim": count("head_dim", max(hidden // heads, 1)),
        "max_position_embeddings": length,
        "tie_word_embeddings": weights["embedding_weights"] == weights["head_weights"],
        "dtype": dtype,
        "quantization_config": quantization_config_of(raw),
        COUNTED_WEIGHTS: weights,
        LIBRARY_CONFIG: described,
        GATHERED: gathered or cache_windows(whole) is None,
        POSITION_OFFSET: offset,
    }
    config = dense_config(
        sizes, rope_parameters=rope, max_model_len=max_model_len_of(length, rope), sliding_windows=(0,) * layers
    )
    state = LibraryStateConfig() if _has_state(architecture, whole) else None
    return replace(config, architecture=architecture, has_lm_head=True, model_impl="transformers", state=state)


def _has_state(architecture: str, configuration: Any) -> bool:
    """Whether a model has layers with recurrent state."""
    from transformers.cache_utils import DynamicCache, LinearAttentionLayer

    if getattr(model_class(architecture), "_is_stateful", False):
        return True
    try:
        return any(isinstance(layer, LinearAttentionLayer) for layer in DynamicCache(config=configuration).layers)
    except Exception:  # transformers raises for configurations without a KV cache
        return False


def _position_offset(model: Any) -> int:
    """Number of the first position: RoBERTa counts positions from the one after the padding index on."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return int(module.padding_idx) + 1
    return 0


def _count_weights(model: Any) -> dict[str, int]:
    """Numbers of parameters, as fields of ``ModelSize``."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    outer = {id(module.weight): module.weight.numel() for module in (embedding, head) if module is not None}
    total = sum(parameter.numel() for parameter in model.parameters())
    tied = getattr(model.config.get_text_config(decoder=True), "tie_word_embeddings", False)
    first = embedding.weight.numel()
    if tied and len(outer) > 1:  # embedding and head are separate here, and tied when the weights are loaded
        outer, total = {id(embedding.weight): first}, total - head.weight.numel()
    together = sum(outer.values())
    return {"layer_weights": total - together, "embedding_weights": together, "head_weights": first}


def skeleton(architecture: str, configuration: Any) -> tuple[Any, bool]:
    """Build the model on the meta device, with Penstock's attention if its modules use the attention interface. Returns
    it, and whether they do not.

    Raises ``PenstockError`` (``unsupported``) if the model cannot be built.
    """
    register()
    found = model_class(architecture)
    for attention in (NAME, "eager") if found._can_set_attn_implementation() else ("eager",):
        configuration._attn_implementation = attention
        try:
            with torch.device("meta"):
                return found(configuration), attention != NAME
        except Exception as error:  # a model's code may raise any exception, e.g. for a missing package
            failure = error
    raise unsupported(architecture, first_line(failure)) from failure
