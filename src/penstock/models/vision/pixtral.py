"""Vision tower of Pixtral (Agrawal et al., 2024) and Mistral Small 3.1: an encoder with 2-D rotary embedding, for
images of any size. Mistral Small 3.1 merges patches."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from penstock.checkpoint.model_config import ModelConfig
from penstock.checkpoint.vision_config import feature_layers, rope_theta
from penstock.core.multimodal import ImageInput
from penstock.layers import BuildContext, RMSNorm
from penstock.layers.vision import Linear

from ..composite import PROJECTOR, TOWER
from ..families.pixtral import merge_size, read_vision
from ..vision_tower import Embed, TokenPositions
from . import composite
from .composite import projector
from .vit import ViT


class PixtralVisionTower(TokenPositions):
    """The ``VisionTower`` of Pixtral. The tokens after each row of an image keep their embeddings.

    Args:
        context: result of ``tower_context``.
        embed: embedding of the language model.
    """

    def __init__(self, context: BuildContext, config: ModelConfig, embed: Embed) -> None:
        raw = config.raw
        super().__init__(embed)
        self.placeholder = int(raw["image_token_index"])
        self._config = vision = read_vision(raw)
        self._theta = rope_theta(raw["vision_config"])
        layers = feature_layers(raw["vision_feature_layer"], vision.depth)
        self._encoder = ViT(context, TOWER, vision, layers)
        self._merger = _Merger(context, config, vision.size, merge) if (merge := merge_size(raw)) else None
        self._merge_size = max(merge, 1)
        bias = bool(raw["multimodal_projector_bias"])
        self._projector = projector(context, config, len(layers) * vision.size, bias)

    @torch.inference_mode()
    def encode(self, image: ImageInput) -> Tensor:
        """See ``VisionTower.encode``. The rows of tokens that keep their embeddings are zeros."""
        patch = self._config.patch_size
        rows, columns = image.height // patch, image.width // patch
        rope = _rope(rows, columns, self._config.size // self._config.heads, self._theta)
        x = self._encoder(image, rope)[0]
        if self._merger:
            x = self._merger(x, rows, columns)
        features = self._projector(x).view(rows // self._merge_size, columns // self._merge_size, -1)
        return torch.nn.functional.pad(features, (0, 0, 0, 1)).flatten(0, 1)


class _Merger:
    """Norm of patches, followed by a linear layer that merges each square of patches to one vector.

    Args:
        merge: edge of a square in patches.
    """

    def __init__(self, context: BuildContext, config: ModelConfig, size: int, merge: int) -> None:
        self._size, self._merge = size, merge
        self._norm = RMSNorm(context, f"{PROJECTOR}.norm", size, config.rms_norm_eps)
        name = f"{PROJECTOR}.patch_merger.merging_layer"
        self._layer = Linear(context, name, size * merge**2, size, bias=False)

    def __call__(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """Merge ``[rows * columns, size]``. Returns ``[squares, size]``."""
        merge = self._merge
        grid = self._norm(x).view(rows // merge, merge, columns // merge, merge, self._size)
        return self._layer(grid.permute(0, 2, 4, 1, 3).reshape(-1, self._size * merge**2))


def _rope(rows: int, columns: int, head_dim: int, theta: float) -> Tensor:
    """Cosines and sines, ``[2, patches, head_dim]`` float32. Rows use even frequency indices, columns odd indices."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    down = torch.arange(rows).repeat_interleave(columns)
    right = torch.arange(columns).repeat(rows)
    angles = torch.cat((torch.outer(down.float(), frequencies[::2]), torch.outer(right.float(), frequencies[1::2])), -1)
    angles = torch.cat((angles, angles), -1)
    return torch.stack((angles.cos(), angles.sin()))


build = partial(composite.build, tower=PixtralVisionTower)
