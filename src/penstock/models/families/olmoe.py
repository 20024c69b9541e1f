"""OLMoE (Ai2, 2024): Llama with a mixture of experts in every layer, and q/k norms over the whole projection."""

from penstock.checkpoint.decoder_options import QKNormOptions
from penstock.checkpoint.experts_config import read_experts
from penstock.checkpoint.model_config import ConfigJson, ModelConfig, dense_config, options_of
from penstock.core import Code, PenstockError

from ..registry import Family


def read_config(raw: ConfigJson) -> ModelConfig:
    if raw.get("clip_qkv") is not None:
        message = f"clip_qkv is {raw['clip_qkv']!r:.40}; clamped queries, keys and values are not supported"
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    experts = read_experts(raw, "intermediate_size")
    options = options_of(raw, qk_norm=QKNormOptions(scope="projection"))
    return dense_config(raw, qk_norm=True, options=options, experts=experts)


FAMILY = Family(("OlmoeForCausalLM",), read_config)
