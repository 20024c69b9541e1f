"""DeepSeek-V4 (DeepSeek-AI, 2026): compressed attention, hyper-connections, and experts chosen by token id in the first
layers."""

from dataclasses import replace
from typing import Literal

from penstock.checkpoint.compressed_config import read_compressed_config
from penstock.checkpoint.decoder_options import NormOptions
from penstock.checkpoint.experts_config import ExpertsConfig, Routing
from penstock.checkpoint.model_config import ConfigJson, ModelConfig, dense_config, options_of
from penstock.core import Code, PenstockError

from ..registry import Family, imported
from ..stored import Stored

SUPPORTED = {
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "mlp_bias": False,
    "attention_bias": False,
    "n_shared_experts": 1,
}
"""Fields → the only supported value."""
SCORES: dict[str, Literal["sqrtsoftplus", "sigmoid"]] = {"sqrtsoftplus": "sqrtsoftplus", "sigmoid": "sigmoid"}
"""``scoring_func`` → ``Routing.scores``."""
PROJECTIONS = "w1", "w3", "w2"
"""Gate, up and down projection of an expert."""
TOP_LEVEL = {"model.embed_tokens": "embed", "lm_head": "head"}
"""Modules outside of the layers → name in the checkpoint."""


def read_config(raw: ConfigJson) -> ModelConfig:
    for name, value in SUPPORTED.items():
        if raw.get(name, value) != value:
            message = f"{name} {raw[name]!r:.40} is not supported for DeepSeek-V4; it must be {value}"
            raise PenstockError(Code.UNSUPPORTED, message, "model")
    size = int(raw["moe_intermediate_size"])
    config = dense_config(
        {**raw, "intermediate_size": size, "num_key_value_heads": 1},
        num_mtp_layers=0,
        sliding_windows=(int(raw["sliding_window"]),) * int(raw["num_hidden_layers"]),
    )
    compressed = read_compressed_config(raw, config.head_dim, config.num_heads, config.num_layers)
    factor = compressed.rope_dim / config.head_dim
    return replace(
        config,
        compressed=compressed,
        residual_streams=compressed.hyper.streams,
        layer_kinds=tuple("attention" if kind == "none" else "both" for kind in compressed.kinds),
        rope_parameters=compressed.rope,
        local_rope_parameters=compressed.window_rope,
        experts=_read_experts(raw, config.num_layers, size),
        options=options_of(
            raw,
            activation="swiglu10",
            partial_rotary_factor=factor,
            norm=NormOptions(float32=True, as_stored=True),
        ),
    )


def _read_experts(raw: ConfigJson, layers: int, size: int) -> ExpertsConfig:
    top_k, experts, scores = (
        int(raw["num_experts_per_tok"]),
        int(raw["n_routed_experts"]),
        SCORES.get(raw["scoring_func"]),
    )
    if scores is None:
        message = f"must be one of {', '.join(SCORES)}"
        raise ValueError(f"scoring_func is {raw['scoring_func']!r:.40}; it {message}")
    if not 1 <= top_k <= experts:
        raise ValueError(f"num_experts_per_tok is {top_k}; it must be from 1 to n_routed_experts ({experts})")
    hashed = raw.get("num_hash_layers")
    kinds = raw.get("mlp_layer_types") or ["hash_moe"] * min(layers, 3 if hashed is None else int(hashed))
    kinds = [*kinds, *["moe"] * layers][:layers] if not raw.get("mlp_layer_types") else list(kinds)[:layers]
    if len(kinds) != layers or set(kinds).difference(("hash_moe", "moe")):
        raise ValueError(f"mlp_layer_types must have hash_moe or moe for each of {layers} layers")
    scale = float(raw["routed_scaling_factor"])
    return ExpertsConfig(
        experts,
        size,
        Routing(top_k, scores, renormalize=True, scale=scale, added_sum=1e-20),
        shared_size=size,
        router_bias="gate.bias",
        router_float32=True,
        module="ffn",
        shared_projections=PROJECTIONS,
        projections=PROJECTIONS,
        hash_layers=frozenset(layer for layer, kind in enumerate(kinds) if kind == "hash_moe"),
    )


def find_stored(config: ModelConfig, name: str) -> Stored:
    """Published files have no prefix ``model.``, files of transformers have one."""
    if name in TOP_LEVEL:
        return Stored(TOP_LEVEL[name], other=name)
    return Stored(name.removeprefix("model."), other=name)


FAMILY = Family(
    ("DeepseekV4ForCausalLM",),
    read_config,
    imported("penstock.models.deepseek_v4:DeepseekV4"),
    find_stored=find_stored,
)
