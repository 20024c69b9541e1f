"""Pixtral (Agrawal et al., 2024) and Mistral Small 3.1: an encoder with 2-D rotary embedding, for images of any size.
Mistral Small 3.1 merges patches."""

from penstock.checkpoint.model_config import ConfigJson, ModelConfig
from penstock.checkpoint.vision_config import ViTConfig, ViTNames, feature_layers, read_vit

from ..composite import find_stored, projector_activation, read_text
from ..registry import Family, imported

NAMES = ViTNames(
    patches="patch_conv",
    pre_norm="ln_pre",
    layers="transformer.layers",
    norms=("attention_norm", "ffn_norm"),
    attention="attention",
    output="o_proj",
    mlp="feed_forward",
)


def read_vision(raw: ConfigJson) -> ViTConfig:
    """Read the encoder's configuration. Raises ``KeyError``, ``TypeError`` or ``ValueError`` for invalid fields."""
    config = read_vit(
        raw["vision_config"],
        image_size=0,
        eps=1e-5,
        rms_norm=True,
        gated=True,
        patch_bias=False,
        pre_norm=True,
        qkv_bias=False,
        output_bias=False,
        names=NAMES,
    )
    if config.size // config.heads % 4:
        raise ValueError(f"vision_config has head size {config.size // config.heads}; it must be a multiple of 4")
    if raw.get("vision_feature_select_strategy", "full") != "full":
        strategy = raw["vision_feature_select_strategy"]
        message = "it must be full, because the encoder has no class token"
        raise ValueError(f"vision_feature_select_strategy is {strategy!r:.40}; {message}")
    return config


def read_config(raw: ConfigJson) -> ModelConfig:
    vision = read_vision(raw)
    layers = feature_layers(raw["vision_feature_layer"], vision.depth)
    if merge_size(raw) and len(layers) > 1:
        message = "it must be a single layer, because patches are merged"
        raise ValueError(f"vision_feature_layer is {raw['vision_feature_layer']!r:.40}; {message}")
    projector_activation(raw)
    tower = vision.weights(max(layers)) + merge_size(raw) ** 2 * vision.size**2
    return read_text(raw, tower, len(layers) * vision.size)


def merge_size(raw: ConfigJson) -> int:
    """Number of patches along each edge of the square that is merged to one feature; 0: patches are not merged."""
    return int(raw["spatial_merge_size"]) if raw.get("model_type") == "mistral3" else 0


FAMILY = Family(
    ("Mistral3ForConditionalGeneration",),
    read_config,
    imported("penstock.models.vision.pixtral:build"),
    find_stored=find_stored,
)
