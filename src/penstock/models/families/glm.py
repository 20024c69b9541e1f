"""GLM-4 (Zhipu AI, 2024 and 2025): interleaved partial RoPE, a fused MLP; Glm4ForCausalLM also has post-norm."""

from penstock.checkpoint.decoder_options import LayerNorms
from penstock.checkpoint.model_config import ConfigJson, ModelConfig, dense_config, options_of
from penstock.checkpoint.rope import rope_parameters_of

from ..registry import Family
from ..stored import find_fused_mlp

LAYER_NORMS = LayerNorms(
    "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
)


def read_glm(raw: ConfigJson, layer_norms: LayerNorms = LayerNorms()) -> ModelConfig:  # noqa: B008 (frozen)
    share = rope_parameters_of(raw).get("partial_rotary_factor", 1.0)
    options = options_of(raw, rope_interleaved=True, partial_rotary_factor=share, layer_norms=layer_norms)
    return dense_config(raw, output_bias=False, mlp_bias=False, options=options)


def read_glm4(raw: ConfigJson) -> ModelConfig:
    return read_glm(raw, LAYER_NORMS)


GLM = Family(("GlmForCausalLM",), read_glm, find_stored=find_fused_mlp)
GLM4 = Family(("Glm4ForCausalLM",), read_glm4, find_stored=find_fused_mlp)
