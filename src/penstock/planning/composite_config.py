"""``config.json`` of models that see images: ``text_config``, ``vision_config``, and what both may leave out."""

from __future__ import annotations

from typing import Any

LLAMA = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
}
GEMMA3 = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
MISTRAL = LLAMA | {"intermediate_size": 14_336, "num_key_value_heads": 8, "max_position_embeddings": 131_072}
QWEN2 = LLAMA | {"vocab_size": 151_936, "intermediate_size": 22_016, "max_position_embeddings": 32_768}
TEXT: dict[str, dict[str, Any]] = {"llama": LLAMA, "mistral": MISTRAL, "qwen2": QWEN2, "gemma3_text": GEMMA3}
"""By ``model_type`` of ``text_config``."""
SIGLIP = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
CLIP = SIGLIP | {"patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "hidden_act": "gelu",
}
VISION: dict[str, dict[str, Any]] = {
    "siglip_vision_model": SIGLIP,
    "clip_vision_model": CLIP,
    "pixtral": LARGE | {"image_size": 1024, "patch_size": 16},
    "internvl_vision": LARGE | {"image_size": 448, "patch_size": 14, "layer_norm_eps": 1e-6},
}
"""By ``model_type`` of ``vision_config``."""
TOP: dict[str, dict[str, Any]] = {
    "gemma3": {
        "mm_tokens_per_image": 256,
        "image_token_index": 262_144,
        "text_config": {"model_type": "gemma3_text"},
        "vision_config": {"model_type": "siglip_vision_model"},
    },
    "mistral3": {
        "image_token_index": 10,
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "text_config": {"model_type": "mistral"},
        "vision_config": {"model_type": "pixtral"},
    },
    "llava": {
        "image_token_index": 32_000,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "multimodal_projector_bias": True,
        "projector_hidden_act": "gelu",
        "text_config": {"model_type": "llama"},
        "vision_config": {"model_type": "clip_vision_model"},
    },
    "llava_onevision": {
        "image_token_index": 151_646,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "vision_aspect_ratio": "anyres_max_9",
        "multimodal_projector_bias": True,
        "projector_hidden_act": "gelu",
        "image_grid_pinpoints": [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)],
        "text_config": {"model_type": "qwen2"},
        "vision_config": {"model_type": "siglip_vision_model"},
    },
    "internvl": {
        "image_token_id": 151_667,
        "image_seq_length": 256,
        "downsample_ratio": 0.5,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "projector_hidden_act": "gelu",
        "text_config": {"model_type": "qwen2"},
        "vision_config": {"model_type": "internvl_vision"},
    },
}
"""By ``model_type``."""


def merge_text_config(config: dict[str, Any]) -> dict[str, Any]:
    """A ``config.json`` with the fields of ``text_config`` beside its own, where it has one, and what it leaves out."""
    top = TOP.get(str(config.get("model_type")), {})
    config = {**top, **config}
    if not isinstance(text := config.get("text_config"), dict):
        return config
    text = {**top.get("text_config", {}), **text}
    usual = TEXT.get(str(text.get("model_type")), {})
    fields = {name: each for name, each in (usual | text).items() if each is not None}
    if text.get("model_type") == "gemma3_text" and "rope_parameters" not in fields:
        fields["rope_parameters"] = _gemma3_rope(fields)
    fields.pop("model_type", None)
    if top:
        config["text_config"] = text
    if isinstance(vision := config.get("vision_config"), dict):
        vision = {**top.get("vision_config", {}), **vision}
        config["vision_config"] = VISION.get(str(vision.get("model_type")), {}) | vision
    return {**fields, **config}  # where both say whether embeddings are tied, the model's own field decides


def _gemma3_rope(text: dict[str, Any]) -> dict[str, Any]:
    """Rotary positions by kind of layer, of the older fields."""
    scaling = text.get("rope_scaling") or {"rope_type": "default"}
    return {
        "full_attention": {**scaling, "rope_theta": text.get("rope_theta") or 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": text.get("rope_local_base_freq") or 1e4},
    }
