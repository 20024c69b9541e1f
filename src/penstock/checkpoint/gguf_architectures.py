"""Architectures of GGUF files as llama.cpp's converter writes them: tensor names and ``config.json`` fields of each.

Sources in https://github.com/ggml-org/llama.cpp: ``gguf-py/gguf/constants.py`` (tensor names), ``conversion/`` (changes
to tensors), ``src/models/`` (values that files leave out).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .gguf_metadata import Metadata

Fields = dict[str, Any]
LAYER = re.compile(r"(?:model\.layers|encoder\.layer|layers)\.(\d+)\.(.+)")
EXPERT = re.compile(r"((?:.+\.)?experts)\.(\d+)\.([^.]+\.[^.]+)")
"""Name of one expert's tensor, relative to its layer."""


# --- Tensor names: module → tensor below ``blk.N.`` ------------------------------------------------------------------

MODEL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
"""Modules outside of layers."""
BERT_MODEL = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
}
MODERN_BERT_MODEL = {
    "embeddings.tok_embeddings": "token_embd",
    "embeddings.norm": "token_embd_norm",
    "final_norm": "output_norm",
}
MODERN_BERT_LAYER = {
    "attn_norm": "attn_norm",
    "attn.q_proj": "attn_q",
    "attn.k_proj": "attn_k",
    "attn.v_proj": "attn_v",
    "attn.o_proj": "attn_output",
    "mlp_norm": "ffn_norm",
}
BERT_LAYER = {
    "attention.q_proj": "attn_q",
    "attention.k_proj": "attn_k",
    "attention.v_proj": "attn_v",
    "attention.o_proj": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
ATTENTION = {
    "self_attn.o_proj": "attn_output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
}
QK_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
PRE_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
SECOND_POST_NORM = {"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm"}
"""Norms before attention and before the MLP. Files name the norm before the MLP ``post_attention_norm``."""
POST_NORMS = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
GEMMA_NORMS = {"input_layernorm": "attn_norm", "pre_feedforward_layernorm": "ffn_norm", **POST_NORMS}
GLM4_NORMS = {
    **PRE_NORMS,
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
LATENT = {
    "self_attn.q_proj": "attn_q",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.o_proj": "attn_output",
}
LATENT_QUERIES = ("attn_q", "attn_q_a", "attn_q_a_norm", "attn_q_b")
"""Tensors of latent attention of which a layer has the first, or all others."""
MLP = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
FEED_FORWARD = {module.replace("mlp", "feed_forward"): tensor for module, tensor in MLP.items()}
NEXTN = {
    "eh_proj": "nextn.eh_proj",
    "embed_tokens": "nextn.embed_tokens",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "shared_head.head": "nextn.shared_head_head",
    "shared_head.norm": "nextn.shared_head_norm",
}
"""Additional modules of a layer for multi-token prediction."""
KEYS_B, VALUES_B = "attn_k_b", "attn_v_b"
"""Tensors that ``kv_b_proj`` may be split into: keys ``[heads, latent, nope]``, values ``[heads, value, latent]``."""
FUSED = {
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
    "ffn_up": ("ffn_gate",),
    "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps"),
    KEYS_B: ("attn_kv_b",),
    VALUES_B: ("attn_kv_b",),
}
"""Fused tensor that a file may have → the separate tensors with the same rows."""
ROUTER_BIAS = "exp_probs_b.bias"


def experts(
    module: str = "mlp",
    router: str = "gate",
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    shared: str = "",
    bias: str = "",
) -> dict[str, str]:
    """Tensor names of a layer's router, experts and shared expert.

    Args:
        bias: module of the vector that is added to the router's scores.
    """
    names = {f"{module}.{router}": "ffn_gate_inp"}
    parts = ("gate", "up", "down")
    names |= {f"{module}.experts.{name}": f"ffn_{part}_exps" for name, part in zip(projections, parts, strict=True)}
    if shared:
        names |= {f"{module}.{shared}.{part}_proj": f"ffn_{part}_shexp" for part in parts}
    if bias:
        names[f"{module}.{bias}"] = ROUTER_BIAS
    return names


QKV_BIAS = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
ATTENTION_BIAS = (*QKV_BIAS, "attn_output.bias")
MLP_BIAS = ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")
SHARED = ("ffn_gate_shexp.weight", "ffn_up_shexp.weight", "ffn_down_shexp.weight")
E_SCORE = "e_score_correction_bias"


@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF files."""

    name: str
    """Architecture in ``config.json``."""
    model: Mapping[str, str] = field(default_factory=lambda: MODEL)
    """Tensors outside of layers, by module."""
    layer: Mapping[str, str] = field(default_factory=lambda: {**ATTENTION, **PRE_NORMS})
    """Tensors of a layer's attention and norms, by module. ``.weight`` and ``.bias`` are appended to tensors without
    them."""
    mlp: Mapping[str, str] = field(default_factory=lambda: MLP)
    """Tensors of the MLP in layers without experts, by module."""
    experts: Mapping[str, str] = field(default_factory=dict)
    """Tensors of layers with experts, by module."""
    optional: tuple[str, ...] = ()
    """Tensors, of a layer or outside of layers, that a file may omit."""
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Flag of ``config.json`` → optional tensors of a layer that set it to true. The tensors of flag "" are optional
    and set no flag."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``config.json`` with the same value for every file."""
    read: Callable[[Metadata], Fields] = lambda metadata: {}
    """Reads further fields of ``config.json``."""
    rope: Callable[[Metadata], Fields] = lambda metadata: {}
    """Reads further fields of ``rope_parameters``."""
    interleaved: bool = False
    """Rows of query and key matrices alternate between both halves of a head (GPT-J layout)."""
    norm_offset: float = 0.0
    """Value that the converter adds to the weights of all norms (Gemma)."""
    layer_norm: bool = False
    """Norms are layer norms; else RMS norms."""
    windows: int | None = None
    """Sliding window: N: every N-th layer has full attention unless the file has a pattern; 0: the same in all layers;
    None: full attention, even if the file has a window."""
    default_window: int = 0
    """Window of files without one; 0: full attention."""
    partial_rotary: bool = False
    """Files may rotate only a part of each head."""
    local_rope: bool = False
    """Layers with a window have separate rotary parameters."""
    latent: bool = False
    """Multi-head latent attention (DeepSeek)."""
    parts: tuple[Mapping[str, str], ...] = ()
    """Parts that not all layers have (attention, recurrent state, an MLP): tensors, by module. A layer with the first
    tensor of a part has all of them; each layer has at least one part."""
    tiled_values: bool = False
    """Value heads of gated delta nets are ordered by their index in the group of a key head, then by key head."""
    rope_free: bool = False
    """No layer has rotary embedding; its parameters in the file are ignored."""
    attention_free: bool = False
    """No layer has attention."""
    varied_layers: bool = False
    """Layers may have different numbers of KV heads, and MLPs of different sizes."""
    encoder: bool = False
    """Bidirectional attention, without a language model head."""

    def stored_name(self, name: str) -> tuple[str, int | None]:
        """The name of the tensor with a weight, and the expert's index in that tensor (None: not a tensor of experts).

        Args:
            name: name in a Hugging Face checkpoint, e.g. ``model.layers.0.mlp.experts.3.up_proj.weight``. Other
                numbered modules are also stored in one tensor.
        """
        if not (match := LAYER.fullmatch(name)):
            module, _, kind = name.rpartition(".")
            several, _, number = module.rpartition(".")
            if several in self.model and number.isdecimal():
                return f"{self.model[several]}.{kind}", int(number)
            return f"{self.model.get(module, module)}.{kind}", None
        prefix, rest, expert = f"blk.{match[1]}.", match[2], None
        if found := EXPERT.fullmatch(rest):
            rest, expert = f"{found[1]}.{found[3]}", int(found[2])
        names = {
            name: tensor for part in (self.mlp, self.experts, self.layer, *self.parts) for name, tensor in part.items()
        }
        if rest in names:
            return f"{prefix}{names[rest]}", expert
        module, _, kind = rest.rpartition(".")
        return f"{prefix}{names.get(module, module)}.{kind}", expert


# --- Fields of config.json --------------------------------------------------------------------------------------------


def all_of(*readers: Callable[[Metadata], Fields]) -> Callable[[Metadata], Fields]:
    return lambda metadata: {name: value for read in readers for name, value in read(metadata).items()}


def expert_size(metadata: Metadata) -> int:
    return metadata.last_dimension("ffn_down_exps.weight", metadata.size("feed_forward_length", 1))


def counts(number: str) -> Callable[[Metadata], Fields]:
    """Reads the number of experts, the number per token, and the intermediate size of an expert.

    Args:
        number: field of ``config.json`` for the number of experts.
    """

    def read(metadata: Metadata) -> Fields:
        return {
            number: metadata.size("expert_count"),
            "num_experts_per_tok": metadata.size("expert_used_count"),
            "moe_intermediate_size": expert_size(metadata),
        }

    return read


def _local_experts(metadata: Metadata) -> Fields:
    """Experts of families whose ``intermediate_size`` is the size of an expert."""
    fields = counts("num_local_experts")(metadata)
    return {**fields, "intermediate_size": fields.pop("moe_intermediate_size")}


def sparse_layers(metadata: Metadata) -> list[int]:
    return [layer for layer in range(metadata.layers) if f"blk.{layer}.ffn_gate_inp.weight" in metadata.tensors]


def mlp_only_layers(metadata: Metadata) -> Fields:
    dense = sorted(set(range(metadata.layers)).difference(sparse_layers(metadata)))
    return {"mlp_only_layers": dense, "decoder_sparse_step": 1}


def _deepseek_experts(metadata: Metadata) -> Fields:
    """Experts under DeepSeek's field names."""
    if not metadata.size("expert_count", 0):
        return {"n_routed_experts": None, "n_shared_experts": None}
    sparse = sparse_layers(metadata)
    if sparse != list(range(sparse[0] if sparse else metadata.layers, metadata.layers)):
        raise metadata.unsupported("dense layers after a layer with experts")
    size, shared = expert_size(metadata), metadata.last_dimension("ffn_down_shexp.weight")
    return {
        **counts("n_routed_experts")(metadata),
        "n_shared_experts": shared // size or None,
        "first_k_dense_replace": metadata.layers - len(sparse),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": metadata.flag("expert_weights_norm", False),
        "n_group": metadata.size("expert_group_count", 1),
        "topk_group": metadata.size("expert_group_used_count", 1),
    }


def _query_scale(layers_of_27b: int) -> Callable[[Metadata], Fields]:
    """Reads the attention scale of Gemma, which files leave out.

    Args:
        layers_of_27b: number of layers of the 27B model, which has a different scale.
    """

    def read(metadata: Metadata) -> Fields:
        whole = metadata.size("embedding_length") // metadata.size("attention.head_count")
        return {"query_pre_attn_scalar": whole if metadata.layers == layers_of_27b else metadata.head_dim}

    return read


def _softcaps(metadata: Metadata) -> Fields:
    return {
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 0.0) or None,
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 0.0) or None,
    }


