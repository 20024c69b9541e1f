"""Mamba 2 (Dao and Gu, 2024): layers of a state space model, without attention and MLPs."""

from dataclasses import replace

from penstock.checkpoint.decoder_options import LayerNorms
from penstock.checkpoint.model_config import PADDED_TO, ConfigJson, LayerKind, ModelConfig, dense_config, options_of

from ..mamba import find_mamba2, read_mamba2
from ..registry import Family
from ..stored import Stored

DEFAULT_MAX_LEN = 2**18
"""Maximum sequence length in tokens for a ``config.json`` without ``max_position_embeddings``: the architecture has no
limit."""


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
    unused |= {"head_dim": PADDED_TO}
    length = {"max_position_embeddings": raw.get("max_position_embeddings") or DEFAULT_MAX_LEN}
    config = dense_config({**raw, **unused, **length}, rms_norm_eps=float(raw["layer_norm_epsilon"]), options=options)
    kind: LayerKind = "state"
    return replace(config, raw=raw, layer_kinds=(kind,) * config.num_layers, state=state)


def find_stored(config: ModelConfig, name: str) -> Stored:
    if name == "model.embed_tokens":
        return Stored("backbone.embeddings", other="backbone.embedding")
    stored = find_mamba2(config, "model.norm_f" if name == "model.norm" else name)
    prefix, _, rest = stored.name.partition(".")
    return replace(stored, name=f"backbone.{rest}") if prefix == "model" else stored


FAMILY = Family(("Mamba2ForCausalLM",), read_config, find_stored=find_stored, find_gguf=find_mamba2)
