"""Bounds of the fields of ``config.json``, for all families. No model has values outside of the bounds; such values
would cause tracebacks, exhaust the memory, or produce noise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Bound(NamedTuple):
    """Range of a number. ``null`` counts as an absent field."""

    least: float
    most: float
    whole: bool = True
    """True for integers."""
    many: bool = False
    """True if a list of numbers in this range is also allowed."""

    def allows(self, value: Any) -> bool:
        if isinstance(value, list) and self.many:
            return all(each is None or self._replace(many=False).allows(each) for each in value)
        kinds = (int,) if self.whole else (int, float)
        return type(value) in kinds and self.least <= value <= self.most  # NaN fails both comparisons

    def __str__(self) -> str:
        if self.whole:
            return f"a whole number from {self.least} to {self.most}"
        return f"a number from {self.least:g} to {self.most:g}"


class Flag:
    """A boolean, which some files write as 0 or 1."""

    def allows(self, value: Any) -> bool:
        return value in (0, 1) and isinstance(value, int)

    def __str__(self) -> str:
        return "true or false"


class Text(NamedTuple):
    """A non-empty string."""

    many: bool = False
    """True for a list of strings."""

    def allows(self, value: Any) -> bool:
        if self.many:
            return isinstance(value, list) and all(isinstance(each, str) for each in value)
        return isinstance(value, str) and value != ""

    def __str__(self) -> str:
        return "a list of strings" if self.many else "a non-empty string"


MAX_LAYERS, MAX_SIZE, MAX_HEADS, MAX_HEAD_DIM, MAX_EXPERTS = 2048, 2**18, 2**14, 2**12, 2**14
MAX_POSITIONS = 2**27
MAX_TOKENS = 2**24
"""Maximum size of a vocabulary."""
SIZE, HEADS, HEAD_DIM = Bound(1, MAX_SIZE), Bound(1, MAX_HEADS), Bound(0, MAX_HEAD_DIM)
INTERMEDIATE = Bound(0, 2**22, many=True)
LAYERS, LAYER_NUMBER = Bound(1, MAX_LAYERS), Bound(0, MAX_LAYERS)
EXPERTS = Bound(0, MAX_EXPERTS, many=True)
EPS = Bound(1e-30, 1.0, whole=False)
BASE = Bound(1e-3, 1e18, whole=False)
FACTOR = Bound(1e-6, 1e6, whole=False)
SCALE = Bound(-1e6, 1e6, whole=False)
POSITIONS, WINDOW = Bound(1, MAX_POSITIONS), Bound(-1, MAX_POSITIONS)
PIXELS = Bound(1, 2**16, many=True)
TOKEN = Bound(-1, MAX_TOKENS)

BOUNDS: dict[str, Bound | Flag | Text] = {
    **dict.fromkeys(("hidden_size", "out_hidden_size", "embed_dim", "d_model", "n_embed"), SIZE),
    **dict.fromkeys(("intermediate_size", "shared_expert_intermediate_size", "ffn_hidden_size"), INTERMEDIATE),
    "moe_intermediate_size": INTERMEDIATE,
    **dict.fromkeys(("vocab_size", "draft_vocab_size", "truncated_vocab_size"), Bound(1, MAX_TOKENS)),
    "type_vocab_size": Bound(0, 2**16),
    **dict.fromkeys(("num_hidden_layers", "depth", "encoder_layers", "decoder_layers", "n_layer", "n_layers"), LAYERS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), INTERMEDIATE),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), Bound(1, 2**16)),
    "num_mel_bins": Bound(1, 1024),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_heads", "num_kv_heads"), HEADS),
    **dict.fromkeys(("n_head", "n_heads"), HEADS),
    "head_dim": HEAD_DIM,
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rotary_dim"), HEAD_DIM),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), Bound(0, MAX_SIZE)),
    **dict.fromkeys(("num_nextn_predict_layers", "first_k_dense_replace", "max_window_layers"), LAYER_NUMBER),
    **dict.fromkeys(("moe_layer_interval", "decoder_sparse_step"), LAYERS),
    "moe_layer_freq": Bound(0, MAX_LAYERS, many=True),
    "moe_layer_start_index": Bound(-1, MAX_LAYERS, many=True),
    "moe_layer_end_index": Bound(-1, MAX_LAYERS, many=True),
    **dict.fromkeys(
        ("mlp_only_layers", "fullatt_block_indexes", "deepstack_visual_indexes"), LAYER_NUMBER._replace(many=True)
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "n_group", "topk_group"), EXPERTS),
    **dict.fromkeys(("n_shared_experts", "moe_num_shared_experts"), EXPERTS),
    **dict.fromkeys(
        ("max_position_embeddings", "original_max_position_embeddings", "num_position_embeddings"), POSITIONS
    ),
    **dict.fromkeys(("max_seq_len", "seq_length"), POSITIONS),
    "sliding_window": WINDOW._replace(many=True),
    "local_attention": WINDOW,
    "num_labels": Bound(0, 2**20),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon"), EPS),
    "rope_theta": BASE._replace(many=True),
    "rope_local_base_freq": BASE,
    **dict.fromkeys(("factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"), FACTOR),
    **dict.fromkeys(("attention_factor", "query_pre_attn_scalar", "alibi_bias_max", "softmax_scale"), FACTOR),
    **dict.fromkeys(("mscale", "mscale_all_dim", "routed_scaling_factor", "logit_scale", "moe_norm_min"), SCALE),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"), SCALE),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), Bound(0, 1e6, whole=False)),
    "partial_rotary_factor": Bound(1e-3, 1.0, whole=False),
    **dict.fromkeys(("long_factor", "short_factor", "frequency_factors"), FACTOR._replace(many=True)),
    "mrope_section": Bound(0, MAX_HEAD_DIM, many=True),
    **dict.fromkeys(("patch_size", "temporal_patch_size", "spatial_merge_size", "image_size"), PIXELS),
    **dict.fromkeys(("window_size", "mm_tokens_per_image"), PIXELS),
    **dict.fromkeys(("tokens_per_second", "mlp_ratio"), Bound(1e-3, 1e4, whole=False)),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), TOKEN._replace(many=True)),
    **dict.fromkeys(("image_token_id", "image_token_index", "video_token_id"), TOKEN),
    **dict.fromkeys(
        ("attention_bias", "attention_out_bias", "mlp_bias", "qkv_bias", "use_qkv_bias", "use_bias"), Flag()
    ),
    **dict.fromkeys(("norm_bias", "classifier_bias", "norm_topk_prob", "use_qk_norm", "rope_interleave"), Flag()),
    **dict.fromkeys(("tie_word_embeddings", "use_sliding_window", "is_causal", "is_decoder", "alibi"), Flag()),
    **dict.fromkeys(("new_decoder_architecture", "parallel_attn", "multi_query", "no_bias"), Flag()),
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function"), Text()),
    **dict.fromkeys(("dtype", "torch_dtype", "rope_type", "topk_method", "position_embedding_type"), Text()),
    **dict.fromkeys(("architectures", "layer_types"), Text(many=True)),
}
"""Bounds by field name, at any depth of ``config.json``."""
GENERATION_BOUNDS: dict[str, Bound | Flag | Text] = {
    "eos_token_id": Bound(0, MAX_TOKENS, many=True),
    "temperature": Bound(0, 1e6, whole=False),
    "top_k": Bound(-1, MAX_TOKENS),
    **dict.fromkeys(("top_p", "min_p"), Bound(0, 1, whole=False)),
    "repetition_penalty": Bound(1e-6, 1e6, whole=False),
    "do_sample": Flag(),
}
"""Bounds of the fields of ``generation_config.json``."""
SKIPPED = frozenset(("quantization_config", "compression_config", "id2label", "label2id", "gguf"))
"""Objects that are not checked here: the code that reads them checks them, or no code reads them."""


def out_of_bounds(
    config: Mapping[str, Any], bounds: Mapping[str, Bound | Flag | Text] = BOUNDS, path: str = ""
) -> Iterator[str]:
    """Yield a message for each field that is out of bounds. Nested fields are named by path, ``text_config.…``."""
    for name, value in config.items():
        bound = bounds.get(name)
        if isinstance(value, Mapping) and name not in SKIPPED and bound is None:
            yield from out_of_bounds(value, bounds, f"{path}{name}.")
        elif value is not None and bound is not None and not bound.allows(value):
            yield f"{path}{name} is {_shown(value)}; it must be {bound}"


def _shown(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return f"{value!r:.40}".replace("\n", " ")
