"""The weights of a checkpoint, with the names and shapes that layers read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from penstock.checkpoint.model_config import ModelConfig
from penstock.layers import Weights

from .registry import family_of
from .stored import Stored
from .weights import Checkpoint, FusedExperts, PaddedHeads, RenamedWeights, tied_embedding


def adapt(weights: Weights, checkpoint: Checkpoint, config: ModelConfig) -> Weights:
    """Adapt weights with the tensor names of ``checkpoint`` to the names and shapes that layers read."""
    if config.tie_word_embeddings and (find := tied_embedding(checkpoint)):
        weights = RenamedWeights(weights, find)
    if find_stored := _find_stored(config):
        weights = RenamedWeights(weights, find_stored)
    if experts := config.experts:
        weights = FusedExperts(weights, experts.num_experts, experts.projections, experts.fused)
    return pad(weights, config)


def pad(weights: Weights, config: ModelConfig) -> Weights:
    """Pad heads of sizes without kernels."""
    if not config.stored_head_dim:
        return weights
    return PaddedHeads(weights, config.stored_head_dim, config.head_dim)


def stored_matrix(checkpoint: Checkpoint, config: ModelConfig, name: str) -> str:
    """The name in the checkpoint of the tensor with a matrix, without ``.weight``.

    Args:
        name: name in the layers.
    """
    find_stored = _find_stored(config)
    return RenamedWeights(checkpoint, find_stored).stored_matrix(name) if find_stored else name


def _find_stored(config: ModelConfig) -> Callable[[str], Stored] | None:
    find_stored = family_of(config).find_stored
    return find_stored and partial(find_stored, replace(config, head_dim=config.checkpoint_head_dim))
