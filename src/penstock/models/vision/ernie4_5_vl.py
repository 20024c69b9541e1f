"""The vision tower of ERNIE 4.5 VL (Baidu, 2025): patches of single frames, of which pairs become features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.core.multimodal import ImageInput
from penstock.layers import BuildContext, LayerNorm, RMSNorm
from penstock.layers.mrope import MRoPE
from penstock.layers.vision import HeadThreads, Linear, VisionAttention, VisionBlock, VisionMLP, axial_rope, quick_gelu

from ..vision_tower import Embed, MRoPEPositions, VisionConfig, rope_theta, tower_context
from .patches import normalized_patches, patch_positions

EPS = 1e-6
"""Of the encoder's norms."""
ACTIVATION = "quick_gelu"
FRAMES = 2
"""That share features; an image is repeated."""


def read_vision_config(raw: Mapping[str, Any]) -> VisionConfig:
    """Read ``vision_config``. Raises ``KeyError``, ``TypeError`` or ``ValueError`` where it is wrong."""
    vision = raw["vision_config"]
    size = int(vision.get("hidden_size", 1280))
    config = VisionConfig(
        depth=int(vision.get("depth", 32)),
        size=size,
        intermediate_size=int(vision.get("intermediate_size", 4 * 1280)),
        output_size=int(raw["hidden_size"]),
        heads=int(vision.get("num_heads", 16)),
        patch_size=int(vision.get("patch_size", 14)),
        temporal_patch_size=1,
        merge_size=int(vision.get("spatial_merge_size", 2)),
        theta=rope_theta(vision),
    )
    if size % (4 * config.heads):
        raise ValueError(f"vision_config has {config.heads} heads of {size} elements")
    if vision.get("hidden_act", ACTIVATION) != ACTIVATION or int(vision.get("temporal_merge_size", FRAMES)) != FRAMES:
        raise ValueError("vision_config has another hidden_act or temporal_merge_size")
    if float(vision.get("rms_norm_eps", EPS)) != EPS:
        raise ValueError(f"vision_config has another rms_norm_eps than {EPS}")
    return config


class ErnieVisionTower(MRoPEPositions):
    """A ``VisionTower``. All ranks have it whole, and it is not quantized.

    Args:
        mrope, embed: of the language model.
        eps: of the language model's norms.
    """

    def __init__(self, context: BuildContext, config: VisionConfig, mrope: MRoPE, embed: Embed, eps: float) -> None:
        super().__init__(embed, mrope)
        context = tower_context(context)
        self._config = config
        self._dtype, self._device = context.dtype, context.device
        size, merged = config.size, config.size * config.merge_size**2
        self._patch_embed = Linear(
            context, "model.vision_model.patch_embed.proj", 3 * config.patch_size**2, size, False
        )
        threads = HeadThreads(context)
        self._blocks = [_block(context, config, number, threads) for number in range(config.depth)]
        self._norm = LayerNorm(context, "model.vision_model.ln", size, EPS, bias=True)
        resampler = "model.resampler_model"
        self._spatial = _ResamplerMLP(context, f"{resampler}.spatial_linear", merged, merged)
        self._temporal = _ResamplerMLP(context, f"{resampler}.temporal_linear", FRAMES * merged, merged)
        self._output = Linear(context, f"{resampler}.mlp", merged, config.output_size)
        self._after_norm = RMSNorm(context, f"{resampler}.after_norm", config.output_size, eps)

    @torch.inference_mode()
    def encode(self, image: ImageInput) -> Tensor:
        """As ``VisionTower.encode``."""
        config, merge = self._config, self._config.merge_size
        patches = np.concatenate([normalized_patches(each, config.patch_size, merge, 1) for each in _frames(image)])
        x = self._patch_embed(torch.from_numpy(patches).to(self._device, self._dtype))
        down, right = (each.flatten() for each in patch_positions(image.rows, image.columns, merge))
        rows, columns = (each.repeat(image.num_frames) for each in (down, right))
        rope = axial_rope(rows, columns, config.size // config.heads, config.theta).to(self._device)
        for block in self._blocks:
            x = block(x, rope, [len(down)] * image.num_frames)
        merged = self._spatial(self._norm(x).view(-1, config.size * merge**2))
        pairs = torch.cat((merged[: image.length], merged[-image.length :]), -1)
        return self._after_norm(self._output(self._temporal(pairs)))


def _frames(image: ImageInput) -> list[ImageInput]:
    size = len(image.pixels) // image.num_frames
    parts = (image.pixels[first : first + size] for first in range(0, len(image.pixels), size))
    return [msgspec.structs.replace(image, pixels=part, num_frames=1) for part in parts]


def _block(context: BuildContext, config: VisionConfig, number: int, threads: HeadThreads) -> VisionBlock:
    name, size = f"model.vision_model.blocks.{number}", config.size
    norms = [LayerNorm(context, f"{name}.norm{i}", size, EPS, bias=True) for i in (1, 2)]
    attention = VisionAttention(context, f"{name}.attn", size, config.heads, threads)
    sizes = size, config.intermediate_size, size
    return VisionBlock(norms, attention, VisionMLP(context, f"{name}.mlp.fc1", f"{name}.mlp.fc2", sizes, quick_gelu))


class _ResamplerMLP:
    """Two linear layers, and a norm."""

    def __init__(self, context: BuildContext, name: str, inputs: int, outputs: int) -> None:
        self._mlp = VisionMLP(context, f"{name}.0", f"{name}.2", (inputs, outputs, outputs), F.gelu)
        self._norm = LayerNorm(context, f"{name}.3", outputs, EPS, bias=True)

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(self._mlp(x))
