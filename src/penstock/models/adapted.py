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
    """Adapt weights with the tensor names of ``checkpoint`` to the names and shapes that layers read. Modules of
    transformers read them by the names in the checkpoint."""
    if config.model_impl == "transformers":
        return weights
    if config.tie_word_embeddings and (find := tied_embedding(checkpoint)):
        weights = RenamedWeights(weights, find)
    if find_stored := _with_config(family_of(config).find_stored, config):
        weights = RenamedWeights(weights, find_stored)
    if experts := config.experts:
        weights = FusedExperts(weights, experts.num_experts, experts.projections, experts.fused)
    return _pad(weights, config)


def adapt_gguf(weights: Weights, config: ModelConfig) -> Weights:
    """Adapt the weights of a GGUF file to the names and shapes that layers read."""
    find_gguf = _with_config(family_of(config).find_gguf, config)
    return _pad(RenamedWeights(weights, find_gguf) if find_gguf else weights, config)


def _pad(weights: Weights, config: ModelConfig) -> Weights:
    """Pad heads of sizes without kernels."""
    if not config.stored_head_dim:
        return weights
    return PaddedHeads(weights, config.stored_head_dim, config.head_dim)


def stored_matrix(checkpoint: Checkpoint, config: ModelConfig, name: str) -> str:
    """The name in the checkpoint of the tensor with a matrix, without ``.weight``.

    Args:
        name: name in the layers.
    """
    find_stored = _with_config(family_of(config).find_stored, config)
    return RenamedWeights(checkpoint, find_stored).stored_matrix(name) if find_stored else name


def _with_config(
    find: Callable[[ModelConfig, str], Stored] | None, config: ModelConfig
) -> Callable[[str], Stored] | None:
    return find and partial(find, replace(config, head_dim=config.checkpoint_head_dim))
