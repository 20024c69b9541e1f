"""Vision tower and experts of ERNIE 4.5 VL (Baidu, 2025). Patches have one frame; features have two."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.checkpoint.model_config import ModelConfig
from penstock.checkpoint.vision_config import VisionConfig
from penstock.core.multimodal import ImageInput
from penstock.core.quantization import Format
from penstock.layers import BuildContext, LayerNorm, MLPLayer, RMSNorm, Weights
from penstock.layers.mrope import MRoPE
from penstock.layers.vision import HeadThreads, Linear, VisionAttention, VisionBlock, VisionMLP, axial_rope, quick_gelu
from penstock.ops import Batch, LayerExport, QuantizedWeight

from ..decoder import Decoder
from ..experts import feed_forward
from ..families.ernie4_5_vl import EPS, FRAMES, read_vision_config
from ..layer import MLPFactory, dense_mlp
from ..vision_tower import Embed, MRoPEPositions, tower_context
from .patches import normalized_patches, patch_positions


class ErnieVisionTower(MRoPEPositions):
    """A ``VisionTower``. Every rank computes the whole tower, which is not quantized.

    Args:
        mrope: M-RoPE of the language model.
        embed: embedding of the language model.
        eps: epsilon of the norms in the language model.
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
    """An MLP of the resampler, followed by a layer norm."""

    def __init__(self, context: BuildContext, name: str, inputs: int, outputs: int) -> None:
        self._mlp = VisionMLP(context, f"{name}.0", f"{name}.2", (inputs, outputs, outputs), F.gelu)
        self._norm = LayerNorm(context, f"{name}.3", outputs, EPS, bias=True)

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(self._mlp(x))


KINDS = ("text_moe", "vision_moe")
"""Module names of a layer's text experts and image experts. Checkpoints number the experts in this order."""
MODULE = re.compile(rf"(.+\.mlp)\.({'|'.join(KINDS)})\.(.+)")
VISION_TOKENS = {
    "image_token_id": 100295,
    "image_start_token_id": 101304,
    "image_end_token_id": 101305,
    "video_token_id": 103367,
    "video_start_token_id": 101306,
    "video_end_token_id": 101307,
}
"""Field of ``config.json`` → default id of a token that is routed to the image experts."""


def build(context: BuildContext, config: ModelConfig, num_mtp_heads: int) -> Decoder:
    assert config.experts
    vision_experts = replace(config.experts, intermediate_size=config.experts.vision_intermediate_size, shared_size=0)
    experts_context = replace(context, weights=_ExpertWeights(context.weights, config.experts.num_experts))
    image_tokens = ImageTokens()

    def mlp(context: BuildContext, config: ModelConfig, layer: int, name: str) -> MLPLayer:
        assert config.experts
        if layer in config.experts.dense_layers:
            return dense_mlp(context, config, layer, name)
        sets = []
        for kind, experts in zip(KINDS, (config.experts, vision_experts), strict=True):
            kind_config = replace(config, experts=replace(experts, module=f"mlp.{kind}", shared_size=0))
            sets.append(feed_forward(experts_context, kind_config, layer, name))
        shared = None
        if size := config.experts.shared_size:
            shared = dense_mlp(context, replace(config, intermediate_size=size), layer, f"{name}.shared_experts")
        return ModalityExperts(context, sets[0], sets[1], shared, image_tokens, layer == config.num_layers - 1)

    tokens = torch.tensor([int(config.raw.get(name, token)) for name, token in VISION_TOKENS.items()])
    decoder = ErnieDecoder(context, config, num_mtp_heads, mlp, image_tokens, tokens.to(context.device))
    table = context.rope_table(config.head_dim, config.rope_parameters, config.max_position_embeddings)
    mrope = MRoPE(table, context.max_len, config.rope_parameters["mrope_section"], alternating=True)
    vision = read_vision_config(config.raw)
    decoder.vision = ErnieVisionTower(context, vision, mrope, decoder.embed, config.rms_norm_eps)
    return decoder


