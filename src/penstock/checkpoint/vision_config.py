"""``vision_config`` of ``config.json``: what vision towers read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.core import Code, PenstockError

from .model_config import ACTIVATIONS as TEXT_ACTIVATIONS
from .model_config import ModelConfig, activation_of

QWEN2_5_VL = "Qwen2_5_VLForConditionalGeneration"
QWEN3_VL = ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration")
QWEN_VL = ("Qwen2VLForConditionalGeneration", QWEN2_5_VL, *QWEN3_VL)
"""Architectures of Qwen that see images."""
ERNIE_VL = "Ernie4_5_VLMoeForConditionalGeneration"
ACTIVATIONS = (*TEXT_ACTIVATIONS, "quick_gelu")
"""Values of ``hidden_act`` of vision transformers."""


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """What towers read from ``vision_config`` of ``config.json``."""

    depth: int
    size: int
    """Of a patch's vector."""
    intermediate_size: int
    output_size: int
    """Of a feature, the language model's hidden size."""
    heads: int
    patch_size: int
    """Pixels of a patch's edge."""
    temporal_patch_size: int
    """Frames of a patch; an image is repeated as often."""
    merge_size: int
    """Patches of a feature's edge."""
    theta: float

    def weights(self, mlp_matrices: int = 2, mergers: int = 1) -> int:
        """Parameters of the tower's matrices: patches, blocks, and ``mergers`` of two matrices each."""
        size, merged = self.size, self.size * self.merge_size**2
        patches = 3 * self.temporal_patch_size * self.patch_size**2 * size
        blocks = self.depth * (4 * size**2 + mlp_matrices * size * self.intermediate_size)
        return patches + blocks + mergers * merged * (merged + self.output_size)


def rope_theta(vision: Mapping[str, Any]) -> float:
    """Of ``vision_config``, which files of earlier versions of transformers have beside ``rope_parameters``."""
    given = vision.get("rope_parameters") or {}
    return float(given.get("rope_theta") or vision.get("rope_theta") or 10_000.0)


@dataclass(frozen=True, kw_only=True)
class ViTNames:
    """A checkpoint's names, below the tower's."""

    patches: str = "embeddings.patch_embedding"
    positions: str = "embeddings.position_embedding.weight"
    class_token: str = "embeddings.class_embedding"
    pre_norm: str = "pre_layrnorm"
    layers: str = "encoder.layers"
    norms: tuple[str, str] = ("layer_norm1", "layer_norm2")
    attention: str = "self_attn"
    output: str = "out_proj"
    mlp: str = "mlp"
    scales: tuple[str, str] = ("lambda_1", "lambda_2")


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """Sizes and switches of an encoder."""

    depth: int
    size: int
    """Of a patch's vector."""
    intermediate_size: int
    heads: int
    patch_size: int
    image_size: int
    """Pixels of a tile's edge; 0 where tiles have any size, and positions are rotary."""
    activation: str
    eps: float
    rms_norm: bool = False
    gated: bool = False
    patch_bias: bool = True
    class_token: bool = False
    pre_norm: bool = False
    qkv_bias: bool = True
    output_bias: bool = True
    qk_norm: bool = False
    layer_scale: bool = False
    names: ViTNames = ViTNames()

    @property
    def grid(self) -> int:
        """Patches of a tile's edge."""
        return self.image_size // self.patch_size

    @property
    def num_positions(self) -> int:
        """Rows of the table of positions."""
        return self.grid**2 + self.class_token

    def weights(self, depth: int) -> int:
        """Parameters of the encoder's matrices, of as many layers as are used."""
        block = (4 * self.size + (3 if self.gated else 2) * self.intermediate_size) * self.size
        return self.size * (3 * self.patch_size**2 + self.num_positions) + depth * block


def read_vit(vision: Mapping[str, Any], **options: Any) -> ViTConfig:
    """Sizes by the names that most ``vision_config`` have.

    Args:
        options: fields in place of those that are read.

    Raises ``KeyError``, ``TypeError`` or ``ValueError`` where one is wrong, and ``PenstockError`` (``unsupported``) for
    an activation that is not known.
    """
    fields: dict[str, Any] = {
        "depth": int(vision["num_hidden_layers"]),
        "size": int(vision["hidden_size"]),
        "intermediate_size": int(vision["intermediate_size"]),
        "heads": int(vision["num_attention_heads"]),
        "patch_size": edge_of(vision["patch_size"]),
        "image_size": edge_of(vision["image_size"]),
        "activation": str(vision["hidden_act"]),
        "eps": float(vision.get("layer_norm_eps") or 1e-6),
    }
    config = ViTConfig(**fields | options)
    if config.activation not in ACTIVATIONS:
        words = f"vision_config has the activation {config.activation[:40]!r}; known are {', '.join(ACTIVATIONS)}"
        raise PenstockError(Code.UNSUPPORTED, words, "model")
    if config.gated:
        activation_of(config.activation)  # the kernels', which are fewer
    if config.image_size and config.grid < 1:
        raise ValueError(f"image_size is {config.image_size}, less than patch_size, which is {config.patch_size}")
    if config.heads < 1 or config.size % config.heads or config.patch_size < 1 or config.depth < 1:
        raise ValueError(f"vision_config has {config.heads} heads of {config.size} elements, or no layers or patches")
    return config


def edge_of(size: Any) -> int:
    """Of a square, which may be given as its height and width. Raises ``ValueError`` where these differ."""
    if isinstance(size, list | tuple):
        if len(set(size)) != 1:
            raise ValueError(f"vision_config has pictures or patches of {size}, which are no squares")
        size = size[0]
    return int(size)


def feature_layers(given: Any, depth: int) -> tuple[int, ...]:
    """``vision_feature_layer``: the numbers of layers after which hidden states are taken, counted from 0 for those of
    the embedding. Raises ``ValueError`` where there are no such layers."""
    layers = tuple(map(int, given)) if isinstance(given, list | tuple) else (int(given),)
    layers = tuple(layer + depth + 1 if layer < 0 else layer for layer in layers)
    if not layers or not all(0 <= layer <= depth for layer in layers):
        raise ValueError(f"vision_feature_layer is {given}, and the encoder has {depth} layers")
    return layers


def with_mrope(config: ModelConfig, default: tuple[int, int, int]) -> ModelConfig:
    """A configuration with M-RoPE: plain positions with sections of a head for time, height and width.

    Args:
        default: ``mrope_section`` where ``config.json`` has none.

    Raises ``ValueError`` for sections that are not those of a head.
    """
    rope = config.rope_parameters
    sections = [int(size) for size in rope.get("mrope_section") or default]
    if len(sections) != 3 or 2 * sum(sections) != config.head_dim:
        raise ValueError(f"mrope_section is {sections}, and heads have {config.head_dim} elements")
    kind = "default" if rope["rope_type"] == "mrope" else rope["rope_type"]
    return replace(config, rope_parameters={**rope, "rope_type": kind, "mrope_section": sections})
