"""MPT (MosaicML, 2023): ALiBi, layer norms and linear layers without bias, an MLP without a gate, and a fused QKV
tensor."""

from typing import Any

from penstock.checkpoint.alibi import mpt_alibi_slopes
from penstock.checkpoint.decoder_options import NormOptions
from penstock.checkpoint.model_config import ConfigJson, ModelConfig, dense_config, options_of
from penstock.core import Code, PenstockError

from ..registry import Family
from ..stored import Stored, part_of

NAMES = {
    "model.embed_tokens": "transformer.wte",
    "model.norm": "transformer.norm_f",
    "input_layernorm": "norm_1",
    "post_attention_layernorm": "norm_2",
    "self_attn.o_proj": "attn.out_proj",
    "mlp.c_fc": "ffn.up_proj",
    "mlp.c_proj": "ffn.down_proj",
}
"""Modules: name in layers → name in the checkpoint, or in a layer of it."""
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "attn_type": ("multihead_attention",),
    "clip_qkv": (None,),
    "prefix_lm": (False,),
    "qk_ln": (False,),
    "attn_uses_sequence_id": (False,),
    "alibi": (True,),
    "alibi_bias_max": (8,),
}
"""Supported values of the fields of ``attn_config``."""


def read_config(raw: ConfigJson) -> ModelConfig:
    hidden, heads, layers = (int(raw[name]) for name in ("d_model", "n_heads", "n_layers"))
    attention = raw.get("attn_config") or {}
    for field, values in SUPPORTED.items():
        if attention.get(field, values[0]) not in values:
            _refuse(f"attn_config.{field}", attention[field], values[0])
    if raw.get("logit_scale") is not None:
        _refuse("logit_scale", raw["logit_scale"], None)
    if not raw.get("no_bias", True):
        _refuse("no_bias", False, True)
    scale = attention.get("softmax_scale")
    options = options_of(
        {"hidden_act": "gelu"},
        norm=NormOptions("layer"),
        gated_mlp=False,
        rope_layers=(False,) * layers,
        attention_scale=None if scale is None else float(scale),
        alibi=mpt_alibi_slopes(heads),
    )
    given = {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": heads}
    given |= {"num_hidden_layers": layers, "max_position_embeddings": raw.get("max_seq_len") or 2048}
    given |= {"intermediate_size": hidden * int(raw.get("expansion_ratio") or 4)}
    eps = float(raw.get("layer_norm_epsilon") or 1e-5)
    return dense_config({**raw, **given}, rms_norm_eps=eps, options=options)


def _refuse(field: str, value: Any, supported: Any) -> None:
    message = f"{field} is {value!r:.40}, which is not supported for MPT; it must be {supported}"
    raise PenstockError(Code.UNSUPPORTED, message, "model")


def find_stored(config: ModelConfig, name: str) -> Stored:
    """See ``Family.find_stored``."""
    if name in NAMES:
        return Stored(NAMES[name])
    layer, module = (".".join(part) for part in (name.split(".")[2:3], name.split(".")[3:]))
    if not layer:
        return Stored(name)
    if module.endswith(("q_proj", "k_proj", "v_proj")):
        size = config.num_heads * config.checkpoint_head_dim
        return part_of(f"transformer.blocks.{layer}.attn.Wqkv", [size] * 3, "qkv".index(module[-6]))
    return Stored(f"transformer.blocks.{layer}.{NAMES.get(module, module)}")


FAMILY = Family(("MptForCausalLM",), read_config, find_stored=find_stored)
