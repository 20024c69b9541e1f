"""GGUF architectures of Gemma 3n and Gemma 4, whose layers may have MLPs and heads of different sizes.

Sources: see ``gguf_architectures``.
"""

from __future__ import annotations

from statistics import NormalDist

from .gguf_architectures import (
    ATTENTION,
    ATTENTION_BIAS,
    GEMMA_NORMS,
    MLP,
    MODEL,
    QK_NORMS,
    Architecture,
    Fields,
    all_of,
)
from .gguf_metadata import Metadata

LAYER_INPUTS = {
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
LAYER_INPUT = {
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
KEYS_VALUES = ("attn_k.weight", "attn_k_norm.weight", "attn_v.weight")
"""Tensors that layers with keys and values of other layers, or with values equal to keys, lack."""
ALTUP = {
    "altup.correct_output_scale": "altup_correct_scale.weight",
    "altup.correction_coefs": "altup_correct_coef",
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm",
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
}
EXPERTS = {
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    **{f"experts.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
}


def _shared(metadata: Metadata) -> Fields:
    """Fields of both models."""
    return {
        "hidden_size_per_layer_input": metadata.size("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": metadata.rows("per_layer_token_embd.weight"),
        "num_kv_shared_layers": metadata.size("attention.shared_kv_layers", 0),
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 0.0) or None,
    }


def _gemma3n(metadata: Metadata) -> Fields:
    """Files state the cutoff of sparse activations in standard deviations, minus infinity for dense ones."""
    cutoffs = metadata.numbers("activation_sparsity_scale")
    return {
        "intermediate_size": metadata.sizes("feed_forward_length"),
        "activation_sparsity_pattern": [round(NormalDist().cdf(each), 6) for each in cutoffs],
        "altup_num_inputs": metadata.size("altup.num_inputs"),
        "altup_active_idx": metadata.size("altup.active_idx", 0),
        "altup_correct_scale": True,
        "laurel_rank": metadata.last_dimension("laurel_r.weight"),
    }


def _gemma4(metadata: Metadata) -> Fields:
    sizes, kv_heads = metadata.sizes("feed_forward_length"), metadata.sizes("attention.head_count_kv")
    windowed = metadata.flags("attention.sliding_window_pattern") or [False]
    full = [layer for layer in range(metadata.layers) if not windowed[layer]]
    shared_values = any(
        f"blk.{layer}.attn_k.weight" in metadata.tensors and f"blk.{layer}.attn_v.weight" not in metadata.tensors
        for layer in full
    )
    fields: Fields = {
        "head_dim": metadata.size("attention.key_length_swa"),
        "global_head_dim": metadata.head_dim,
        "num_key_value_heads": next((kv_heads[i] for i in range(metadata.layers) if windowed[i]), kv_heads[0]),
        "num_global_key_value_heads": kv_heads[full[0]] if full else None,
        "attention_k_eq_v": shared_values,
        "intermediate_size": sizes[0],
        "use_double_wide_mlp": sizes[-1] > sizes[0],
        "enable_moe_block": bool(metadata.size("expert_count", 0)),
    }
    if fields["enable_moe_block"]:
        fields["num_experts"] = metadata.size("expert_count")
        fields["top_k_experts"] = metadata.size("expert_used_count")
        fields["moe_intermediate_size"] = metadata.size("expert_feed_forward_length")
    return fields


GEMMA3N = Architecture(
    "Gemma3nForCausalLM",
    model={
        **MODEL,
        **LAYER_INPUTS,
        "model.altup_projections": "altup_proj",
        "model.altup_unembed_projections": "altup_unembd_proj",
    },
    layer={**ATTENTION, **QK_NORMS, **GEMMA_NORMS, **LAYER_INPUT, **ALTUP},
    optional=KEYS_VALUES,
    flags={"attention_bias": ATTENTION_BIAS},
    read=all_of(_shared, _gemma3n),
    windows=5,
    local_rope=True,
    varied_layers=True,
)
GEMMA4 = Architecture(
    "Gemma4ForCausalLM",
    model={**MODEL, **LAYER_INPUTS},
    layer={
        **ATTENTION,
        **QK_NORMS,
        **GEMMA_NORMS,
        **LAYER_INPUT,
        "layer_scalar": "layer_output_scale.weight",
    },
    experts={**MLP, **EXPERTS},
    optional=(
        *KEYS_VALUES,
        *(f"{tensor}.weight" for tensor in (*LAYER_INPUT.values(), *LAYER_INPUTS.values())),
    ),
    flags={"attention_bias": ATTENTION_BIAS},
    read=all_of(_shared, _gemma4),
    windows=6,
    local_rope=True,
    varied_layers=True,
)
ARCHITECTURES = {"gemma3n": GEMMA3N, "gemma4": GEMMA4}
"""Architectures by ``general.architecture``."""
