"""OLMo-Hybrid (Ai2, 2026): gated delta nets with pre-norm, and OLMo 3's attention with post-norm, by default in every
fourth layer."""

from dataclasses import replace

from penstock.checkpoint.decoder_options import LayerNorms, NormOptions, QKNormOptions
from penstock.checkpoint.model_config import ConfigJson, LayerKind, ModelConfig, dense_config, options_of
from penstock.checkpoint.state_config import GatedDeltaNetConfig

from ..registry import Family
from ..stored import Stored
from .olmo2 import LAYER_NORMS
from .qwen3_next import delta_net_config, layer_kinds

DELTA_NET_NAMES = {f"in_proj_{part}": f"{part}_proj" for part in "qkvba"}
DELTA_NET_NAMES |= {f"conv1d_{part}": f"{part}_conv1d" for part in "qkv"}
DELTA_NET_NAMES |= {"in_proj_z": "g_proj", "norm": "o_norm", "out_proj": "o_proj"}
"""Module of ``GatedDeltaNet`` -> name in the checkpoint."""
NORM_NAMES = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}
"""Names of norms in transformers -> other names in checkpoints."""


def read_config(raw: ConfigJson) -> ModelConfig:
    config = dense_config(raw, qk_norm=True, mlp_bias=False)
    options = options_of(
        raw,
        norm=NormOptions(float32=True),
        layer_norms=LAYER_NORMS,
        state_layer_norms=LayerNorms(),
        qk_norm=QKNormOptions(scope="projection"),
        rope_layers=(False,) * config.num_layers if config.rope_parameters.get("absent") else (),
    )
    types = raw.get("layer_types")
    kinds = layer_kinds(types) if types else _default_kinds(config.num_layers)
    return replace(config, options=options, layer_kinds=kinds, state=_delta_net(raw, config))


def _default_kinds(num_layers: int) -> tuple[LayerKind, ...]:
    kinds: list[LayerKind] = ["attention" if layer % 4 == 3 else "state" for layer in range(num_layers)]
    return tuple(kinds) if "attention" in kinds else (*kinds[:-1], "attention")


def _delta_net(raw: ConfigJson, config: ModelConfig) -> GatedDeltaNetConfig:
    given = {name: value for name, value in raw.items() if value is not None}
    key_heads = int(given.get("linear_num_key_heads", config.num_heads))
    key_dim = int(given.get("linear_key_head_dim", 0.75 * config.hidden_size / key_heads))
    defaults = {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": config.num_heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": 2 * key_dim,
    }
    beta_scale = 2.0 if raw.get("linear_allow_neg_eigval", True) else 1.0
    return replace(delta_net_config(defaults | given), norm_eps=1e-5, beta_scale=beta_scale)


def find_stored(config: ModelConfig, name: str) -> Stored:
    """See ``Family.find_stored``."""
    parent, _, last = name.rpartition(".")
    if parent.endswith(".linear_attn"):
        return Stored(f"{parent}.{DELTA_NET_NAMES.get(last, last)}")
    return Stored(name, other=f"{parent}.{NORM_NAMES[last]}" if last in NORM_NAMES else "")


FAMILY = Family(("OlmoHybridForCausalLM",), read_config, find_stored=find_stored)
