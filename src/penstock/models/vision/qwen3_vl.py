"""Vision tower of Qwen3-VL (Qwen Team, 2025): learned positions, and features of several layers (DeepStack)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.checkpoint.model_config import ModelConfig
from penstock.core.multimodal import ImageInput
from penstock.layers import BuildContext, LayerNorm, MLPLayer
from penstock.layers.mrope import MRoPE
from penstock.layers.vision import HeadThreads, PatchEmbed, VisionAttention, VisionBlock, VisionMLP, axial_rope
from penstock.ops import Ops

from ..decoder import Decoder
from ..experts import feed_forward
from ..families.qwen3_vl import Qwen3VisionConfig, read_vision_config
from ..vision_tower import Embed, MRoPEPositions, tower_context
from .patches import normalized_patches, patch_positions

EPS = 1e-6
"""Epsilon of all norms."""


class Qwen3VisionTower(MRoPEPositions):
    """A ``VisionTower``. Every rank computes the whole tower, which is not quantized.

    Args:
        mrope: M-RoPE of the language model.
        embed: embedding of the language model.
        deepstack: see ``VisionTower.deepstack``.
    """

    def __init__(
        self, context: BuildContext, config: Qwen3VisionConfig, mrope: MRoPE, embed: Embed, deepstack: list[Tensor]
    ) -> None:
        super().__init__(embed, mrope)
        context = tower_context(context)
        self._config = config
        self._dtype, self._device = context.dtype, context.device
        self.deepstack: Sequence[Tensor] = deepstack
        patch = (3, config.temporal_patch_size, config.patch_size, config.patch_size)
        self._patch_embed = PatchEmbed(context, "visual.patch_embed.proj", config.size, patch, bias=True)
        self._positions = context.read_weight("visual.pos_embed.weight", config.grid**2, config.size).clone()
        threads = HeadThreads(context)
        self._blocks = [_block(context, config, number, threads) for number in range(config.depth)]
        self._merger = _Merger(context, config, "visual.merger", norm_merged=False)
        self._deep_mergers = [
            _Merger(context, config, f"visual.deepstack_merger_list.{i}", norm_merged=True)
            for i in range(len(config.deepstack))
        ]

    @torch.inference_mode()
    def encode(self, image: ImageInput) -> Tensor:
        config, merge = self._config, self._config.merge_size
        patches = normalized_patches(image, config.patch_size, merge, config.temporal_patch_size)
        x = self._patch_embed(torch.from_numpy(patches).to(self._device, self._dtype))
        down, right = (each.flatten() for each in patch_positions(image.rows, image.columns, merge))
        x = x + self._position_embeddings(down, right, image.rows * merge, image.columns * merge)
        rope = axial_rope(down, right, config.size // config.heads, config.theta).to(self._device)
        deep: list[Tensor] = []
        for number, block in enumerate(self._blocks):
            x = block(x, rope, [len(x)])
            if number in config.deepstack:
                deep.append(self._deep_mergers[config.deepstack.index(number)](x))
        return torch.cat([self._merger(x), *deep], -1)

    def _position_embeddings(self, down: Tensor, right: Tensor, height: int, width: int) -> Tensor:
        """Position embeddings of patches, ``[patches, size]``: bilinear interpolation of the grid of learned positions,
        with aligned corners."""
        taps = [_taps(index, length, self._config.grid) for index, length in ((down, height), (right, width))]
        (rows, row_weights), (columns, column_weights) = taps
        indices = (rows[:, :, None] * self._config.grid + columns[:, None]).flatten(1).to(self._device)
        weights = (row_weights[:, :, None] * column_weights[:, None]).flatten(1).to(self._device)
        return (self._positions[indices] * weights[..., None]).sum(1).to(self._dtype)


def _taps(index: Tensor, length: int, grid: int) -> tuple[Tensor, Tensor]:
    """The two nearest learned positions on an axis, and their interpolation weights, ``[patches, 2]`` each.

    Args:
        index: row or column of each patch, out of ``length``.
    """
    exact = index.float() * (grid - 1) / max(length - 1, 1)
    below = exact.floor()
    taps = below[:, None] + torch.arange(2)
    weights = (1 - (exact[:, None] - taps).abs()).clamp(min=0)
    return taps.long().clamp(0, grid - 1), weights


def _block(context: BuildContext, config: Qwen3VisionConfig, number: int, threads: HeadThreads) -> VisionBlock:
    name, size = f"visual.blocks.{number}", config.size
    norms = [LayerNorm(context, f"{name}.norm{i}", size, EPS, bias=True) for i in (1, 2)]
    attention = VisionAttention(context, f"{name}.attn", size, config.heads, threads)
    sizes, gelu_tanh = (size, config.intermediate_size, size), partial(F.gelu, approximate="tanh")
    mlp = VisionMLP(context, f"{name}.mlp.linear_fc1", f"{name}.mlp.linear_fc2", sizes, gelu_tanh)
    return VisionBlock(norms, attention, mlp)


class _Merger:
    """Norm and MLP that merge a square of patches to one feature.

    Args:
        norm_merged: True: normalize the patches of a feature together; False: normalize each patch.
    """

    def __init__(self, context: BuildContext, config: Qwen3VisionConfig, name: str, norm_merged: bool) -> None:
        self._merged = config.size * config.merge_size**2
        self._norm_merged = norm_merged
        self._norm = LayerNorm(context, f"{name}.norm", self._merged if norm_merged else config.size, EPS, bias=True)
        sizes = self._merged, self._merged, config.output_size
        self._mlp = VisionMLP(context, f"{name}.linear_fc1", f"{name}.linear_fc2", sizes, F.gelu)

    def __call__(self, x: Tensor) -> Tensor:
        """Merge ``[patches, size]``. Returns ``[features, output size]``."""
        x = self._norm(x.view(-1, self._merged)) if self._norm_merged else self._norm(x).view(-1, self._merged)
        return self._mlp(x)


class DeepstackMLP:
    """An ``MLPLayer`` that adds image features to its output (DeepStack; Meng et al., 2024).

    Args:
        features: an entry of ``VisionTower.deepstack``.
    """

    def __init__(self, ops: Ops, mlp: MLPLayer, features: Tensor) -> None:
        self._ops = ops
        self._mlp = mlp
        self._features = features

    def __call__(self, x: Tensor, lora_slots: Tensor | None) -> Tensor:
        out = self._mlp(x, lora_slots)
        return self._ops.add_residual(out, self._ops.clone(self._features[: len(out)]))  # later layers modify the sum


def build(context: BuildContext, config: ModelConfig, num_mtp_heads: int) -> Decoder:
    vision, dtype = read_vision_config(config.raw), context.dtype
    deepstack = [
        torch.zeros(context.max_step_tokens, config.hidden_size, dtype=dtype, device=context.device)
        for _ in vision.deepstack
    ]

    def mlp(context: BuildContext, config: ModelConfig, layer: int, name: str) -> MLPLayer:
        inner = feed_forward(context, config, layer, name)
        return DeepstackMLP(context.ops, inner, deepstack[layer]) if layer < len(deepstack) else inner

    decoder = Decoder(context, config, num_mtp_heads, mlp=mlp)
    table = context.rope_table(config.rotary_dim, config.rope_parameters, config.max_position_embeddings)
    mrope = MRoPE(table, context.max_len, config.rope_parameters["mrope_section"], interleaved=True)
    decoder.vision = Qwen3VisionTower(context, vision, mrope, decoder.embed, deepstack)
    return decoder
