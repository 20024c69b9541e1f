"""Vision transformers (Dosovitskiy et al., 2021) as SigLIP, CLIP, InternViT and Pixtral have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.model_config import ACTIVATIONS as TEXT_ACTIVATIONS
from penstock.checkpoint.model_config import activation_of
from penstock.core import Code, PenstockError
from penstock.core.multimodal import ImageInput
from penstock.layers import BuildContext, GatedMLP, LayerNorm, Norm, RMSNorm
from penstock.layers.vision import HeadThreads, PatchEmbed, VisionAttention, VisionBlock, VisionMLP, quick_gelu
from penstock.ops import activations

from .patches import tile_patches

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: activations.ACTIVATIONS[own] for name, own in TEXT_ACTIVATIONS.items()},
    "quick_gelu": quick_gelu,
}
"""By ``hidden_act``."""


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


class ViT:
    """An encoder of tiles, each by itself.

    Args:
        context: of ``tower_context``.
        name: of the tower in the checkpoint.
        feature_layers: whose hidden states are returned, one after the other in each row; None for the last layer.
    """

    def __init__(
        self, context: BuildContext, name: str, config: ViTConfig, feature_layers: Sequence[int] | None = None
    ) -> None:
        names = config.names
        self._config = config
        self._dtype, self._device = context.dtype, context.device
        self._layers = [config.depth] if feature_layers is None else list(feature_layers)
        patch = (3, config.patch_size, config.patch_size)
        self._patch_embed = PatchEmbed(context, f"{name}.{names.patches}", config.size, patch, config.patch_bias)
        self._positions = self._class_token = self._pre_norm = None
        if config.image_size:
            shape = config.num_positions, config.size
            shapes = shape if names.positions.endswith(".weight") else (1, *shape)
            positions = context.read_weight(f"{name}.{names.positions}", *shapes)
            self._positions = positions.clone().view(shape)
        if config.class_token:
            ones = (1, 1) if names.class_token.endswith("cls_token") else ()
            self._class_token = context.read_weight(f"{name}.{names.class_token}", *ones, config.size).clone().view(-1)
        if config.pre_norm:
            self._pre_norm = make_norm(context, config, f"{name}.{names.pre_norm}")
        threads = HeadThreads(context)
        self._blocks = [
            _block(context, config, f"{name}.{names.layers}.{number}", threads) for number in range(max(self._layers))
        ]

    def __call__(self, image: ImageInput, rope: Tensor | None = None) -> Tensor:
        """The hidden states of an image's patches, ``[tiles, patches, layers * size]``; a class token comes first.

        Args:
            rope: as of ``VisionAttention``.
        """
        patches = torch.from_numpy(tile_patches(image, self._config.patch_size)).to(self._device, self._dtype)
        x = self._patch_embed(patches.flatten(0, 1)).view(image.tiles, -1, self._config.size)
        if self._class_token is not None:
            x = torch.cat((self._class_token.expand(image.tiles, 1, -1), x), 1)
        if self._positions is not None:
            x = x + self._positions
        length = x.shape[1]
        x = x.flatten(0, 1)
        if self._pre_norm:
            x = self._pre_norm(x)
        states = {0: x}
        for number, block in enumerate(self._blocks, 1):
            states[number] = x = block(x, rope, [length] * image.tiles)
        return torch.cat([states[layer] for layer in self._layers], -1).view(image.tiles, length, -1)


def make_norm(context: BuildContext, config: ViTConfig, name: str) -> Norm:
    """A norm as the encoder has them."""
    if config.rms_norm:
        return RMSNorm(context, name, config.size, config.eps)
    return LayerNorm(context, name, config.size, config.eps, bias=True)


def _block(context: BuildContext, config: ViTConfig, name: str, threads: HeadThreads) -> VisionBlock:
    names, size = config.names, config.size
    attention = f"{name}.{names.attention}"
    qk_norms = [RMSNorm(context, f"{attention}.{part}_norm", size, 1e-6) for part in "qk" if config.qk_norm]
    return VisionBlock(
        [make_norm(context, config, f"{name}.{norm}") for norm in names.norms],
        VisionAttention(
            context,
            attention,
            size,
            config.heads,
            threads,
            qkv=("q_proj", "k_proj", "v_proj"),
            proj=names.output,
            bias=(config.qkv_bias, config.output_bias),
            qk_norms=(qk_norms[0], qk_norms[1]) if qk_norms else None,
        ),
        _mlp(context, config, f"{name}.{names.mlp}"),
        [context.read_weight(f"{name}.{each}", size) for each in names.scales if config.layer_scale],
    )


def _mlp(context: BuildContext, config: ViTConfig, name: str) -> Callable[[Tensor], Tensor]:
    if config.gated:
        activation = activation_of(config.activation)
        gated = GatedMLP(context, name, config.size, config.intermediate_size, activation=activation)
        return lambda x: gated(x, None)
    sizes = config.size, config.intermediate_size, config.size
    return VisionMLP(context, f"{name}.fc1", f"{name}.fc2", sizes, ACTIVATIONS[config.activation])
