"""RecurrentGemma (Gemma Team, 2024): the recurrent blocks of Griffin in two of three layers, attention with a sliding
window in the others."""

import struct
from dataclasses import replace

from penstock.checkpoint.decoder_options import LayerNorms, NormOptions
from penstock.checkpoint.model_config import ConfigJson, LayerKind, ModelConfig, activation_of, dense_config, options_of
from penstock.checkpoint.rope import rope_parameters_of
from penstock.checkpoint.state_config import RGLRUConfig, check_kernel
from penstock.checkpoint.state_spec import check_sizes
from penstock.core import Code, PenstockError

from ..registry import Family
from ..stored import Stored

NORMS = LayerNorms(before_attention="temporal_pre_norm", before_mlp="channel_pre_norm")
BLOCK_TYPES = ("recurrent", "recurrent", "attention")
KINDS: dict[str, LayerKind] = {"recurrent": "state", "attention": "attention"}


def read_config(raw: ConfigJson) -> ModelConfig:
    rope = rope_parameters_of(raw)
    if rope["rope_type"] != "default":
        message = f"rope_type {rope['rope_type']!r:.40} is not supported by RecurrentGemma; supported: default"
        raise PenstockError(Code.UNSUPPORTED, message, "rope_type")
    fields = {"intermediate_size": int(raw["intermediate_size"]) // 2, "head_dim": None}
    config = dense_config({**raw, **fields}, output_bias=True, mlp_bias=True)
    layers, heads, hidden = config.num_layers, config.num_heads, config.hidden_size
    activation = activation_of(str(raw.get("hidden_activation") or "gelu_pytorch_tanh"))
    options = options_of(
        raw,
        activation=activation,
        norm=NormOptions(unit_offset=True),
        layer_norms=NORMS,
        embedding_scale=round_to_bfloat16(hidden**0.5),
        partial_rotary_factor=rope.get("partial_rotary_factor", 0.5),
        logit_softcap=float(raw.get("logits_soft_cap") or 0),
    )
    width = int(raw.get("lru_width") or hidden)
    if width % heads:
        raise ValueError(f"lru_width is {width}; it must be a multiple of num_attention_heads, {heads}")
    check_sizes(lru_width=width)
    types = [*(raw.get("block_types") or BLOCK_TYPES)]
    if not KINDS.keys() >= set(types):
        raise ValueError(f"block_types has {types!r:.60}; the types are {' and '.join(KINDS)}")
    state = RGLRUConfig(
        heads,
        width // heads,
        check_kernel(int(raw.get("conv1d_width") or 4), "conv1d_width"),
        activation,
    )
    return replace(
        config,
        options=options,
        layer_kinds=tuple(KINDS[types[layer % len(types)]] for layer in range(layers)),
        sliding_windows=(int(raw.get("attention_window_size") or 2048),) * layers,
        state=state,
        raw=raw,
    )


def round_to_bfloat16(number: float) -> float:
    """Round to the nearest bfloat16: the published models scale the embedding by such a number in every dtype."""
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    (result,) = struct.unpack("<f", struct.pack("<I", rounded))
    return float(result)


def find_stored(config: ModelConfig, name: str) -> Stored:
    """See ``Family.find_stored``."""
    if name == "model.norm":
        return Stored("model.final_norm")
    return Stored(name.replace(".self_attn.", ".temporal_block.").replace(".mlp.", ".mlp_block."))


FAMILY = Family(("RecurrentGemmaForCausalLM",), read_config, find_stored=find_stored)
