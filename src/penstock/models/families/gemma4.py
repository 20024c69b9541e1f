"""Gemma 4 (Google DeepMind, 2026): Gemma 3's layers, with other heads in layers with full attention, norms of values, a
scalar per layer, and, in some models, embeddings of tokens for each layer, and last layers that attend to keys and
values of earlier ones. Prompts are text only: towers are not loaded."""

import re
from dataclasses import replace
from typing import Any

from penstock.checkpoint.decoder_options import NormOptions
from penstock.checkpoint.experts_config import ExpertsConfig, read_experts
from penstock.checkpoint.model_config import (
    PADDED_TO,
    ConfigJson,
    ModelConfig,
    activation_of,
    dense_config,
    options_of,
)
from penstock.checkpoint.rope import local_rope_parameters_of
from penstock.core import Code, PenstockError

from ..registry import Family, imported
from ..stored import Stored
from .gemma import LAYER_NORMS, TANH

FULL, SLIDING = "full_attention", "sliding_attention"
WITH_TOWERS = ("Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration")
"""Architectures with towers for images and audio, which are not loaded: prompts are text only."""


def read_config(raw: ConfigJson) -> ModelConfig:
    kinds = _layer_types(raw)
    window, activation = int(raw["sliding_window"]), str(raw.get("hidden_activation") or TANH)
    options = options_of(
        raw,
        activation=activation_of(activation),
        norm=NormOptions(float32=True),
        layer_norms=replace(LAYER_NORMS, before_mlp=None) if raw.get("enable_moe_block") else LAYER_NORMS,
        attention_scale=1.0,
        embedding_scale=float(raw["hidden_size"]) ** 0.5,
        logit_softcap=float(raw.get("final_logit_softcapping") or 0),
    )
    config = dense_config(
        raw,
        sliding_windows=tuple(0 if kind == FULL else window for kind in kinds),
        qk_norm=True,
        local_rope_parameters=local_rope_parameters_of(raw),
        experts=_read_experts(raw) if raw.get("enable_moe_block") else None,
        options=options,
    )
    config = replace(config, layer_heads=_layer_heads(raw, config, kinds), kv_sources=kv_sources(raw, kinds))
    return replace(config, counted_weights=_count_weights(config))


def _read_experts(raw: ConfigJson) -> ExpertsConfig:
    if lacking := [name for name in ("num_experts", "top_k_experts", "moe_intermediate_size") if not raw.get(name)]:
        raise ValueError(f"enable_moe_block is set, but {' and '.join(lacking)} is not")
    routing = {"top_k": int(raw["top_k_experts"]), "renormalize": True}
    return read_experts(raw, "moe_intermediate_size", routing, module="", router="router.proj")


def _layer_types(raw: ConfigJson) -> list[str]:
    """Type of each layer. The last one always has full attention."""
    layers = int(raw["num_hidden_layers"])
    kinds = list(raw.get("layer_types") or ())
    kinds = kinds or [SLIDING if (layer + 1) % 6 else FULL for layer in range(layers)]
    if others := [kind for kind in kinds if kind not in (FULL, SLIDING)]:
        message = f"layer_types has {others[0]!r:.40}; supported for Gemma 4 are {FULL} and {SLIDING}"
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    return [*kinds[:-1], FULL]


def _layer_heads(raw: ConfigJson, config: ModelConfig, kinds: list[str]) -> tuple[tuple[int, int], ...]:
    """``ModelConfig.layer_heads``, from ``per_layer_config``, or from the fields of layers with full attention."""
    full = {"head_dim": raw.get("global_head_dim") or 512}
    if raw.get("attention_k_eq_v") and raw.get("num_global_key_value_heads"):
        full["num_key_value_heads"] = raw["num_global_key_value_heads"]
    given = raw.get("per_layer_config")
    others: dict[int, Any] = {layer: full for layer, kind in enumerate(kinds) if kind == FULL}
    if given is not None:
        others = {int(layer): each for layer, each in given.items()}
    heads = []
    for layer in range(config.num_layers):
        known = others.get(layer, {})
        if unknown := known.keys() - {"head_dim", "num_key_value_heads"}:
            message = f"per_layer_config sets {sorted(unknown)[0][:40]}, which is not supported for Gemma 4"
            raise PenstockError(Code.UNSUPPORTED, message, "model")
        kv_heads = int(known.get("num_key_value_heads") or config.num_kv_heads)
        dim = int(known.get("head_dim") or config.head_dim)
        if dim % PADDED_TO:
            message = f"head_dim of layer {layer} is {dim}; it must be a multiple of {PADDED_TO}"
            raise PenstockError(Code.UNSUPPORTED, message, "model")
        if kv_heads < 1 or config.num_heads % kv_heads:
            message = f"layer {layer} has {kv_heads} key-value heads; the number must divide {config.num_heads}"
            raise ValueError(message)
        heads.append((kv_heads, dim))
    return tuple(heads)


