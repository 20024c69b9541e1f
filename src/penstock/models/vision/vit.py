"""Vision transformer (Dosovitskiy et al., 2021) of SigLIP, CLIP, InternViT and Pixtral."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penstock.checkpoint.model_config import ACTIVATIONS as TEXT_ACTIVATIONS
from penstock.checkpoint.model_config import activation_of
from penstock.checkpoint.vision_config import ViTConfig
from penstock.core.multimodal import ImageInput
from penstock.layers import BuildContext, GatedMLP, LayerNorm, Norm, RMSNorm
from penstock.layers.vision import HeadThreads, PatchEmbed, VisionAttention, VisionBlock, VisionMLP, quick_gelu
from penstock.ops import activations

from .patches import tile_patches

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: activations.ACTIVATIONS[key] for name, key in TEXT_ACTIVATIONS.items()},
    "quick_gelu": quick_gelu,
}
"""``hidden_act`` → activation function."""


class ViT:
    """A vision transformer that encodes each tile of an image independently.

    Args:
        context: result of ``tower_context``.
        name: name of the tower in the checkpoint.
        feature_layers: layers whose hidden states are returned, concatenated; None: the last layer.
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
        """Hidden states of the class token, if it exists, and the patches, ``[tiles, patches, layers * size]``.

        Args:
            rope: ``[2, patches, head_dim]`` float32: cosines and sines; None: no rotary embedding.
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
    """Build an RMS norm or a layer norm, as ``config.rms_norm`` says."""
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