def granite(metadata: Metadata) -> Fields:
    keys = {
        "embedding_multiplier": "embedding_scale",
        "attention_multiplier": "attention.scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    defaults = {"attention_multiplier": metadata.head_dim**-0.5}
    return {name: metadata.number(key, 0.0) or defaults.get(name, 1.0) for name, key in keys.items()}


def _cohere(metadata: Metadata) -> Fields:
    return {"logit_scale": metadata.number("logit_scale", 1.0)}


def latent(metadata: Metadata) -> Fields:
    rotary, kv_rank = metadata.size("rope.dimension_count"), metadata.size("attention.kv_lora_rank")
    key = metadata.size("attention.key_length_mla", metadata.size("attention.key_length"))
    return {
        "q_lora_rank": metadata.size("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": kv_rank,
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": key - rotary,
        "v_head_dim": metadata.size("attention.value_length_mla", metadata.size("attention.value_length")),
        "num_key_value_heads": metadata.size("attention.head_count"),
        "head_dim": None,
    }


def _deepseek_v2(metadata: Metadata) -> Fields:
    fields = _deepseek_experts(metadata)
    if fields.get("norm_topk_prob"):
        raise metadata.unsupported("normalized expert weights (expert_weights_norm)")
    return {**fields, "topk_method": "group_limited_greedy" if (fields.get("n_group") or 1) > 1 else "greedy"}


def _deepseek_rope(metadata: Metadata) -> Fields:
    scale = metadata.number("rope.scaling.yarn_log_multiplier", 0.0) * 10  # the converter divides by 10
    return dict.fromkeys(("mscale", "mscale_all_dim"), float(f"{scale:.6g}")) if scale else {}


def _mistral3_rope(metadata: Metadata) -> Fields:
    fields: Fields = {}
    if scale := metadata.number("rope.scaling.yarn_log_multiplier", 0.0):
        fields |= {"mscale": 1.0, "mscale_all_dim": scale}
    if beta := metadata.number("attention.temperature_scale", 0.0):
        fields["llama_4_scaling_beta"] = beta
    return fields


def _hunyuan_moe(metadata: Metadata) -> Fields:
    size = expert_size(metadata)
    return {
        "num_experts": metadata.size("expert_count"),
        "moe_topk": metadata.size("expert_used_count"),
        "num_shared_expert": metadata.last_dimension("ffn_down_shexp.weight") // size,
        "intermediate_size": size,
        "moe_intermediate_size": None,
    }


def _ernie_moe(metadata: Metadata) -> Fields:
    sparse, size = sparse_layers(metadata), expert_size(metadata)
    return {
        "moe_num_experts": metadata.size("expert_count"),
        "moe_k": metadata.size("expert_used_count"),
        "moe_intermediate_size": size,
        "moe_num_shared_experts": metadata.last_dimension("ffn_down_shexp.weight") // size,
        "moe_layer_start_index": min(sparse, default=0),
        "moe_layer_end_index": max(sparse, default=0),
        "moe_layer_interval": metadata.size("interleave_moe_layer_step", 1),
    }


def _llama4(metadata: Metadata) -> Fields:
    """Fields of Llama 4. Values that files leave out are those of Llama 4 Scout and Maverick."""
    experts = metadata.size("expert_count")
    if metadata.size("expert_used_count") != 1:
        raise metadata.unsupported(f"{metadata.size('expert_used_count')} experts per token (only 1 is supported)")
    full = range(3, metadata.layers, 4)
    return {
        "num_local_experts": experts,
        "num_experts_per_tok": 1,
        "intermediate_size": expert_size(metadata),
        "intermediate_size_mlp": metadata.size("feed_forward_length"),
        "moe_layers": sparse_layers(metadata),
        "layer_types": ["full_attention" if layer in full else "chunked_attention" for layer in range(metadata.layers)],
        "no_rope_layers": [int(layer not in full) for layer in range(metadata.layers)],
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "use_qk_norm": experts != 128,
    }


def _modern_bert(metadata: Metadata) -> Fields:
    windowed = metadata.flags("attention.sliding_window_pattern")
    if windowed is None:
        every = metadata.size("attention.sliding_window_pattern", 3)
        windowed = [layer % every != 0 for layer in range(metadata.layers)]
    return {
        "local_attention": metadata.size("attention.sliding_window"),
        "layer_types": ["sliding_attention" if each else "full_attention" for each in windowed[: metadata.layers]],
        "hidden_activation": metadata.text("hidden_activation", "gelu"),
        "classifier_activation": "gelu",
    }


# --- Architectures ----------------------------------------------------------------------------------------------------

LLAMA = Architecture(
    "LlamaForCausalLM", interleaved=True, windows=0, flags={"attention_bias": ATTENTION_BIAS, "mlp_bias": MLP_BIAS}
)
MISTRAL = replace(LLAMA, name="MistralForCausalLM")
MIXTRAL = Architecture(
    "MixtralForCausalLM",
    experts=experts("block_sparse_moe", projections=("w1", "w3", "w2")),
    read=_local_experts,
    interleaved=True,
    windows=0,
)
GEMMA = Architecture(
    "GemmaForCausalLM",
    flags={"attention_bias": ATTENTION_BIAS},
    constants={"hidden_act": "gelu_pytorch_tanh"},
    norm_offset=1.0,
)
GEMMA2 = replace(
    GEMMA,
    name="Gemma2ForCausalLM",
    layer={**ATTENTION, **GEMMA_NORMS},
    constants={"hidden_activation": "gelu_pytorch_tanh"},
    read=all_of(_query_scale(46), _softcaps),
    windows=2,
    default_window=4096,
)
GEMMA3 = replace(
    GEMMA2,
    name="Gemma3ForCausalLM",
    layer={**ATTENTION, **QK_NORMS, **GEMMA_NORMS},
    read=all_of(_query_scale(62), _softcaps),
    windows=6,
    default_window=0,
    local_rope=True,
)
QWEN2 = Architecture("Qwen2ForCausalLM", flags={"qkv_bias": QKV_BIAS}, windows=0)
QWEN3 = Architecture(
    "Qwen3ForCausalLM",
    layer={**ATTENTION, **QK_NORMS, **PRE_NORMS},
    flags={"attention_bias": ATTENTION_BIAS},
    windows=0,
)
QWEN2_MOE = replace(
    QWEN2,
    name="Qwen2MoeForCausalLM",
    experts={**experts(shared="shared_expert"), "mlp.shared_expert_gate": "ffn_gate_inp_shexp"},
    constants={"norm_topk_prob": False},
    read=all_of(
        counts("num_experts"),
        mlp_only_layers,
        lambda metadata: {"shared_expert_intermediate_size": metadata.last_dimension("ffn_down_shexp.weight")},
    ),
    windows=None,
)
QWEN3_MOE = replace(
    QWEN3,
    name="Qwen3MoeForCausalLM",
    experts=experts(),
    constants={"norm_topk_prob": True},
    read=all_of(counts("num_experts"), mlp_only_layers),
    windows=None,
)
OLMO2 = Architecture(
    "Olmo2ForCausalLM", layer={**ATTENTION, **QK_NORMS, **POST_NORMS}, flags={"attention_bias": ATTENTION_BIAS}
)
OLMO3 = replace(OLMO2, name="Olmo3ForCausalLM", windows=4, local_rope=True)
OLMOE = Architecture(
    "OlmoeForCausalLM",
    layer={**ATTENTION, **QK_NORMS, **PRE_NORMS},
    experts=experts(),
    flags={"attention_bias": ATTENTION_BIAS},
    constants={"norm_topk_prob": False},
    read=lambda metadata: {
        "num_experts": metadata.size("expert_count"),
        "num_experts_per_tok": metadata.size("expert_used_count"),
        "intermediate_size": expert_size(metadata),
    },
)
GRANITE = replace(LLAMA, name="GraniteForCausalLM", read=granite, windows=None)
GRANITE_MOE = replace(
    GRANITE,
    name="GraniteMoeForCausalLM",
    experts=experts("block_sparse_moe", "router.layer"),
    flags={"attention_bias": ATTENTION_BIAS},
    read=all_of(granite, _local_experts),
)
COMMAND_R = Architecture(
    "CohereForCausalLM",
    layer={**ATTENTION, **QK_NORMS, "input_layernorm": "attn_norm"},
    optional=("attn_q_norm.weight", "attn_k_norm.weight"),
    flags={"attention_bias": ATTENTION_BIAS, "use_qk_norm": ("attn_q_norm.weight", "attn_k_norm.weight")},
    read=_cohere,
    layer_norm=True,
)
COHERE2 = Architecture(
    "Cohere2ForCausalLM",
    layer={**ATTENTION, "input_layernorm": "attn_norm"},
    flags={"attention_bias": ATTENTION_BIAS},
    read=_cohere,
    layer_norm=True,
    windows=4,
)
PHI3 = Architecture("Phi3ForCausalLM", windows=0, partial_rotary=True)
GPT_OSS = Architecture(
    "GptOssForCausalLM",
    layer={**ATTENTION, **SECOND_POST_NORM, "self_attn.sinks": "attn_sinks.weight"},
    experts=experts(router="router"),
    flags={
        "attention_bias": ATTENTION_BIAS,
        "": ("ffn_gate_inp.bias", "ffn_gate_exps.bias", "ffn_up_exps.bias", "ffn_down_exps.bias"),
    },
    read=_local_experts,
    rope=lambda metadata: {"truncate": False},
    windows=2,
)
STARCODER2 = Architecture(
    "Starcoder2ForCausalLM",
    mlp={"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
    flags={
        "use_bias": (*ATTENTION_BIAS, "ffn_up.bias", "ffn_down.bias"),
        "": ("attn_norm.bias", "ffn_norm.bias"),
    },
    constants={"hidden_act": "gelu_pytorch_tanh"},
    layer_norm=True,
)
CHATGLM = Architecture("GlmForCausalLM", flags={"attention_bias": QKV_BIAS}, partial_rotary=True)
GLM4 = replace(CHATGLM, name="Glm4ForCausalLM", layer={**ATTENTION, **GLM4_NORMS})
GLM4_MOE = Architecture(
    "Glm4MoeForCausalLM",
    layer={**ATTENTION, **QK_NORMS, **SECOND_POST_NORM, **NEXTN},
    experts=experts(shared="shared_experts", bias=f"gate.{E_SCORE}"),
    optional=(*SHARED, "attn_q_norm.weight", "attn_k_norm.weight", *(f"{name}.weight" for name in NEXTN.values())),
    flags={"attention_bias": QKV_BIAS, "use_qk_norm": ("attn_q_norm.weight", "attn_k_norm.weight")},
    read=_deepseek_experts,
    partial_rotary=True,
)
DOTS1 = Architecture(
    "Dots1ForCausalLM",
    layer={**ATTENTION, **QK_NORMS, **PRE_NORMS},
    experts=experts(shared="shared_experts", bias=f"gate.{E_SCORE}"),
    optional=SHARED,
    flags={"attention_bias": ATTENTION_BIAS},
    read=_deepseek_experts,
)
DEEPSEEK_V2 = Architecture(
    "DeepseekV2ForCausalLM",
    layer={**LATENT, **PRE_NORMS, **NEXTN},
    experts=experts(shared="shared_experts"),
    optional=(
        *(f"{tensor}.weight" for tensor in LATENT_QUERIES),
        *SHARED,
        *(f"{name}.weight" for name in NEXTN.values()),
    ),
    read=all_of(latent, _deepseek_v2),
    rope=_deepseek_rope,
    latent=True,
)
DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    name="DeepseekV3ForCausalLM",
    experts=experts(shared="shared_experts", bias=f"gate.{E_SCORE}"),
    constants={"rope_interleave": True},
    read=all_of(latent, _deepseek_experts),
)
SMOLLM3 = replace(
    LLAMA,
    name="SmolLM3ForCausalLM",
    constants={"no_rope_layer_interval": 4, "no_rope_layers": None},
    windows=None,
)
SEED_OSS = Architecture(
    "SeedOssForCausalLM",
    layer={**ATTENTION, **SECOND_POST_NORM},
    flags={"attention_bias": QKV_BIAS, "attention_out_bias": ("attn_output.bias",), "mlp_bias": MLP_BIAS},
)
EXAONE4 = Architecture("Exaone4ForCausalLM", layer={**ATTENTION, **QK_NORMS, **POST_NORMS}, windows=4)
ERNIE4_5 = Architecture("Ernie4_5ForCausalLM", flags={"use_bias": (*ATTENTION_BIAS, *MLP_BIAS)})
ERNIE4_5_MOE = Architecture(
    "Ernie4_5_MoeForCausalLM",
    experts=experts(shared="shared_experts", bias=f"moe_statics.{E_SCORE}"),
    optional=SHARED,
    read=_ernie_moe,
)
HUNYUAN = Architecture(
    "HunYuanDenseV1ForCausalLM",
    layer={**ATTENTION, **QK_NORMS, **PRE_NORMS},
    flags={"attention_bias": ATTENTION_BIAS},
)
HUNYUAN_MOE = replace(
    HUNYUAN,
    name="HunYuanMoEV1ForCausalLM",
    experts=experts(router="gate.wg", shared="shared_mlp"),
    read=_hunyuan_moe,
)
MINIMAX_M2 = Architecture(
    "MiniMaxM2ForCausalLM",
    layer={**ATTENTION, **QK_NORMS, **PRE_NORMS},
    experts=experts("block_sparse_moe", projections=("w1", "w3", "w2"), bias=E_SCORE),
    read=_local_experts,
    partial_rotary=True,
)
MISTRAL3 = replace(LLAMA, name="Ministral3ForCausalLM", rope=_mistral3_rope)
LLAMA4 = Architecture(
    "Llama4ForCausalLM",
    mlp=FEED_FORWARD,
    experts=experts("feed_forward", "router", shared="shared_expert"),
    flags={"attention_bias": ATTENTION_BIAS},
    read=_llama4,
)
INTERNLM2 = replace(LLAMA, windows=None)
BERT = Architecture(
    "BertModel",
    model=BERT_MODEL,
    layer=BERT_LAYER,
    mlp={},
    flags={"": tuple(f"{tensor}.bias" for tensor in BERT_LAYER.values())},
    constants={"hidden_act": "gelu"},
    read=lambda metadata: {
        "type_vocab_size": metadata.rows("token_types.weight"),
        "max_position_embeddings": metadata.rows("position_embd.weight"),
    },
    layer_norm=True,
    encoder=True,
)
MODERN_BERT = Architecture(
    "ModernBertModel",
    model=MODERN_BERT_MODEL,
    layer=MODERN_BERT_LAYER,
    optional=("attn_norm.weight",),
    flags={
        "attention_bias": ATTENTION_BIAS,
        "mlp_bias": MLP_BIAS,
        "norm_bias": ("attn_norm.bias", "ffn_norm.bias"),
    },
    read=_modern_bert,
    layer_norm=True,
    local_rope=True,
    encoder=True,
)

ARCHITECTURES = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen2moe": QWEN2_MOE,
    "qwen3moe": QWEN3_MOE,
    "qwen2vl": QWEN2,
    "qwen3vl": QWEN3,
    "qwen3vlmoe": QWEN3_MOE,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "phi3": PHI3,
    "mistral3": MISTRAL3,
    "deepseek2": DEEPSEEK_V2,
    "gpt-oss": GPT_OSS,
    "olmo2": OLMO2,
    "olmoe": OLMOE,
    "granite": GRANITE,
    "granitemoe": GRANITE_MOE,
    "command-r": COMMAND_R,
    "cohere2": COHERE2,
    "starcoder2": STARCODER2,
    "chatglm": CHATGLM,
    "glm4": GLM4,
    "glm4moe": GLM4_MOE,
    "dots1": DOTS1,
    "smollm3": SMOLLM3,
    "seed_oss": SEED_OSS,
    "exaone4": EXAONE4,
    "ernie4_5": ERNIE4_5,
    "ernie4_5-moe": ERNIE4_5_MOE,
    "hunyuan-dense": HUNYUAN,
    "hunyuan-moe": HUNYUAN_MOE,
    "minimax-m2": MINIMAX_M2,
    "llama4": LLAMA4,
    "internlm2": INTERNLM2,
    "bert": BERT,
    "modern-bert": MODERN_BERT,
}
"""Architectures by ``general.architecture``. Vision-language models (``qwen2vl``, ...) are read as their language
model: the vision encoder is in another file, and M-RoPE gives text the positions of plain RoPE."""