def kv_sources(raw: ConfigJson, kinds: list[str]) -> tuple[int, ...]:
    """``ModelConfig.kv_sources``: the last ``num_kv_shared_layers`` layers attend to the keys and values of the last
    layer of their type before them."""
    first = len(kinds) - int(raw.get("num_kv_shared_layers") or 0)
    if first < 1 or not set(kinds[:first]) >= set(kinds):
        raise ValueError(f"num_kv_shared_layers is {len(kinds) - first}; the layers before need all layer types")
    last = {kind: layer for layer, kind in enumerate(kinds[:first])}
    return tuple(layer if layer < first else last[kind] for layer, kind in enumerate(kinds))


def has_shared_values(config: ModelConfig, layer: int) -> bool:
    """Whether a layer's keys are also its values, before norms and rotary embedding."""
    return bool(config.raw.get("attention_k_eq_v")) and not config.sliding_windows[layer]


def intermediate_size(config: ModelConfig, layer: int) -> int:
    """Intermediate size of a layer's MLP: twice as large in layers without keys and values, if configured."""
    wide = config.raw.get("use_double_wide_mlp") and not config.has_kv(layer)
    return config.intermediate_size * (2 if wide else 1)


def layer_input_size(config: ModelConfig) -> int:
    """Size of the embedding of a token for each layer; 0: none."""
    return int(config.raw.get("hidden_size_per_layer_input") or 0)


def _count_weights(config: ModelConfig) -> dict[str, int]:
    """``ModelConfig.counted_weights``. ``embedding_weights`` include the embeddings of tokens for each layer."""
    hidden, inputs, layers = config.hidden_size, layer_input_size(config), range(config.num_layers)
    total = values = down = 0
    for layer in layers:
        kv_heads, dim = config.layer_heads[layer]
        keys = hidden * dim * kv_heads if config.has_kv(layer) else 0
        values += 0 if has_shared_values(config, layer) else keys
        down += hidden * intermediate_size(config, layer)
        total += 2 * hidden * dim * config.num_heads + keys + 2 * hidden * inputs
    if experts := config.experts:
        down += len(layers) * experts.num_experts * hidden * experts.intermediate_size
        total += len(layers) * experts.num_experts * hidden
    embedding = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    per_layer = len(layers) * inputs * (int(config.raw.get("vocab_size_per_layer_input") or 0) + hidden)
    return {
        "layer_weights": total + values + 3 * down,
        "value_weights": values,
        "down_weights": down,
        "embedding_weights": embedding + per_layer,
    }


def find_stored(config: ModelConfig, name: str) -> Stored:
    """See ``Family.find_stored``."""
    return find_text(config, name, config.architecture in WITH_TOWERS)


def find_gguf(config: ModelConfig, name: str) -> Stored:
    """See ``Family.find_gguf``."""
    return find_text(config, name, has_towers=False)


def find_text(config: ModelConfig, name: str, has_towers: bool) -> Stored:
    """Location of a module of the language model. Tokens that have no embedding for each layer get that of token 0.

    Args:
        has_towers: the checkpoint also has towers.
    """
    stored = re.sub(r"^model\b", "model.language_model", name) if has_towers else name
    if name != "model.embed_tokens_per_layer":
        return Stored(stored)
    rows, vocabulary = int(config.raw["vocab_size_per_layer_input"]), config.vocab_size
    return Stored(stored, rows, ((0, min(rows, vocabulary)), *[(0, 1)] * (vocabulary - rows)))


FAMILY = Family(
    ("Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM", *WITH_TOWERS),
    read_config,
    build=imported("penstock.models.gemma4:Gemma4"),
    find_stored=find_stored,
    find_gguf=find_gguf,
)
