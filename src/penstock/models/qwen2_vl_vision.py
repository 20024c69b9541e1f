"""The vision towers of Qwen2-VL (Wang et al., 2024) and Qwen2.5-VL (Bai et al., 2025)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.core.multimodal import ImageInput
from penstock.core.quantization import Scheme
from penstock.layers import BuildContext, GatedMLP, LayerNorm, Norm, RMSNorm
from penstock.layers.mrope import MRoPE
from penstock.layers.vision import HeadThreads, Linear, PatchEmbed, VisionAttention, axial_rope
from penstock.ops.cores import usable_cores
from penstock.parallel import SINGLE_RANK

from .patches import normalized_patches, patch_positions
from .vision import VisionConfig

EPS = 1e-6
"""Of all norms."""
Embed = Callable[[Tensor], Tensor]
"""``VisionTower.embed``."""


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
    theta = float((vision.get("rope_parameters") or {}).get("rope_theta") or 10_000.0)
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


class QwenVisionTower:
    """A ``VisionTower``. All ranks have it whole, and it is not quantized.

    Args:
        mrope, embed: of the language model.
    """

    bidirectional = False
    placeholder: int | None = None

    def __init__(self, context: BuildContext, config: Qwen2VisionConfig, mrope: MRoPE, embed: Embed) -> None:
        context = replace(context, group=SINGLE_RANK, scheme=Scheme(), max_loras=0)
        self._config = config
        self._dtype, self._device = context.dtype, context.device
        self._mrope = mrope
        self._embed = embed
        patch = (3, config.temporal_patch_size, config.patch_size, config.patch_size)
        self._patch_embed = PatchEmbed(context, "visual.patch_embed.proj", config.size, patch)
        threads = HeadThreads(context.threads or usable_cores())
        self._blocks = [_Block(context, config, number, threads) for number in range(config.depth)]
        merged = config.size * config.merge_size**2
        self._norm = _norm(context, config, "visual.merger.ln_q")
        self._merger = Linear(context, "visual.merger.mlp.0", merged, merged)
        self._output = Linear(context, "visual.merger.mlp.2", merged, config.output_size)
        self.deepstack: Sequence[Tensor] = ()

    def rope_rows(self, positions: np.ndarray) -> Tensor:
        """As ``VisionTower.rope_rows``."""
        return self._mrope.rows(positions)

    def embed(self, token_ids: Tensor) -> Tensor:
        """As ``VisionTower.embed``."""
        return self._embed(token_ids)

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
        merged = self._norm(x).view(-1, config.size * merge**2)
        features = self._output(F.gelu(self._merger(merged)))
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


class _Block:
    """Attention and MLP, each behind a norm."""

    def __init__(self, context: BuildContext, config: Qwen2VisionConfig, number: int, threads: HeadThreads) -> None:
        name, size = f"visual.blocks.{number}", config.size
        self._norms = [_norm(context, config, f"{name}.norm{i}") for i in (1, 2)]
        self._attention = VisionAttention(context, f"{name}.attn", size, config.heads, threads)
        self._gated_mlp = self._fc1 = self._fc2 = None
        if config.windowed:
            self._gated_mlp = GatedMLP(context, f"{name}.mlp", size, config.intermediate_size, bias=True)
        else:
            self._fc1 = Linear(context, f"{name}.mlp.fc1", size, config.intermediate_size)
            self._fc2 = Linear(context, f"{name}.mlp.fc2", config.intermediate_size, size)

    def __call__(self, x: Tensor, rope: Tensor, segments: list[int]) -> Tensor:
        """``[patches, size]`` to the same; other arguments as for ``VisionAttention``."""
        x = x + self._attention(self._norms[0](x), rope, segments)
        return x + self._mlp(self._norms[1](x))

    def _mlp(self, x: Tensor) -> Tensor:
        if self._gated_mlp:
            return self._gated_mlp(x, None)
        assert self._fc1 and self._fc2
        wide = self._fc1(x)
        return self._fc2(wide * torch.sigmoid(1.702 * wide))  # quick GELU
