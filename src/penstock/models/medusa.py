"""Medusa heads (Cai et al., 2024): residual blocks on the last hidden state, one head per later token."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from itertools import count, takewhile
from typing import Any, Self
from weakref import proxy

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core.errors import invalid
from penstock.layers import BuildContext, ColumnParallelLinear, Embedding, Weights
from penstock.ops import Batch
from penstock.parallel import shard_outputs

from .model import LanguageModelHead, Model

PREFIXES = ("medusa_head.", "medusa_heads.", "")
"""Prefixes of tensor names, before the index of a head."""


class MedusaHead:
    """A ``DraftHead`` for one token of the draft: residual blocks ``x + silu(linear(x))``, and a language model head.

    Args:
        blocks: names of the blocks' linear layers in the checkpoint.
        lm_head: name of the language model head; empty: the head of the model is used.
    """

    attention = None
    recurrent = False

    def __init__(self, context: BuildContext, model: Model, blocks: list[str], lm_head: str) -> None:
        size = model.config.hidden_size
        self._model: Model = proxy(model)
        shards = [shard_outputs(context.group, size)]
        self._blocks = [
            ColumnParallelLinear(
                context, [name], size, shards, bias=context.weights.has(f"{name}.bias"), gather_output=True
            )
            for name in blocks
        ]
        self._lm_head = Embedding(context, lm_head, model.config.vocab_size, size) if lm_head else None

    def with_model(self, model: Model) -> Self:
        """Copy of the head for a model with other weights. The copy may use that model's language model head."""
        other = copy(self)
        other._model = proxy(model)
        return other

    def combine_hidden_states(self, states: Tensor) -> Tensor:
        return states

    def forward(self, batch: Batch, states: Tensor, cache: Any) -> Tensor:
        """Select the rows ``batch.logits_indices``. The next head reads the same rows."""
        return states[batch.logits_indices]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return self._head.logits(self._residual_blocks(hidden))

    @torch.inference_mode()
    def argmax(self, hidden: Tensor, bitmask: Tensor | None = None) -> Tensor:
        return self._head.argmax(self._residual_blocks(hidden), bitmask)

    @property
    def _head(self) -> LanguageModelHead:
        return self._lm_head or self._model

    def _residual_blocks(self, x: Tensor) -> Tensor:
        for block in self._blocks:
            x = x + F.silu(block(x))
        return x


def build_medusa_heads(context: BuildContext, raw: Mapping[str, Any], model: Model) -> list[MedusaHead]:
    """Build all heads of a checkpoint, in the published layout or the layout of vLLM.

    Args:
        raw: ``config.json`` of the heads. Its numbers of heads and layers may be wrong: the tensors determine them.

    Raises ``PenstockError`` (``invalid``) for missing tensors, or heads with a smaller vocabulary.
    """
    vocabulary = int(raw.get("truncated_vocab_size") or model.config.vocab_size)
    if vocabulary != model.config.vocab_size:
        message = f"the Medusa heads have a vocabulary of {vocabulary}, the model {model.config.vocab_size}"
        raise invalid("speculative_config", f"{message}; use heads that were trained for this model")
    heads: list[MedusaHead] = []
    while names := _names(context.weights, len(heads)):
        heads.append(MedusaHead(context, model, *names))
    return heads


def _names(weights: Weights, head: int) -> tuple[list[str], str] | None:
    """Names of a head's blocks, and of its language model head (empty: it uses the model's); None if it is missing."""
    for prefix in PREFIXES:
        if blocks := _present(weights, f"{prefix}{head}.{{}}.linear"):
            return blocks, _if_present(weights, f"{prefix}{head}.{len(blocks)}")
        if blocks := _present(weights, f"{prefix}blocks.{head}.layers.{{}}"):
            lm_head = _if_present(weights, f"{prefix}lm_heads.{head}")
            return blocks, lm_head or _if_present(weights, f"{prefix}lm_heads.0")  # shared by heads (original_lm_head)
    return None


def _present(weights: Weights, pattern: str) -> list[str]:
    """Names of the matrices of a pattern with index 0, 1, ..., up to the first missing matrix."""
    return list(takewhile(lambda name: weights.has(f"{name}.weight"), map(pattern.format, count())))


def _if_present(weights: Weights, name: str) -> str:
    return name if weights.has(f"{name}.weight") else ""