@dataclass
class ImageTokens:
    """Masks of the image tokens in a step."""

    all: Tensor | None = None
    """True for image tokens, ``[tokens]`` bool."""
    outputs: Tensor | None = None
    """The same for the tokens in ``batch.logits_indices``, ``[rows]`` bool, used in the last layer."""


class ErnieDecoder(Decoder):
    """A ``Decoder`` that computes the mask of image tokens for its layers.

    Args:
        image_tokens: masks, updated in each step.
        token_ids: ids of image tokens, int64.
    """

    def __init__(
        self,
        context: BuildContext,
        config: ModelConfig,
        num_mtp_heads: int,
        mlp: MLPFactory,
        image_tokens: ImageTokens,
        token_ids: Tensor,
    ) -> None:
        super().__init__(context, config, num_mtp_heads, mlp=mlp)
        self._image_tokens = image_tokens
        self._token_ids = token_ids

    def forward(self, batch: Batch, cache: list[Any], export: Sequence[LayerExport] = ()) -> Tensor:
        self._image_tokens.all = torch.isin(batch.token_ids, self._token_ids)
        self._image_tokens.outputs = self._image_tokens.all[batch.logits_indices]
        return super().forward(batch, cache, export)


@dataclass(frozen=True)
class ModalityExperts:
    """An ``MLPLayer`` with experts for text, experts for images, and shared experts for all tokens."""

    context: BuildContext
    text: MLPLayer
    vision: MLPLayer
    shared: MLPLayer | None
    image_tokens: ImageTokens
    is_last: bool
    """True in the last layer of the model."""

    def __call__(self, x: Tensor, lora_slots: Tensor | None) -> Tensor:
        is_image = self.image_tokens.outputs if self.is_last else self.image_tokens.all
        assert is_image is not None
        if not is_image.any():
            out = self.text(x, lora_slots)
        else:
            out = torch.empty_like(x)
            for experts, tokens in ((self.text, ~is_image), (self.vision, is_image)):
                rows = tokens.nonzero().flatten()
                if len(rows):
                    out[rows] = experts(x[rows], None if lora_slots is None else lora_slots[rows])
        if self.shared is None:
            return out
        return self.context.ops.add_residual(self.shared(x, lora_slots), self.context.ops.clone(out))


class _ExpertWeights:
    """``layers.Weights`` with separate names for the experts and routers of text and images. In checkpoints, image
    experts are numbered after text experts, and routers are transposed."""

    def __init__(self, base: Weights, num_experts: int) -> None:
        self._base = base
        self._num_experts = num_experts

    @property
    def version(self) -> str:
        return self._base.version

    def read(self, name: str, *shape: int, rows: tuple[int, int] | None = None, as_stored: bool = False) -> Tensor:
        match = MODULE.fullmatch(name)
        first, end = rows or (0, shape[0])
        if match and match[3] == "gate.weight":
            stored = f"{match[1]}.gate.weight{'_1' if match[2] == KINDS[1] else ''}"
            return self._base.read(stored, *reversed(shape), as_stored=as_stored).T[first:end]
        if match and match[3].startswith("moe_statics."):
            both = self._base.read(f"{match[1]}.{match[3]}", 2, *shape, as_stored=as_stored)
            return both[KINDS.index(match[2]), first:end]
        return self._base.read(self._stored(name), *shape, rows=rows, as_stored=as_stored)

    def has(self, name: str) -> bool:
        return self._base.has(self._stored(name))

    def format_of(self, name: str) -> Format:
        return self._base.format_of(self._stored(name))

    def read_quantized(self, name: str, outputs: int, inputs: int, rows: tuple[int, int]) -> QuantizedWeight | Tensor:
        return self._base.read_quantized(self._stored(name), outputs, inputs, rows)

    def _stored(self, name: str) -> str:
        """Name of an expert's matrix in the checkpoint; other names are returned unchanged."""
        if not (match := MODULE.fullmatch(name)) or not match[3].startswith("experts."):
            return name
        _, number, rest = match[3].split(".", 2)
        return f"{match[1]}.experts.{int(number) + KINDS.index(match[2]) * self._num_experts}.{rest}"
