"""GGUF architectures of BLOOM, MPT and Falcon: layer norms, MLPs without a gate, a fused QKV tensor.

Sources: see ``gguf_architectures``.
"""

from __future__ import annotations

from .gguf_architectures import ATTENTION, ATTENTION_BIAS, MODEL, Architecture, Fields
from .gguf_metadata import Metadata

PLAIN_MLP = {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
NORM_BIAS = ("attn_norm.bias", "ffn_norm.bias")
MLP_BIAS = ("ffn_up.bias", "ffn_down.bias")


def _bloom(metadata: Metadata) -> Fields:
    return {"layer_norm_epsilon": metadata.number("attention.layer_norm_epsilon")}


def _mpt(metadata: Metadata) -> Fields:
    """The converter writes the epsilon 1e-5, and leaves out the scale of attention."""
    alibi = metadata.number("attention.max_alibi_bias", 0.0)
    attention = {
        "alibi": alibi > 0,
        "alibi_bias_max": int(alibi) or 8,
        "clip_qkv": metadata.number("attention.clamp_kqv", 0.0) or None,
    }
    return {
        "attn_config": attention,
        "max_seq_len": metadata.size("context_length"),
        "layer_norm_epsilon": metadata.number("attention.layer_norm_epsilon"),
    }


def _falcon(metadata: Metadata) -> Fields:
    """All files have parallel attention and MLP, and rotary positions. Those of 40B and 180B have a second norm."""
    heads = metadata.size("attention.head_count")
    kv_heads = metadata.size("attention.head_count_kv", heads)
    two_norms = metadata.has_any("attn_norm_2.weight")
    return {
        "layer_norm_epsilon": metadata.number("attention.layer_norm_epsilon"),
        "new_decoder_architecture": two_norms or kv_heads > 1,
        "num_ln_in_parallel_attn": 2 if two_norms else 1,
        "num_kv_heads": kv_heads,
        "multi_query": kv_heads == 1,
        "ffn_hidden_size": metadata.last_dimension("ffn_down.weight"),
    }


BLOOM = Architecture(
    "BloomForCausalLM",
    model={**MODEL, "model.embed_norm": "token_embd_norm"},
    mlp=PLAIN_MLP,
    flags={"": (*ATTENTION_BIAS, *MLP_BIAS, *NORM_BIAS)},
    read=_bloom,
    layer_norm=True,
    rope_free=True,
)
MPT = Architecture("MptForCausalLM", mlp=PLAIN_MLP, read=_mpt, layer_norm=True, rope_free=True)
FALCON = Architecture(
    "FalconForCausalLM",
    layer={**ATTENTION, "input_layernorm": "attn_norm", "ln_mlp": "attn_norm", "ln_attn": "attn_norm_2"},
    mlp=PLAIN_MLP,
    optional=("attn_norm_2.weight",),
    flags={"": ("attn_norm.bias", "attn_norm_2.bias")},
    constants={"activation": "gelu", "alibi": False, "bias": False, "parallel_attn": True},
    read=_falcon,
    layer_norm=True,
)
ARCHITECTURES = {"bloom": BLOOM, "mpt": MPT, "falcon": FALCON}
"""Architectures by ``general.architecture``."""
