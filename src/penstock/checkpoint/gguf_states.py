"""Architectures of GGUF files with recurrent state: tensor names and ``config.json`` fields of each.

Module names are those that layers read, but for matrices that are parts of a tensor (``Family.find_gguf``). Sources:
see ``gguf_architectures``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .gguf_architectures import (
    ATTENTION,
    ATTENTION_BIAS,
    E_SCORE,
    FEED_FORWARD,
    LATENT,
    LATENT_QUERIES,
    MLP,
    MODEL,
    NEXTN,
    PRE_NORMS,
    QK_NORMS,
    ROUTER_BIAS,
    SECOND_POST_NORM,
    Architecture,
    Fields,
    all_of,
    counts,
    expert_size,
    experts,
    granite,
    latent,
    mlp_only_layers,
    sparse_layers,
)
from .gguf_metadata import Metadata

UNLIMITED = 2**20
"""``context_length`` of files whose converter does not know the limit."""
MAMBA2 = {
    **{"out_proj": "ssm_out", "in_proj": "ssm_in", "conv1d": "ssm_conv1d", "norm": "ssm_norm"},
    **{"dt_bias": "ssm_dt.bias", "A_log": "ssm_a", "D": "ssm_d"},
}
"""Tensors of a Mamba 2 layer, by module below the layer's module."""
MAMBA = {
    **{"out_proj": "ssm_out", "in_proj": "ssm_in", "conv1d": "ssm_conv1d", "x_proj": "ssm_x"},
    **{"dt_proj": "ssm_dt", "dt_proj.bias": "ssm_dt.bias", "A_log": "ssm_a", "D": "ssm_d"},
}
DELTA_NET = {
    **{"out_proj": "ssm_out", "in_proj_qkv": "attn_qkv", "in_proj_z": "attn_gate", "conv1d": "ssm_conv1d"},
    **{"dt_bias": "ssm_dt.bias", "A_log": "ssm_a", "norm": "ssm_norm"},
}
KIMI_DELTA = {
    **{"b_proj": "ssm_beta", "A_log": "ssm_a", "dt_bias": "ssm_dt.bias", "o_norm": "ssm_norm", "o_proj": "attn_output"},
    **{f"{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"{part}_conv1d": f"ssm_conv1d_{part}" for part in "qkv"},
    **{f"{part}_proj": f"ssm_{part}" for part in ("f_a", "f_b", "g_a", "g_b")},
}
KEY_VALUES = {"self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa"}
NEMOTRON_MLP = {"c_fc": "ffn_up", "c_proj": "ffn_down"}
NEMOTRON_EXPERTS = {
    **{"gate": "ffn_gate_inp", f"gate.{E_SCORE}": ROUTER_BIAS},
    **{"experts.up_proj": "ffn_up_exps", "experts.down_proj": "ffn_down_exps"},
    **{"shared_experts.up_proj": "ffn_up_shexp", "shared_experts.down_proj": "ffn_down_shexp"},
    **{"fc1_latent_proj": "ffn_latent_down", "fc2_latent_proj": "ffn_latent_up"},
}
MAMBA_FLAGS = {"use_bias": ("ssm_in.bias", "ssm_out.bias"), "use_conv_bias": ("ssm_conv1d.bias",)}
NO_NEXTN = tuple(f"{tensor}.weight" for tensor in NEXTN.values())


def _below(module: str, names: Mapping[str, str]) -> dict[str, str]:
    return {f"{module}.{name}": tensor for name, tensor in names.items()}


def _kinds(metadata: Metadata, state: str, attention: str, tensor: str = "ssm_out.weight") -> list[str]:
    """Kind of each layer; layers with recurrent state have ``tensor``."""
    layers = range(metadata.layers - metadata.mtp_layers)
    return [state if f"blk.{layer}.{tensor}" in metadata.tensors else attention for layer in layers]


def _mamba2_sizes(metadata: Metadata) -> Fields:
    """Sizes of Mamba 2 layers, by the field names of Bamba."""
    heads, inner = metadata.size("ssm.time_step_rank"), metadata.size("ssm.inner_size")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": metadata.size("ssm.group_count"),
        "mamba_d_state": metadata.size("ssm.state_size"),
        "mamba_d_conv": metadata.size("ssm.conv_kernel"),
        "mamba_expand": inner / metadata.size("embedding_length"),
    }


def _mamba2(metadata: Metadata) -> Fields:
    sizes = _mamba2_sizes(metadata)
    return {
        "num_heads": sizes["mamba_n_heads"],
        "head_dim": sizes["mamba_d_head"],
        "n_groups": sizes["mamba_n_groups"],
        "state_size": sizes["mamba_d_state"],
        "conv_kernel": sizes["mamba_d_conv"],
        "expand": sizes["mamba_expand"],
        "layer_norm_epsilon": metadata.number("attention.layer_norm_rms_epsilon"),
    }


