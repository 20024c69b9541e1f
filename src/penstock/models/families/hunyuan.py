"""Hunyuan (Tencent, 2025): Llama with q/k norms after RoPE, and a RoPE base scaled by ``alpha``; dense, or mixture of
experts with a shared expert."""

from dataclasses import replace

from penstock.checkpoint.decoder_options import QKNormOptions
from penstock.checkpoint.experts_config import ExpertsConfig, read_routing
from penstock.checkpoint.model_config import ConfigJson, ModelConfig, dense_config, options_of
from penstock.checkpoint.rope import rope_parameters_of
from penstock.core import Code, PenstockError

from ..registry import Family
from ..stored import Stored

NAMES = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}
"""Norms: name in layers → name in the checkpoint."""


def read_config(raw: ConfigJson) -> ModelConfig:
    options = options_of(raw, qk_norm=QKNormOptions(after_rope=True))
    config, rope = dense_config(raw, qk_norm=True, mlp_bias=False, options=options), rope_parameters_of(raw)
    if rope["rope_type"] != "dynamic" or not rope.get("alpha"):
        return config
    stretched = rope["rope_theta"] * float(rope["alpha"]) ** (config.head_dim / (config.head_dim - 2))
    return replace(
        config,
        rope_parameters={"rope_type": "default", "rope_theta": stretched},
        max_model_len=config.max_position_embeddings,
    )


def read_moe_config(raw: ConfigJson) -> ModelConfig:
    for name in ("use_cla", "moe_layer_num_skipped"):
        if raw.get(name):
            message = f"{name} in config.json is {raw[name]!r:.40}, which is not supported"
            raise PenstockError(Code.UNSUPPORTED, message, "model")
    num_experts, top_k = _same_in_all_layers(raw, "num_experts"), _same_in_all_layers(raw, "moe_topk")
    size = int(raw["intermediate_size"])
    experts = ExpertsConfig(
        num_experts,
        size,
        read_routing(raw, num_experts, top_k=top_k, renormalize=True),
        shared_size=size * _same_in_all_layers(raw, "num_shared_expert"),
        shared_name="shared_mlp",
        router="gate.wg",
        router_float32=True,
    )
    return replace(read_config(raw), experts=experts)


def _same_in_all_layers(raw: ConfigJson, name: str) -> int:
    """A number that may be a list with equal values per layer; 1 if absent. Else raises ``PenstockError``."""
    value = raw.get(name) or 1
    values = {int(each) for each in (value if isinstance(value, list) else [value])}
    if len(values) > 1:
        message = f"{name} in config.json has the values {sorted(values)}; different values per layer are not supported"
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    return values.pop()


def find_stored(config: ModelConfig, name: str) -> Stored:
    """See ``Family.find_stored``."""
    parent, _, last = name.rpartition(".")
    return Stored(f"{parent}.{NAMES[last]}") if last in NAMES else Stored(name)


HUNYUAN = Family(("HunYuanDenseV1ForCausalLM",), read_config, find_stored=find_stored)
HUNYUAN_MOE = Family(("HunYuanMoEV1ForCausalLM",), read_moe_config, find_stored=find_stored)
