"""What models have in common that put a vision tower and a projector before a language model of another family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from penstock.checkpoint.model_config import ModelConfig
from penstock.core import Code, PenstockError
from penstock.layers import BuildContext
from penstock.layers.vision import VisionMLP

from ..decoder import Decoder
from ..families import llama, ministral3, mistral, qwen2, qwen3
from ..registry import Family
from ..vision_tower import Embed, VisionTower, tower_context
from .stored import find_stored
from .vit import ACTIVATIONS

TEXT: dict[str, Family] = {
    "llama": llama.FAMILY,
    "ministral3": ministral3.FAMILY,
    "mistral": mistral.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
}
"""Families of language models, by ``model_type`` of ``text_config``."""
PROJECTOR = "multi_modal_projector"


def read_text(raw: Mapping[str, Any]) -> ModelConfig:
    """The language model's configuration. Raises ``PenstockError`` (``unsupported``) where it is of another family."""
    kind = str(raw["text_config"].get("model_type"))
    if kind not in TEXT:
        words = f"the language model {kind[:40]!r} of {raw.get('model_type')}; known are {', '.join(TEXT)}"
        raise PenstockError(Code.UNSUPPORTED, words, "model")
    return replace(TEXT[kind].read_config(raw), has_vision=True)


def projector(context: BuildContext, config: ModelConfig, inputs: int, bias: bool) -> VisionMLP:
    """Two linear layers that make features of a tower's outputs, ``[features, inputs]`` to ``[features, hidden]``.

    Args:
        context: of ``tower_context``.
    """
    names = f"{PROJECTOR}.linear_1", f"{PROJECTOR}.linear_2"
    sizes = inputs, config.hidden_size, config.hidden_size
    return VisionMLP(context, *names, sizes, ACTIVATIONS[projector_activation(config.raw)], bias)


def projector_activation(raw: Mapping[str, Any]) -> str:
    """``projector_hidden_act``. Raises ``PenstockError`` (``unsupported``) for one that is not known."""
    if (name := str(raw["projector_hidden_act"])) not in ACTIVATIONS:
        raise PenstockError(Code.UNSUPPORTED, f"projector_hidden_act is {name[:40]!r}", "model")
    return name


def composite_family(
    architecture: str,
    read_config: Callable[[Mapping[str, Any]], ModelConfig],
    tower: Callable[[BuildContext, ModelConfig, Embed], VisionTower],
) -> Family:
    """The family of a language model with a vision tower, which is made of a ``tower_context``."""

    def build(context: BuildContext, config: ModelConfig, num_mtp_heads: int) -> Decoder:
        decoder = Decoder(context, config, num_mtp_heads)
        decoder.vision = tower(tower_context(context), config, decoder.embed)
        return decoder

    return Family((architecture,), read_config=read_config, build=build, find_stored=find_stored)
