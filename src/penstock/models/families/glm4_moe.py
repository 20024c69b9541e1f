"""GLM-4.5 and GLM-4.6 (Zhipu AI, 2025): partial RoPE (half of each head), and DeepSeek-V3's experts."""

from penstock.checkpoint.experts_config import read_deepseek_experts
from penstock.checkpoint.model_config import ConfigJson, ModelConfig, dense_config, options_of
from penstock.checkpoint.rope import rope_parameters_of

from ..registry import Family


def read_config(raw: ConfigJson) -> ModelConfig:
    return dense_config(
        raw,
        output_bias=False,
        qk_norm=bool(raw.get("use_qk_norm", False)),
        options=options_of(raw, partial_rotary_factor=rope_parameters_of(raw).get("partial_rotary_factor", 1.0)),
        experts=read_deepseek_experts(raw),
    )


FAMILY = Family(("Glm4MoeForCausalLM",), read_config)
