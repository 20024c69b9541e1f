"""InternVL 3 (Zhu et al., 2025) in transformers' format: InternViT on tiles, with patches merged by pixel shuffle."""

from penstock.checkpoint.model_config import ConfigJson, ModelConfig
from penstock.checkpoint.vision_config import ViTConfig, ViTNames, feature_layers, read_vit

from ..composite import find_stored, projector_activation, read_text
from ..registry import Family, imported

NAMES = ViTNames(
    patches="embeddings.patch_embeddings.projection",
    positions="embeddings.position_embeddings",
    class_token="embeddings.cls_token",
    layers="encoder.layer",
    norms=("layernorm_before", "layernorm_after"),
    attention="attention",
    output="projection_layer",
)


def read_vision(raw: ConfigJson) -> ViTConfig:
    """Read the encoder's configuration. Raises ``KeyError``, ``TypeError`` or ``ValueError`` for invalid fields."""
    vision = raw["vision_config"]
    if not vision.get("use_absolute_position_embeddings", True):
        raise ValueError("use_absolute_position_embeddings of vision_config is false; it must be true")
    config = read_vit(
        vision,
        rms_norm=vision.get("norm_type", "layer_norm") == "rms_norm",
        class_token=True,
        qkv_bias=bool(vision.get("attention_bias", False)),
        qk_norm=bool(vision.get("use_qk_norm", False)),
        layer_scale=True,
        names=NAMES,
    )
    merge = merge_size(raw)
    if config.grid % merge or (config.grid // merge) ** 2 != int(raw["image_seq_length"]):
        grid = f"{config.grid} x {config.grid} patches"
        raise ValueError(f"image_seq_length is {raw['image_seq_length']}; it must be {grid} / {merge**2}")
    if (
        raw["vision_feature_select_strategy"] != "default"
        or len(feature_layers(raw["vision_feature_layer"], config.depth)) > 1
    ):
        found = f"{raw['vision_feature_select_strategy']!r:.40} and {raw['vision_feature_layer']!r:.40}"
        message = "they must be default and a single layer"
        raise ValueError(f"vision_feature_select_strategy and vision_feature_layer are {found}; {message}")
    return config


def merge_size(raw: ConfigJson) -> int:
    """Number of patches along each edge of the square that is merged to one feature. Raises ``ValueError`` for an
    invalid ``downsample_ratio``."""
    ratio = float(raw["downsample_ratio"])
    if not 0 < ratio <= 1 or abs(1 / ratio - round(1 / ratio)) > 1e-6:
        raise ValueError(f"downsample_ratio is {ratio}; it must be 1 / N with an integer N")
    return round(1 / ratio)


def read_config(raw: ConfigJson) -> ModelConfig:
    vision, merge = read_vision(raw), merge_size(raw)
    projector_activation(raw)
    (depth,) = feature_layers(raw["vision_feature_layer"], vision.depth)
    return read_text(raw, vision.weights(depth) + vision.size, merge**2 * vision.size)


FAMILY = Family(
    ("InternVLForConditionalGeneration",),
    read_config,
    imported("penstock.models.vision.internvl:build"),
    find_stored=find_stored,
)
