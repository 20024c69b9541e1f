"""Granite 3 (IBM, 2024): Llama with scales of embedding, attention, residual stream and logits; dense or mixture of
experts."""

from dataclasses import replace

from penstock.checkpoint.experts_config import FusedLayout, read_experts
from penstock.checkpoint.model_config import ConfigJson, ModelConfig, dense_config, options_of

from ..registry import Family


def read_config(raw: ConfigJson) -> ModelConfig:
    embedding, attention, residual, logits = (
        float(raw.get(name) or 1)
        for name in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    )
    options = options_of(
        raw,
        embedding_scale=embedding,
        attention_scale=attention,
        residual_scale=residual,
        logit_scale=1 / logits,
    )
    return dense_config(raw, options=options)


def read_moe_config(raw: ConfigJson) -> ModelConfig:
    experts = read_experts(
        raw,
        "intermediate_size",
        {"renormalize": True},
        module="block_sparse_moe",
        router="router.layer",
        fused=FusedLayout(tensors=("input_linear.weight", "output_linear.weight")),
    )
    return replace(read_config(raw), experts=experts)


GRANITE = Family(("GraniteForCausalLM",), read_config)
GRANITE_MOE = Family(("GraniteMoeForCausalLM",), read_moe_config)