def _mamba(metadata: Metadata) -> Fields:
    return {
        "intermediate_size": metadata.size("ssm.inner_size"),
        "state_size": metadata.size("ssm.state_size"),
        "conv_kernel": metadata.size("ssm.conv_kernel"),
        "time_step_rank": metadata.size("ssm.time_step_rank"),
        "layer_norm_epsilon": metadata.number("attention.layer_norm_rms_epsilon"),
    }


def _delta_net(metadata: Metadata) -> Fields:
    heads = metadata.size("ssm.time_step_rank")
    return {
        "linear_num_key_heads": metadata.size("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": metadata.size("ssm.state_size"),
        "linear_value_head_dim": metadata.size("ssm.inner_size") // heads,
        "linear_conv_kernel_dim": metadata.size("ssm.conv_kernel"),
        "layer_types": _kinds(metadata, "linear_attention", "full_attention"),
    }


def _shared_expert(metadata: Metadata) -> Fields:
    return {"shared_expert_intermediate_size": metadata.last_dimension("ffn_down_shexp.weight")}


def _granite_hybrid(metadata: Metadata) -> Fields:
    num_experts = metadata.size("expert_count", 0)
    context = metadata.size("context_length")
    shared = metadata.last_dimension("ffn_down_shexp.weight", metadata.last_dimension("ffn_down.weight"))
    return {
        **granite(metadata),
        **_mamba2_sizes(metadata),
        "layer_types": _kinds(metadata, "linear_attention", "full_attention"),
        "max_position_embeddings": 131_072 if context == UNLIMITED else context,  # that of published models
        "position_embedding_type": "rope" if metadata.flag("rope.scaling.finetuned", False) else None,
        "shared_intermediate_size": shared,
        "intermediate_size": expert_size(metadata) if num_experts else shared,
        "num_local_experts": num_experts,
        "num_experts_per_tok": metadata.size("expert_used_count", 0),
    }


def _bamba(metadata: Metadata) -> Fields:
    if 2 * metadata.size("rope.dimension_count", 0) != metadata.head_dim:
        raise metadata.unsupported("rotary embedding of another part than half of each head")
    kinds = _kinds(metadata, "linear_attention", "full_attention")
    indices = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    return {**_mamba2_sizes(metadata), "attn_layer_indices": indices, "layer_types": None}


def _falcon_h1(metadata: Metadata) -> Fields:
    """Files have the scales in the weights."""
    names = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
    return {
        **_mamba2_sizes(metadata),
        **dict.fromkeys((f"{name}_multiplier" for name in names), 1.0),
        "mlp_multipliers": [1.0] * 2,
        "ssm_multipliers": [1.0] * 5,
        "mamba_d_ssm": metadata.size("ssm.inner_size"),
        "mamba_norm_before_gate": False,
    }


def _nemotron_h(metadata: Metadata) -> Fields:
    sizes, fields = _mamba2_sizes(metadata), dict[str, Any]()
    kinds = _kinds(metadata, "linear_attention", "mlp")
    for layer in range(len(kinds)):
        for tensor, kind in (("attn_output", "full_attention"), ("ffn_gate_inp", "moe")):
            if f"blk.{layer}.{tensor}.weight" in metadata.tensors:
                kinds[layer] = kind
    if metadata.size("expert_count", 0):
        fields = {
            **counts("n_routed_experts")(metadata),
            "moe_shared_expert_intermediate_size": metadata.last_dimension("ffn_down_shexp.weight"),
            "moe_latent_size": metadata.size("moe_latent_size", 0) or None,
            "norm_topk_prob": metadata.flag("expert_weights_norm", False),
            "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0) or 1.0,
            "n_group": metadata.size("expert_group_count", 1),
            "topk_group": metadata.size("expert_group_used_count", 1),
        }
    return {
        **fields,
        "layers_block_type": kinds,
        "intermediate_size": metadata.last_dimension("ffn_down.weight", 1),
        "mamba_num_heads": sizes["mamba_n_heads"],
        "mamba_head_dim": sizes["mamba_d_head"],
        "n_groups": sizes["mamba_n_groups"],
        "ssm_state_size": sizes["mamba_d_state"],
        "conv_kernel": sizes["mamba_d_conv"],
        "layer_norm_epsilon": metadata.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.size("context_length"),
    }


def _jamba(metadata: Metadata) -> Fields:
    """Files have a kind for each layer; ``config.json`` has every N-th layer from a first one."""
    layers = range(metadata.layers)
    kinds = _kinds(metadata, "state", "attention")
    with_attention = [layer for layer in layers if kinds[layer] == "attention"]
    with_experts, num_experts = sparse_layers(metadata), metadata.size("expert_count", 0)
    fields: Fields = {}
    for name, found in (("attn", with_attention), ("expert", with_experts)):
        first = found[0] if found else len(layers)
        period = found[1] - first if len(found) > 1 else len(layers) + 1
        if found != [layer for layer in layers if layer % period == first]:
            raise metadata.unsupported(f"an irregular order of layers (blk.{found[-1]})")
        fields |= {f"{name}_layer_period": period, f"{name}_layer_offset": first}
    return {
        **fields,
        "num_experts": num_experts if with_experts else 1,
        "num_experts_per_tok": metadata.size("expert_used_count", 1),
        "mamba_d_state": metadata.size("ssm.state_size"),
        "mamba_d_conv": metadata.size("ssm.conv_kernel"),
        "mamba_expand": metadata.size("ssm.inner_size") // metadata.size("embedding_length"),
        "mamba_dt_rank": metadata.size("ssm.time_step_rank"),
    }


def _kimi_linear(metadata: Metadata) -> Fields:
    layers, sparse = range(metadata.layers), sparse_layers(metadata)
    size = expert_size(metadata)
    return {
        **latent(metadata),
        **counts("num_local_experts")(metadata),
        "n_shared_experts": metadata.last_dimension("ffn_down_shexp.weight") // size,
        "layer_types": _kinds(metadata, "linear_attention", "full_attention", "ssm_beta.weight"),
        "mlp_layer_types": ["sparse" if layer in sparse else "dense" for layer in layers],
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": True,
        "n_group": metadata.size("expert_group_count", 1),
        "topk_group": metadata.size("expert_group_used_count", 1),
        "linear_num_heads": metadata.size("attention.head_count"),
        "linear_head_dim": metadata.size("kda.head_dim"),
        "linear_conv_kernel_dim": metadata.size("ssm.conv_kernel"),
    }


def _lfm2(metadata: Metadata) -> Fields:
    return {
        "norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "layer_types": _kinds(metadata, "conv", "full_attention", "shortconv.out_proj.weight"),
        "conv_L_cache": metadata.size("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
        "tie_embedding": "output.weight" not in metadata.tensors,
    }


def _lfm2_moe(metadata: Metadata) -> Fields:
    sparse = sparse_layers(metadata)
    dense = metadata.layers - len(sparse)
    if sparse != list(range(dense, metadata.layers)):
        raise metadata.unsupported("dense layers after a layer with experts")
    return {"num_dense_layers": dense, "norm_topk_prob": True, "routed_scaling_factor": 1.0}


QWEN3_NEXT = Architecture(
    "Qwen3NextForCausalLM",
    layer={**SECOND_POST_NORM, **NEXTN},
    parts=(
        {**ATTENTION, **QK_NORMS},
        _below("linear_attn", {**DELTA_NET, "in_proj_ba": "ssm_ba"}),
    ),
    experts={**experts(shared="shared_expert"), "mlp.shared_expert_gate": "ffn_gate_inp_shexp"},
    optional=NO_NEXTN,
    flags={"attention_bias": ATTENTION_BIAS},
    constants={"norm_topk_prob": True},
    read=all_of(_delta_net, counts("num_experts"), mlp_only_layers, _shared_expert),
    norm_offset=1.0,
    partial_rotary=True,
)
QWEN3_5 = replace(
    QWEN3_NEXT,
    name="Qwen3_5ForCausalLM",
    parts=(
        {**ATTENTION, **QK_NORMS},
        _below("linear_attn", {**DELTA_NET, "in_proj_b": "ssm_beta", "in_proj_a": "ssm_alpha"}),
    ),
    experts={},
    constants={},
    read=_delta_net,
    tiled_values=True,
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    name="Qwen3_5MoeForCausalLM",
    mlp={},
    experts=QWEN3_NEXT.experts,
    read=all_of(_delta_net, counts("num_experts"), _shared_expert),
)
MAMBA1 = Architecture(
    "MambaForCausalLM",
    layer={"norm": "attn_norm"},
    parts=(_below("mixer", MAMBA),),
    mlp={},
    flags=MAMBA_FLAGS,
    read=_mamba,
    attention_free=True,
)
FALCON_MAMBA = replace(MAMBA1, name="FalconMambaForCausalLM")
MAMBA_2 = replace(MAMBA1, name="Mamba2ForCausalLM", parts=(_below("mixer", MAMBA2),), read=_mamba2)
BAMBA = Architecture(
    "BambaForCausalLM",
    layer={"input_layernorm": "attn_norm", "pre_ff_layernorm": "ffn_norm"},
    parts=(ATTENTION, _below("mamba", MAMBA2)),
    flags={"attention_bias": ATTENTION_BIAS, "mamba_proj_bias": MAMBA_FLAGS["use_bias"]}
    | {"mamba_conv_bias": MAMBA_FLAGS["use_conv_bias"]},
    read=_bamba,
    interleaved=True,
    partial_rotary=True,
)
GRANITE_HYBRID = replace(
    BAMBA,
    name="GraniteMoeHybridForCausalLM",
    layer=PRE_NORMS,
    experts=experts("block_sparse_moe", "router.layer", shared="shared_mlp"),
    read=_granite_hybrid,
    partial_rotary=False,
)
FALCON_H1 = Architecture(
    "FalconH1ForCausalLM",
    layer={
        **ATTENTION,
        "input_layernorm": "attn_norm",
        "pre_ff_layernorm.weight": "ffn_norm",
        **_below("mamba", MAMBA2),
    },
    optional=("ssm_norm.weight",),
    flags={"mamba_rms_norm": ("ssm_norm.weight",), "mamba_conv_bias": MAMBA_FLAGS["use_conv_bias"]},
    read=_falcon_h1,
)
NEMOTRON_H = Architecture(
    "NemotronHForCausalLM",
    layer={"norm": "attn_norm", **NEXTN, "post_attention_layernorm": "post_attention_norm"},
    parts=(
        ATTENTION,
        _below("mixer", MAMBA2),
        {f"{module}.{name}": tensor for module in ("mlp", "mixer") for name, tensor in NEMOTRON_MLP.items()},
        _below("mixer", NEMOTRON_EXPERTS),
    ),
    mlp={},
    optional=(*NO_NEXTN, "post_attention_norm.weight", "ffn_latent_down.weight", "ffn_latent_up.weight"),
    flags={**MAMBA_FLAGS, "attention_bias": ATTENTION_BIAS, "mlp_bias": ("ffn_up.bias", "ffn_down.bias")},
    constants={"mlp_hidden_act": "relu2"},
    read=_nemotron_h,
    interleaved=True,
    rope_free=True,
)
JAMBA = Architecture(
    "JambaForCausalLM",
    layer={"input_layernorm": "attn_norm", "pre_ff_layernorm": "ffn_norm"},
    parts=(
        ATTENTION,
        _below("mamba", {**MAMBA, **{f"{part}_layernorm": f"ssm_{part}_norm" for part in ("dt", "b", "c")}}),
    ),
    mlp={**MLP, **FEED_FORWARD},
    experts=experts("feed_forward", "router"),
    flags={"mamba_proj_bias": MAMBA_FLAGS["use_bias"], "mamba_conv_bias": MAMBA_FLAGS["use_conv_bias"]},
    read=_jamba,
    rope_free=True,
)
KIMI_LINEAR = Architecture(
    "KimiLinearForCausalLM",
    layer=PRE_NORMS,
    parts=(_below("self_attn", KIMI_DELTA), {**KEY_VALUES, **LATENT}),
    mlp={module.replace("mlp", "block_sparse_moe"): tensor for module, tensor in MLP.items()},
    experts=experts(
        "block_sparse_moe", projections=("w1", "w3", "w2"), shared="shared_experts", bias=f"gate.{E_SCORE}"
    ),
    optional=tuple(f"{tensor}.weight" for tensor in LATENT_QUERIES),
    read=_kimi_linear,
    latent=True,
)
LFM2 = Architecture(
    "Lfm2ForCausalLM",
    model={**MODEL, "model.norm": "token_embd_norm"},
    layer={"operator_norm": "attn_norm", "ffn_norm": "ffn_norm"},
    parts=(
        {**ATTENTION, **QK_NORMS},
        _below("conv", {part: f"shortconv.{part}" for part in ("out_proj", "in_proj", "conv")}),
    ),
    flags={"conv_bias": tuple(f"shortconv.{part}.bias" for part in ("in_proj", "conv", "out_proj"))},
    read=_lfm2,
)
LFM2_MOE = replace(
    LFM2,
    name="Lfm2MoeForCausalLM",
    mlp=FEED_FORWARD,
    experts=experts("feed_forward", projections=("w1", "w3", "w2"), bias="expert_bias"),
    optional=("exp_probs_b.bias",),
    flags={**LFM2.flags, "use_expert_bias": ("exp_probs_b.bias",)},
    read=all_of(_lfm2, counts("num_experts"), _lfm2_moe),
)
ARCHITECTURES = {
    "qwen3next": QWEN3_NEXT,
    "qwen35": QWEN3_5,
    "qwen35moe": QWEN3_5_MOE,
    "mamba": MAMBA1,
    "mamba2": MAMBA_2,
    "granitehybrid": GRANITE_HYBRID,
    "falcon-h1": FALCON_H1,
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_moe": NEMOTRON_H,
    "jamba": JAMBA,
    "kimi-linear": KIMI_LINEAR,
    "lfm2": LFM2,
    "lfm2moe": LFM2_MOE,
}
"""Architectures by ``general.architecture``."""
