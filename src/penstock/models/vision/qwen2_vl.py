"""Vision towers of Qwen2-VL (Wang et al., 2024) and Qwen2.5-VL (Bai et al., 2025)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.checkpoint.model_config import ModelConfig
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

from ..decoder import Decoder
from ..families.qwen2_vl import Qwen2VisionConfig, read_vision_config
from ..vision_tower import Embed, MRoPEPositions, tower_context
from .patches import normalized_patches, patch_positions

EPS = 1e-6
"""Epsilon of all norms."""


class QwenVisionTower(MRoPEPositions):
    """A ``VisionTower``. Every rank computes the whole tower, which is not quantized.

    Args:
        mrope: M-RoPE of the language model.
        embed: embedding of the language model.
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
        """Order of the features by window, ``[features]`` int64, and the number of patches of each window."""
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


def build(context: BuildContext, config: ModelConfig, num_mtp_heads: int) -> Decoder:
    decoder = Decoder(context, config, num_mtp_heads)
    table = context.rope_table(config.head_dim, config.rope_parameters, config.max_position_embeddings)
    mrope = MRoPE(table, context.max_len, config.rope_parameters["mrope_section"])
    decoder.vision = QwenVisionTower(context, read_vision_config(config.raw), mrope, decoder.embed)
    return decoder
