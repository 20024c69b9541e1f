"""What models have in common that put a vision tower and a projector before a language model of another family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from penstock.core import Code, PenstockError
from penstock.layers import BuildContext
from penstock.layers.vision import Linear

from . import llama, mistral, qwen2, qwen3
from .config import ModelConfig
from .decoder import Decoder
from .registry import Family
from .vit import ACTIVATIONS

TEXT: dict[str, Family] = {
    "llama": llama.FAMILY,
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


class Projector:
    """Two linear layers that make features of a tower's outputs.

    Args:
        context: of ``tower_context``.
    """

    def __init__(self, context: BuildContext, config: ModelConfig, inputs: int, bias: bool) -> None:
        self._activation = projector_activation(config.raw)
        self._linear_1 = Linear(context, f"{PROJECTOR}.linear_1", inputs, config.hidden_size, bias)
        self._linear_2 = Linear(context, f"{PROJECTOR}.linear_2", config.hidden_size, config.hidden_size, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """``[features, inputs]`` to ``[features, hidden]``."""
        return self._linear_2(ACTIVATIONS[self._activation](self._linear_1(x)))


def projector_activation(raw: Mapping[str, Any]) -> str:
    """``projector_hidden_act``. Raises ``PenstockError`` (``unsupported``) for one that is not known."""
    if (name := str(raw["projector_hidden_act"])) not in ACTIVATIONS:
        raise PenstockError(Code.UNSUPPORTED, f"projector_hidden_act is {name[:40]!r}", "model")
    return name


def build_text(context: BuildContext, config: ModelConfig, num_mtp_heads: int) -> Decoder:
    """The language model, whose ``vision`` is to be set."""
    return Decoder(context, config, num_mtp_heads)
