"""Falcon (TII, 2023 and 2024): parallel attention and MLP with one key-value head (7B), or with several and two norms
(40B, 180B), or one norm (11B); before, ALiBi and BLOOM's layers (RW)."""

from penstock.checkpoint.alibi import alibi_slopes
from penstock.checkpoint.decoder_options import LayerNorms, NormOptions
from penstock.checkpoint.model_config import ConfigJson, ModelConfig, dense_config, options_of
from penstock.core import Code, PenstockError

from ..registry import Family
from ..stored import Stored
from .bloom import NAMES, find_fused


def read_config(raw: ConfigJson) -> ModelConfig:
    hidden, heads = int(raw.get("n_embed") or raw["hidden_size"]), int(raw["num_attention_heads"])
    layers = int(raw["num_hidden_layers"])
    grouped, parallel, alibi = (bool(raw.get(name)) for name in ("new_decoder_architecture", "parallel_attn", "alibi"))
    kv_heads = int(raw.get("num_kv_heads") or heads) if grouped else 1 if raw.get("multi_query") else heads
    norms = raw.get("num_ln_in_parallel_attn") or (2 if grouped else 1)
    if grouped and not parallel:
        message = "parallel_attn is false with new_decoder_architecture, which has parallel attention in all published "
        raise PenstockError(Code.UNSUPPORTED, f"{message}models: this combination is not supported", "model")
    if norms not in (1, 2) or (norms == 2 and parallel and not grouped):
        message = f"num_ln_in_parallel_attn is {norms}; supported are 1, and 2 with new_decoder_architecture"
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    layer_norms = LayerNorms()
    if parallel:
        layer_norms = LayerNorms("ln_attn", before_mlp="ln_mlp") if norms == 2 else LayerNorms(before_mlp=None)
    scale = (hidden // heads) ** -0.5
    bias = bool(raw.get("bias"))
    options = options_of(
        {"hidden_act": raw.get("activation") or "gelu"},
        norm=NormOptions("layer", bias=True),
        layer_norms=layer_norms,
        gated_mlp=False,
        parallel_residual=parallel,
        rope_layers=(False,) * layers if alibi else (),
        alibi=tuple(slope * scale for slope in alibi_slopes(heads)) if alibi else (),
    )
    return dense_config(
        {
            **raw,
            "hidden_size": hidden,
            "num_key_value_heads": kv_heads,
            "intermediate_size": raw.get("ffn_hidden_size") or 4 * hidden,
            "head_dim": hidden // heads,
        },
        rms_norm_eps=float(raw.get("layer_norm_epsilon") or 1e-5),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        options=options,
    )


def find_stored(config: ModelConfig, name: str) -> Stored:
    """See ``Family.find_stored``."""
    return find_fused(config, name, NAMES, config.num_kv_heads)


FAMILY = Family(("FalconForCausalLM",), read_config, find_stored=find_stored)
