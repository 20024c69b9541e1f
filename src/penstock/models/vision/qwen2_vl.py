"""The vision towers of Qwen2-VL (Wang et al., 2024) and Qwen2.5-VL (Bai et al., 2025)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.core.multimodal import ImageInput
from penstock.layers import BuildContext, GatedMLP, LayerNorm, Norm, RMSNorm
from penstock.layers.mrope import MRoPE
from penstock.layers.vision import (
    HeadThreads,
    PatchEmbed,
    VisionAttention,
    VisionBlock,
    VisionMLP,
    axial_rope,
    quick_gelu,
)

from ..vision_tower import Embed, MRoPEPositions, VisionConfig, rope_theta, tower_context
from .patches import normalized_patches, patch_positions

EPS = 1e-6
"""Of all norms."""


@dataclass(frozen=True, kw_only=True)
class Qwen2VisionConfig(VisionConfig):
    """``vision_config`` of ``config.json``."""

    windowed: bool
    """Qwen2.5-VL: windows, RMS norms and SwiGLU."""
    window: int = 0
    """Features of a window's edge."""
    full_layers: frozenset[int] = frozenset()
    """Layers without windows."""


def read_vision_config(raw: Mapping[str, Any], windowed: bool) -> Qwen2VisionConfig:
    """Read ``vision_config``. Raises ``KeyError``, ``TypeError`` or ``ValueError`` where it is wrong."""
    vision = raw["vision_config"]
    patch, merge = int(vision.get("patch_size", 14)), int(vision.get("spatial_merge_size", 2))
    theta = rope_theta(vision)
    if windowed:
        size, output = int(vision.get("hidden_size", 3584)), int(vision.get("out_hidden_size", 3584))
        intermediate = int(vision.get("intermediate_size", 3420))
    else:
        size, output = int(vision.get("embed_dim", 1280)), int(vision.get("hidden_size", 3584))
        intermediate = int(size * vision.get("mlp_ratio", 4))
    heads = int(vision.get("num_heads", 16))
    if size % (4 * heads) or output != int(raw["hidden_size"]):
        raise ValueError(f"vision_config has {heads} heads of {size} elements, and {output} outputs")
    return Qwen2VisionConfig(
        depth=int(vision.get("depth", 32)),
        size=size,
        intermediate_size=intermediate,
        output_size=output,
        heads=heads,
        patch_size=patch,
        temporal_patch_size=int(vision.get("temporal_patch_size", 2)),
        merge_size=merge,
        theta=theta,
        windowed=windowed,
        window=int(vision.get("window_size", 112)) // merge // patch if windowed else 0,
        full_layers=frozenset(map(int, vision.get("fullatt_block_indexes", (7, 15, 23, 31))))
        if windowed
        else frozenset(),
    )


class QwenVisionTower(MRoPEPositions):
    """A ``VisionTower``. All ranks have it whole, and it is not quantized.

    Args:
        mrope, embed: of the language model.
    """

    def __init__(self, context: BuildContext, config: Qwen2VisionConfig, mrope: MRoPE, embed: Embed) -> None:
        super().__init__(embed, mrope)
        context = tower_context(context)
        self._config = config
        self._dtype, self._device = context.dtype, context.device
        patch = (3, config.temporal_patch_size, config.patch_size, config.patch_size)
        self._patch_embed = PatchEmbed(context, "visual.patch_embed.proj", config.size, patch)
        threads = HeadThreads(context)
        self._blocks = [_block(context, config, number, threads) for number in range(config.depth)]
        merged = config.size * config.merge_size**2
        self._norm = _norm(context, config, "visual.merger.ln_q")
        sizes = merged, merged, config.output_size
        self._merger = VisionMLP(context, "visual.merger.mlp.0", "visual.merger.mlp.2", sizes, F.gelu)

    @torch.inference_mode()
    def encode(self, image: ImageInput) -> Tensor:
        """As ``VisionTower.encode``."""
        config = self._config
        rows, columns, merge = image.rows, image.columns, config.merge_size
        patches = normalized_patches(image, config.patch_size, merge, config.temporal_patch_size)
        x = self._patch_embed(torch.from_numpy(patches).to(self._device, self._dtype))
        order, windows = self._windows(rows, columns)
        down, right = (each[order].flatten() for each in patch_positions(rows, columns, merge))
        rope = axial_rope(down, right, config.size // config.heads, config.theta).to(self._device)
        x = x.view(-1, merge**2, config.size)[order.to(self._device)].flatten(0, 1)
        whole = [len(x)]
        for number, block in enumerate(self._blocks):
            full = not config.windowed or number in config.full_layers
            x = block(x, rope, whole if full else windows)
        features = self._merger(self._norm(x).view(-1, config.size * merge**2))
        return features[order.argsort().to(self._device)]

    def _windows(self, rows: int, columns: int) -> tuple[Tensor, list[int]]:
        """The features in the order of their windows, ``[features]`` int64, and the patches of each window."""
        order = torch.arange(rows * columns).view(rows, columns)
        edge = self._config.window
        if not edge:
            return order.flatten(), []
        windows = [part.flatten() for band in order.split(edge) for part in band.split(edge, 1)]
        return torch.cat(windows), [len(window) * self._config.merge_size**2 for window in windows]


def _norm(context: BuildContext, config: Qwen2VisionConfig, name: str) -> Norm:
    if config.windowed:
        return RMSNorm(context, name, config.size, EPS)
    return LayerNorm(context, name, config.size, EPS, bias=True)


def _block(context: BuildContext, config: Qwen2VisionConfig, number: int, threads: HeadThreads) -> VisionBlock:
    name, size = f"visual.blocks.{number}", config.size
    norms = [_norm(context, config, f"{name}.norm{i}") for i in (1, 2)]
    attention = VisionAttention(context, f"{name}.attn", size, config.heads, threads)
    return VisionBlock(norms, attention, _mlp(context, config, f"{name}.mlp"))


def _mlp(context: BuildContext, config: Qwen2VisionConfig, name: str) -> Callable[[Tensor], Tensor]:
    if config.windowed:
        gated = GatedMLP(context, name, config.size, config.intermediate_size, bias=True)
        return lambda x: gated(x, None)
    sizes = config.size, config.intermediate_size, config.size
    return VisionMLP(context, f"{name}.fc1", f"{name}.fc2", sizes, quick_gelu)
