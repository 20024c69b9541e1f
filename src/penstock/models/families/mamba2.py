"""Mamba 2 (Dao and Gu, 2024): layers of a state space model, without attention and MLPs."""

from dataclasses import replace

from penstock.checkpoint.decoder_options import LayerNorms
from penstock.checkpoint.model_config import ConfigJson, LayerKind, ModelConfig, dense_config, options_of

from ..mamba import find_mamba2, read_mamba2
from ..registry import Family
from ..stored import Stored

DEFAULT_MAX_LEN = 2**18
"""Maximum sequence length in tokens for a ``config.json`` without ``max_position_embeddings``: the architecture has no
limit."""
NAMES = {"model.embed_tokens": "backbone.embeddings", "model.norm": "backbone.norm_f"}


def read_config(raw: ConfigJson) -> ModelConfig:
    hidden, heads, bias = int(raw["hidden_size"]), int(raw["num_heads"]), bool(raw.get("use_bias"))
    state = read_mamba2(
        raw,
        int(hidden * raw["expand"]),
        heads=heads,
        head_dim=int(raw["head_dim"]),
        groups=int(raw["n_groups"]),
        state_size=int(raw["state_size"]),
        kernel=int(raw["conv_kernel"]),
        convolution_bias=bool(raw["use_conv_bias"]),
        input_bias=bias,
        output_bias=bias,
        module="mixer",
    )
    options = options_of(raw, separate_mlps=True, layer_norms=LayerNorms("norm", before_mlp="norm"))
    unused = {"num_attention_heads": heads, "num_key_value_heads": state.groups, "intermediate_size": hidden}
    length = {"max_position_embeddings": raw.get("max_position_embeddings") or DEFAULT_MAX_LEN}
    config = dense_config({**raw, **unused, **length}, rms_norm_eps=float(raw["layer_norm_epsilon"]), options=options)
    kind: LayerKind = "state"
    return replace(config, raw=raw, layer_kinds=(kind,) * config.num_layers, state=state)


def find_stored(config: ModelConfig, name: str) -> Stored:
    stored = find_mamba2(config, NAMES.get(name, name))
    module = stored.name
    if module.startswith("model."):
        module = f"backbone.{module.removeprefix('model.')}"
    return replace(stored, name=module)


FAMILY = Family(("Mamba2ForCausalLM",), read_config, find_stored=find_stored)
