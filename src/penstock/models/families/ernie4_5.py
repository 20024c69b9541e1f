"""ERNIE 4.5 (Baidu, 2025), dense: Llama with interleaved RoPE."""

import re

from penstock.checkpoint.model_config import ConfigJson, ModelConfig, dense_config, options_of

from ..registry import Family
from ..stored import Stored

MTP_MODULES = {"enorm": "mtp_emb_norm", "hnorm": "mtp_hidden_norm", "eh_proj": "mtp_linear_proj"}
"""Modules of a multi-token prediction layer outside its decoder layer: DeepSeek's name → name in the checkpoint."""


def read_config(raw: ConfigJson) -> ModelConfig:
    bias = bool(raw.get("use_bias"))
    options = options_of(raw, rope_interleaved=True)
    return dense_config(raw, qkv_bias=bias, output_bias=bias, mlp_bias=bias, options=options)


def find_mtp(config: ModelConfig, name: str) -> Stored:
    """See ``Family.find_stored``. Modules of MTP layers have separate names, except the last norm: the model's norm."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if not match or (head := int(match[1]) - config.num_layers) < 0:
        return Stored(name)
    if match[2] == "shared_head.norm":
        return Stored("model.norm")
    return Stored(
        f"model.{MTP_MODULES[match[2]]}.{head}" if match[2] in MTP_MODULES else f"model.mtp_block.{head}.{match[2]}"
    )


FAMILY = Family(("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"), read_config, find_stored=find_mtp)
