"""The KV cache entry of an attention layer, and its size in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number, by the name of its dtype."""
SCALE_BYTES = 4
"""Bytes of the float32 scale of a quantized vector."""


@dataclass(frozen=True)
class KVSpec:
    """The KV cache of one layer on one rank.

    A block holds ``block_size`` tokens. Of each token it keeps a key and a value vector a head, or, with ``latent``,
    one vector that all heads share (multi-head latent attention; DeepSeek-AI, 2024).
    """

    kv_heads: int
    """Heads of this rank's keys and values; 1 with ``latent``."""
    head_dim: int
    """Numbers in a vector; with ``latent``, of the compressed keys and values and the rotary key together."""
    dtype: str
    """Dtype of unquantized vectors: a key of ``ITEM_BYTES``."""
    block_size: int = 64
    """Tokens a block."""
    quantized: bool = False
    """Whether vectors are kept in int8, each with a float32 scale."""
    window: int = 0
    """Positions that a query sees, its own included (sliding window); 0 is all."""
    latent: bool = False

    @property
    def bytes_per_token(self) -> int:
        vector = self.head_dim + SCALE_BYTES if self.quantized else self.head_dim * ITEM_BYTES[self.dtype]
        return (1 if self.latent else 2) * self.kv_heads * vector

    @property
    def bytes_per_block(self) -> int:
        return self.block_size * self.bytes_per_token


def bytes_per_token(specs: Sequence[KVSpec]) -> int:
    """Bytes of a token in the caches of all layers together."""
    return sum(spec.bytes_per_token for spec in specs)


def bytes_per_block(specs: Sequence[KVSpec]) -> int:
    """Bytes of a block in the caches of all layers together."""
    return sum(spec.bytes_per_block for spec in specs)
