"""InternLM 2 and 3 (Shanghai AI Laboratory, 2024 and 2025): Llama. InternLM 2 has other tensor names, and a fused QKV
tensor grouped by key-value head."""

from penstock.checkpoint.model_config import ConfigJson, ModelConfig, dense_config

from ..registry import Family
from ..stored import Stored, find_grouped_qkv

NAMES = {
    "model.embed_tokens": "model.tok_embeddings",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
"""Modules of InternLM 2: name in layers → name in the checkpoint."""


def read_internlm2(raw: ConfigJson) -> ModelConfig:
    return dense_config(raw, qkv_bias=bool(raw.get("bias")), output_bias=bool(raw.get("bias")))


def read_internlm3(raw: ConfigJson) -> ModelConfig:
    # config_defaults.json renames the publisher's ``bias`` to ``mlp_bias``, and ``qkv_bias`` to ``attention_bias``
    bias = bool(raw.get("mlp_bias"))
    return dense_config(raw, output_bias=bias)


def find_stored(config: ModelConfig, name: str) -> Stored:
    """See ``Family.find_stored``; for InternLM 2."""
    layer, module = (".".join(part) for part in (name.split(".")[:3], name.split(".")[3:]))
    if name in NAMES:
        return Stored(NAMES[name])
    if module in NAMES:
        return Stored(f"{layer}.{NAMES[module]}")
    if not module.endswith(("q_proj", "k_proj", "v_proj")):
        return Stored(name)
    return find_grouped_qkv(config, f"{layer}.attention.wqkv", module[-6], config.num_kv_heads)


INTERNLM2 = Family(("InternLM2ForCausalLM",), read_internlm2, find_stored=find_stored)
INTERNLM3 = Family(("InternLM3ForCausalLM",), read_internlm3)
