"""Pixtral (Agrawal et al., 2024) and Mistral Small 3.1: an encoder with rotary positions in two dimensions, for images
of any size; the latter merges patches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.model_config import ModelConfig
from penstock.core.multimodal import ImageInput
from penstock.layers import BuildContext, RMSNorm
from penstock.layers.vision import Linear

from ..vision_tower import Embed, TokenPositions, rope_theta
from .composite import PROJECTOR, composite_family, projector, projector_activation, read_text
from .stored import TOWER
from .vit import ViT, ViTConfig, ViTNames, feature_layers, read_vit

NAMES = ViTNames(
    patches="patch_conv",
    pre_norm="ln_pre",
    layers="transformer.layers",
    norms=("attention_norm", "ffn_norm"),
    attention="attention",
    output="o_proj",
    mlp="feed_forward",
)


def read_vision(raw: Mapping[str, Any]) -> ViTConfig:
    """The encoder's configuration. Raises ``KeyError``, ``TypeError`` or ``ValueError`` where it is wrong."""
    config = read_vit(
        raw["vision_config"],
        image_size=0,
        eps=1e-5,
        rms_norm=True,
        gated=True,
        patch_bias=False,
        pre_norm=True,
        qkv_bias=False,
        output_bias=False,
        names=NAMES,
    )
    if config.size // config.heads % 4:
        raise ValueError(f"vision_config has {config.heads} heads of {config.size} elements, no multiples of 4 each")
    if raw.get("vision_feature_select_strategy", "full") != "full":
        raise ValueError("vision_feature_select_strategy must be full for an encoder without class token")
    return config


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    vision = read_vision(raw)
    layers = feature_layers(raw["vision_feature_layer"], vision.depth)
    if _merge_size(raw) and len(layers) > 1:
        raise ValueError("vision_feature_layer must be a single one where patches are merged")
    projector_activation(raw)
    return read_text(raw)


def _merge_size(raw: Mapping[str, Any]) -> int:
    """Patches of a feature's edge; 0 where they are not merged."""
    return int(raw["spatial_merge_size"]) if raw.get("model_type") == "mistral3" else 0


class PixtralVisionTower(TokenPositions):
    """A ``VisionTower``. Tokens between an image's rows, and the one behind it, keep their own embeddings.

    Args:
        context: of ``tower_context``.
        embed: of the language model.
    """

    def __init__(self, context: BuildContext, config: ModelConfig, embed: Embed) -> None:
        raw = config.raw
        super().__init__(embed)
        self.placeholder = int(raw["image_token_index"])
        self._config = vision = read_vision(raw)
        self._theta = rope_theta(raw["vision_config"])
        layers = feature_layers(raw["vision_feature_layer"], vision.depth)
        self._encoder = ViT(context, TOWER, vision, layers)
        self._merger = _Merger(context, config, vision.size, merge) if (merge := _merge_size(raw)) else None
        self._merge_size = max(merge, 1)
        bias = bool(raw["multimodal_projector_bias"])
        self._projector = projector(context, config, len(layers) * vision.size, bias)

    @torch.inference_mode()
    def encode(self, image: ImageInput) -> Tensor:
        """As ``VisionTower.encode``; zeros for the tokens that have no features."""
        patch = self._config.patch_size
        rows, columns = image.height // patch, image.width // patch
        rope = _rope(rows, columns, self._config.size // self._config.heads, self._theta)
        x = self._encoder(image, rope)[0]
        if self._merger:
            x = self._merger(x, rows, columns)
        features = self._projector(x).view(rows // self._merge_size, columns // self._merge_size, -1)
        return torch.nn.functional.pad(features, (0, 0, 0, 1)).flatten(0, 1)


class _Merger:
    """Norms patches, and makes one vector of those of a square.

    Args:
        merge: patches of its edge.
    """

    def __init__(self, context: BuildContext, config: ModelConfig, size: int, merge: int) -> None:
        self._size, self._merge = size, merge
        self._norm = RMSNorm(context, f"{PROJECTOR}.norm", size, config.rms_norm_eps)
        name = f"{PROJECTOR}.patch_merger.merging_layer"
        self._layer = Linear(context, name, size * merge**2, size, bias=False)

    def __call__(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """``[rows * columns, size]`` to ``[squares, size]``."""
        merge = self._merge
        grid = self._norm(x).view(rows // merge, merge, columns // merge, merge, self._size)
        return self._layer(grid.permute(0, 2, 4, 1, 3).reshape(-1, self._size * merge**2))


def _rope(rows: int, columns: int, head_dim: int, theta: float) -> Tensor:
    """Cosines and sines, ``[2, patches, head_dim]`` float32: every second frequency is of the row, and those between of
    the column."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    down = torch.arange(rows).repeat_interleave(columns)
    right = torch.arange(columns).repeat(rows)
    angles = torch.cat((torch.outer(down.float(), frequencies[::2]), torch.outer(right.float(), frequencies[1::2])), -1)
    angles = torch.cat((angles, angles), -1)
    return torch.stack((angles.cos(), angles.sin()))


FAMILY = composite_family("Mistral3ForConditionalGeneration", read_config, PixtralVisionTower)
