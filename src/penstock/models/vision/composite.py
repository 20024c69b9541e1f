"""Builders of models with a vision tower, a projector, and a language model of another family."""

from __future__ import annotations

from collections.abc import Callable

from penstock.checkpoint.model_config import ModelConfig
from penstock.layers import BuildContext
from penstock.layers.vision import VisionMLP

from ..composite import PROJECTOR, projector_activation
from ..decoder import Decoder
from ..vision_tower import Embed, VisionTower, tower_context
from .vit import ACTIVATIONS


def projector(context: BuildContext, config: ModelConfig, inputs: int, bias: bool) -> VisionMLP:
    """Projector of two linear layers, ``[features, inputs]`` to ``[features, hidden]``.

    Args:
        context: result of ``tower_context``.
    """
    names = f"{PROJECTOR}.linear_1", f"{PROJECTOR}.linear_2"
    sizes = inputs, config.hidden_size, config.hidden_size
    return VisionMLP(context, *names, sizes, ACTIVATIONS[projector_activation(config.raw)], bias)


def build(
    context: BuildContext,
    config: ModelConfig,
    num_mtp_heads: int,
    tower: Callable[[BuildContext, ModelConfig, Embed], VisionTower],
) -> Decoder:
    """``Family.build`` of a language model with a vision tower.

    Args:
        tower: builds the tower from a ``tower_context``, the configuration, and ``Model.embed``.
    """
    decoder = Decoder(context, config, num_mtp_heads)
    decoder.vision = tower(tower_context(context), config, decoder.embed)
    return decoder
