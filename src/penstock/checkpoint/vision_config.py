"""``vision_config`` of ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.core import Code, PenstockError

from .model_config import ACTIVATIONS as TEXT_ACTIVATIONS
from .model_config import ModelConfig, activation_of

QWEN2_5_VL = "Qwen2_5_VLForConditionalGeneration"
QWEN3_5 = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
QWEN3_VL = ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration", *QWEN3_5)
QWEN_VL = ("Qwen2VLForConditionalGeneration", QWEN2_5_VL, *QWEN3_VL)
"""Architectures of Qwen's vision-language models."""
ERNIE_VL = "Ernie4_5_VLMoeForConditionalGeneration"
ACTIVATIONS = (*TEXT_ACTIVATIONS, "quick_gelu")
"""Supported values of ``hidden_act`` in vision transformers."""


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Configuration of the vision towers of Qwen-VL and ERNIE 4.5 VL."""

    depth: int
    size: int
    """Hidden size of the tower."""
    intermediate_size: int
    output_size: int
    """Size of a feature: the hidden size of the language model."""
    heads: int
    patch_size: int
    """Edge of a patch in pixels."""
    temporal_patch_size: int
    """Number of frames per patch. An image is repeated to fill a patch."""
    merge_size: int
    """Number of patches along each edge of the square that is merged to one feature."""
    theta: float
    """Base of the rotary embedding."""

    def weights(self, mlp_matrices: int = 2, mergers: int = 1) -> int:
        """Number of parameters in the tower's matrices: patch embedding, blocks, and ``mergers`` of two matrices."""
        size, merged = self.size, self.size * self.merge_size**2
        patches = 3 * self.temporal_patch_size * self.patch_size**2 * size
        blocks = self.depth * (4 * size**2 + mlp_matrices * size * self.intermediate_size)
        return patches + blocks + mergers * merged * (merged + self.output_size)


def rope_theta(vision: Mapping[str, Any]) -> float:
    """``rope_theta`` of ``vision_config``: in ``rope_parameters``, or at its top level (older transformers)."""
    given = vision.get("rope_parameters") or {}
    return float(given.get("rope_theta") or vision.get("rope_theta") or 10_000.0)


@dataclass(frozen=True, kw_only=True)
class ViTNames:
    """Names of modules and tensors in the vision tower of a checkpoint."""

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
    """Configuration of a vision transformer (CLIP, SigLIP, InternViT, Pixtral)."""

    depth: int
    size: int
    """Hidden size."""
    intermediate_size: int
    heads: int
    patch_size: int
    image_size: int
    """Edge of a tile in pixels; 0: tiles have any size, and positions are rotary."""
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
        """Edge of a tile in patches."""
        return self.image_size // self.patch_size

    @property
    def num_positions(self) -> int:
        """Number of learned positions."""
        return self.grid**2 + self.class_token

    def weights(self, depth: int) -> int:
        """Number of parameters in the matrices of the encoder's first ``depth`` layers."""
        block = (4 * self.size + (3 if self.gated else 2) * self.intermediate_size) * self.size
        return self.size * (3 * self.patch_size**2 + self.num_positions) + depth * block


def read_vit(vision: Mapping[str, Any], **options: Any) -> ViTConfig:
    """Read a ``vision_config`` with the usual field names.

    Args:
        options: fields of ``ViTConfig`` that override those in ``vision``.

    Raises ``KeyError``, ``TypeError`` or ``ValueError`` for an invalid field, and ``PenstockError`` (``unsupported``)
    for an unknown activation.
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
        message = f"vision_config has activation {config.activation[:40]!r}; supported are {', '.join(ACTIVATIONS)}"
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    if config.gated:
        activation_of(config.activation)  # raises for activations that kernels of gated MLPs lack
    if config.image_size and config.grid < 1:
        raise ValueError(f"image_size is {config.image_size}; it must be at least patch_size, {config.patch_size}")
    if config.heads < 1 or config.size % config.heads or config.patch_size < 1 or config.depth < 1:
        sizes = (
            f"hidden_size {config.size}, {config.heads} heads, {config.depth} layers, patch_size {config.patch_size}"
        )
        raise ValueError(f"vision_config has {sizes}: they must be positive, and hidden_size a multiple of the heads")
    return config


def edge_of(size: Any) -> int:
    """Edge of a square that is given by its edge, or by height and width. Raises ``ValueError`` if these differ."""
    if isinstance(size, list | tuple):
        if len(set(size)) != 1:
            raise ValueError(f"vision_config has images or patches of size {size!r:.40}; they must be square")
        size = size[0]
    return int(size)


def feature_layers(given: Any, depth: int) -> tuple[int, ...]:
    """Layers whose outputs are the image features, from ``vision_feature_layer``; 0 is the output of the embedding.
    Raises ``ValueError`` for a layer that does not exist."""
    layers = tuple(map(int, given)) if isinstance(given, list | tuple) else (int(given),)
    layers = tuple(layer + depth + 1 if layer < 0 else layer for layer in layers)
    if not layers or not all(0 <= layer <= depth for layer in layers):
        raise ValueError(f"vision_feature_layer is {given!r:.60}; layers must be from {-depth - 1} to {depth}")
    return layers


def with_mrope(config: ModelConfig, default: tuple[int, int, int]) -> ModelConfig:
    """A configuration with M-RoPE: sections of each head's rotated half for positions in time, height and width.

    Args:
        default: default of ``mrope_section``.

    Raises ``ValueError`` for sections that do not add up to half of a head's rotated dimensions.
    """
    rope = config.rope_parameters
    sections = [int(size) for size in rope.get("mrope_section") or default]
    if len(sections) != 3 or 2 * sum(sections) != config.rotary_dim:
        raise ValueError(f"mrope_section is {sections}; it must be 3 numbers with the sum {config.rotary_dim // 2}")
    kind = "default" if rope["rope_type"] == "mrope" else rope["rope_type"]
    return replace(config, rope_parameters={**rope, "rope_type": kind, "mrope_section": sections})
