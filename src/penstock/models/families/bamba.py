"""Bamba (IBM et al., 2024): Mamba 2 layers, some layers with attention, and an MLP in each layer."""

from dataclasses import replace

from penstock.checkpoint.decoder_options import LayerNorms
from penstock.checkpoint.model_config import ConfigJson, LayerKind, ModelConfig, dense_config, options_of

from ..mamba import find_mamba2, read_mamba2
from ..registry import Family
from ..stored import Stored

ROTATED = 0.5
"""``partial_rotary_factor``, which ``config.json`` does not change."""


def read_config(raw: ConfigJson) -> ModelConfig:
    attention = raw.get("attn_layer_indices") or ()
    options = options_of(raw, layer_norms=LayerNorms(before_mlp="pre_ff_layernorm"), partial_rotary_factor=ROTATED)
    config = dense_config(raw, options=options)
    kinds: tuple[LayerKind, ...] = tuple(
        "attention" if layer in attention else "state" for layer in range(config.num_layers)
    )
    state = read_mamba2(raw, int(raw["mamba_expand"] * config.hidden_size))
    return replace(config, layer_kinds=kinds, state=state)


def find_stored(config: ModelConfig, name: str) -> Stored:
    stored = find_mamba2(config, name.replace(".mlp.", ".feed_forward."))
    return Stored("model.final_layernorm") if name == "model.norm" else stored


FAMILY = Family(("BambaForCausalLM",), read_config, find_stored=find_stored, find_gguf=find_mamba2)
