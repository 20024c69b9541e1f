"""Gemma 3n (Google DeepMind, 2025): four residual streams of which a layer computes one (AltUp), low-rank residual
connections (Laurel), MLPs with sparse activations in the first layers, embeddings of tokens for each layer, and last
layers that attend to keys and values of earlier ones. Prompts are text only: towers are not loaded."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.checkpoint.compressed_config import MAX_STREAMS
from penstock.checkpoint.decoder_options import NormOptions
from penstock.checkpoint.model_config import ConfigJson, ModelConfig, activation_of, dense_config, options_of
from penstock.checkpoint.rope import local_rope_parameters_of
from penstock.core import Code, PenstockError

from ..registry import Family, imported
from ..stored import Stored
from .gemma import LAYER_NORMS, TANH
from .gemma4 import FULL, SLIDING, find_gguf, find_text, kv_sources, layer_input_size

WITH_TOWERS = "Gemma3nForConditionalGeneration"
"""Architecture with towers for images and audio, which are not loaded: prompts are text only."""
SPARSE_LAYERS, SPARSITY = 10, 0.95
"""Number of the first layers with sparse activations, and their sparsity, in models with more layers than this."""


def read_config(raw: ConfigJson) -> ModelConfig:
    kinds, sizes = _layer_types(raw), _per_layer(raw, "intermediate_size", raw["intermediate_size"])
    options = options_of(
        raw,
        activation=activation_of(str(raw.get("hidden_activation") or TANH)),
        norm=NormOptions(float32=True),
        layer_norms=LAYER_NORMS,
        attention_scale=1.0,
        embedding_scale=float(raw["hidden_size"]) ** 0.5,
        logit_softcap=float(raw.get("final_logit_softcapping") or 0),
    )
    config = dense_config(
        {**raw, "intermediate_size": max(sizes)},
        sliding_windows=tuple(0 if kind == FULL else int(raw["sliding_window"]) for kind in kinds),
        qk_norm=True,
        local_rope_parameters=local_rope_parameters_of(raw),
        kv_sources=kv_sources(raw, kinds),
        residual_streams=_streams(raw),
        options=options,
    )
    config = replace(config, raw=raw)  # with the list of sizes
    if (size := layer_input_size(config)) < 1:
        raise ValueError(f"hidden_size_per_layer_input is {size}; it must be at least 1")
    for layer in range(config.num_layers):
        sparsity(config, layer)
    return replace(config, counted_weights=_count_weights(config))


def _layer_types(raw: ConfigJson) -> list[str]:
    layers = int(raw["num_hidden_layers"])
    kinds = list(raw.get("layer_types") or ())
    kinds = kinds or [SLIDING if (layer + 1) % 5 else FULL for layer in range(layers)]
    if others := [kind for kind in kinds if kind not in (FULL, SLIDING)]:
        message = f"layer_types has {others[0]!r:.40}; supported for Gemma 3n are {FULL} and {SLIDING}"
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    if len(kinds) != layers:
        raise ValueError(f"layer_types has {len(kinds)} entries; it must have one for each of {layers} layers")
    return kinds


def _streams(raw: ConfigJson) -> int:
    streams, active = int(raw["altup_num_inputs"]), int(raw["altup_active_idx"])
    if not 2 <= streams <= MAX_STREAMS:
        message = f"altup_num_inputs is {streams}; supported are 2 to {MAX_STREAMS}"
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    if not 0 <= active < streams:
        raise ValueError(f"altup_active_idx is {active}; it must be from 0 to {streams - 1}")
    return streams


def _per_layer(raw: Mapping[str, Any], name: str, value: Any) -> list[Any]:
    """A value for each layer, from a list or one value for all layers."""
    layers = int(raw["num_hidden_layers"])
    values = list(value) if isinstance(value, list) else [value] * layers
    if len(values) != layers:
        raise ValueError(f"{name} has {len(values)} entries; it must have one for each of {layers} layers")
    return values


def intermediate_size(config: ModelConfig, layer: int) -> int:
    """Intermediate size of a layer's MLP."""
    return int(_per_layer(config.raw, "intermediate_size", config.raw["intermediate_size"])[layer])


def sparsity(config: ModelConfig, layer: int) -> float:
    """Fraction of a layer's activations that are set to zero; 0: the activations are not sparse."""
    given, name = config.raw.get("activation_sparsity_pattern"), "activation_sparsity_pattern"
    if given is None:
        return SPARSITY if layer < SPARSE_LAYERS < config.num_layers else 0.0
    value = float(_per_layer(config.raw, name, given)[layer])
    if not 0 <= value < 1:
        raise ValueError(f"{name} has the value {value}; it must be from 0 to less than 1")
    return value


def _count_weights(config: ModelConfig) -> dict[str, int]:
    """``ModelConfig.counted_weights``. ``embedding_weights`` include the embeddings of tokens for each layer, and the
    projections between the streams and the embedding."""
    hidden, layers, streams = config.hidden_size, range(config.num_layers), config.residual_streams
    inputs, rank = layer_input_size(config), int(config.raw["laurel_rank"])
    keys = hidden * config.head_dim * config.num_kv_heads * sum(map(config.has_kv, layers))
    queries = hidden * config.head_dim * config.num_heads * len(layers)
    down = hidden * sum(intermediate_size(config, layer) for layer in layers)
    altup = len(layers) * (hidden * streams + streams**3 + streams**2)
    embedding = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    rows = min(int(config.raw["vocab_size_per_layer_input"]), config.vocab_size)
    per_layer = len(layers) * inputs * (rows + hidden)
    return {
        "layer_weights": 2 * queries + 2 * keys + 3 * down + 2 * len(layers) * hidden * (rank + inputs) + altup,
        "value_weights": keys,
        "down_weights": down,
        "unquantized_weights": altup,
        "embedding_weights": embedding + per_layer + 2 * (streams - 1) * hidden**2,
    }


def find_stored(config: ModelConfig, name: str) -> Stored:
    """See ``Family.find_stored``."""
    return find_text(config, name, config.architecture == WITH_TOWERS)


FAMILY = Family(
    ("Gemma3nForCausalLM", WITH_TOWERS),
    read_config,
    build=imported("penstock.models.gemma3n:Gemma3n"),
    find_stored=find_stored,
    find_gguf=find_gguf,
)
