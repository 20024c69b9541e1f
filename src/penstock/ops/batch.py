"""What an op is told about the step: a flat batch of tokens, and where their keys and values lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KVSpec:
    """What the KV cache of a model holds. ``blocks`` of ``block_size`` tokens in each of ``layers``."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_size: int = 64
    rounded: bool = False
    """Whether keys and values are kept in 8 bits, each of a token and head with a float32 scale of its own."""

    @property
    def bytes_per_layer(self) -> int:
        """Of a block, keys and values."""
        head = self.head_dim + 4 if self.rounded else self.head_dim * self.dtype.itemsize
        return 2 * self.kv_heads * self.block_size * head

    @property
    def bytes_per_block(self) -> int:
        """Of all layers."""
        return self.layers * self.bytes_per_layer


@dataclass(slots=True)
class Queries:
    """Tokens that attend, sequence after sequence: of each the last ones that are in the cache."""

    starts: Tensor
    """``[sequences + 1]`` int32: where each sequence's tokens begin."""
    lengths: Tensor
    """``[sequences]`` int32: tokens of each that are in the cache once this step's are."""
    block_tables: Tensor
    """``[sequences, blocks]`` int32: the blocks of each sequence in order."""


@dataclass(slots=True)
class Batch:
    """The tokens of one step, sequence after sequence, without padding."""

    token_ids: Tensor
    """``[tokens]`` int64."""
    positions: Tensor
    """``[tokens]`` int64, in the token's own sequence."""
    slots: Tensor
    """``[tokens]`` int64: ``block * block_size + offset``, where the token's key and value go."""
    queries: Queries
    """Of all of them."""
    logit_rows: Tensor
    """``[rows]`` int64: tokens of the flat batch whose scores are wanted."""
    logit_queries: Queries
    """Of those."""
    adapters: Tensor | None = None
    """``[tokens]`` int32: the slot of each token's adapter, -1 where it has none; None where no token has one."""
    logit_adapters: Tensor | None = None
    """``[rows]``: of those whose scores are wanted."""


Step = Callable[[Batch], Tensor]
"""A model but for its scores: the last hidden states of the tokens whose scores are wanted, ``[rows, hidden]``."""
