"""MiniMax-M2 (MiniMax, 2025): partial RoPE, q/k norms over the whole projection, experts with sigmoid scores."""

from penstock.checkpoint.decoder_options import QKNormOptions
from penstock.checkpoint.experts_config import read_experts
from penstock.checkpoint.model_config import ConfigJson, ModelConfig, dense_config, options_of
from penstock.checkpoint.rope import rope_parameters_of

from ..registry import Family


def read_config(raw: ConfigJson) -> ModelConfig:
    share = rope_parameters_of(raw).get("partial_rotary_factor", 1.0)
    experts = read_experts(
        raw,
        "intermediate_size",
        {"scores": "sigmoid", "renormalize": True},
        router_bias="e_score_correction_bias",
        router_float32=True,
        module="block_sparse_moe",
        projections=("w1", "w3", "w2"),
    )
    options = options_of(raw, partial_rotary_factor=share, qk_norm=QKNormOptions(scope="projection"))
    return dense_config(raw, qk_norm=True, options=options, experts=experts)


FAMILY = Family(("MiniMaxM2ForCausalLM",), read_config)
