"""Sums over memory: what weights take, what a token keeps, and what a cache of so many blocks is good for.

The formulas are those of PaddleNLP's and FastDeploy's documents, under our names.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from .model_size import BYTES, Shape

SCALE = 4
"""Bytes of a scale, by which rounded numbers are multiplied."""
MOST_SEQS = 128
"""Sequences at the same time that both documents allow at most."""
MARGIN = 128
"""Tokens that PaddleNLP reckons with for a prompt beyond its own."""


def blocks_of_sequences(sequences: float, longest: int, block_size: int) -> int:
    """Blocks for so many sequences of the longest length, as PaddleNLP's ``BLOCK_BS`` counts them."""
    return int(sequences * math.ceil(longest / block_size))


def weight_bytes(shape: Shape, quantization: str = "none", dtype: str = "auto", heads_ahead: bool = False) -> int:
    """Bytes of a model's matrices; norms and biases are too few to count.

    Args:
        quantization: as the option. Embedding and head then keep 8 bits.
        heads_ahead: whether the layers that guess ahead are loaded.
    """
    layers = shape.layer_weights + (shape.ahead_weights if heads_ahead else 0)
    if quantization == "none":
        return (layers + shape.embedding_weights) * BYTES[_computed(shape, dtype)]
    bits = int(re.findall(r"\d", quantization)[0])
    group = 32 if quantization.endswith("-g32") else 128 if bits == 4 else shape.hidden
    return int(layers * (bits / 8 + SCALE / group) + shape.embedding_weights * (1 + SCALE / shape.hidden))


def token_bytes(
    shape: Shape, kv_cache_dtype: str = "auto", dtype: str = "auto", heads_ahead: bool = False, ranks: int = 1
) -> int:
    """Bytes that a token keeps in the cache of one device.

    Args:
        kv_cache_dtype: as the option; ``int8`` has a scale for each head, of keys and of values.
        ranks: devices among which heads are divided; a latent vector is kept by each.
    """
    heads = math.ceil(shape.kv_heads / ranks)
    width = shape.kv_width * heads // shape.kv_heads
    if kv_cache_dtype == "int8":
        kept = width + SCALE * heads * (1 if shape.latent else 2)
    else:
        kept = width * BYTES[_computed(shape, dtype)]
    return kept * (shape.layers + (shape.ahead_layers if heads_ahead else 0))


def _computed(shape: Shape, dtype: str) -> str:
    """The type that is computed in."""
    return shape.dtype if dtype == "auto" else dtype


@dataclass(frozen=True)
class CachePlan:
    """A cache of blocks, and what it is good for."""

    blocks: int
    block_size: int
    token_bytes: int
    longest: int
    """Tokens that a sequence may have."""
    ratio: float
    """Share of the blocks that admitting prompts may fill."""

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_size

    @property
    def bytes(self) -> int:
        return self.tokens * self.token_bytes

    @property
    def sequences(self) -> float:
        """Of the longest length: PaddleNLP's ``BLOCK_BS``."""
        return self.tokens / self.longest

    @property
    def prompt_blocks(self) -> int:
        """FastDeploy's ``prefill_kvcache_block_num``."""
        return int(self.blocks * self.ratio)

    def max_num_seqs(self, output: float) -> int:
        """FastDeploy's formula: as many answers of this average length as growth has blocks for, at most 128."""
        room = (self.blocks - self.prompt_blocks) * self.block_size
        return max(min(int(room / output), MOST_SEQS), 1)

    def batch_size(self, prompt: float, output: float) -> int:
        """PaddleNLP's formula for ``BATCH_SIZE``: as many of these average lengths as fit, at most 128."""
        return max(min(int(self.tokens / (prompt + output)), MOST_SEQS), 1)


def kv_cache_ratio(prompt: float, output: float) -> float:
    """FastDeploy's formula: the prompts' share of all tokens."""
    return prompt / (prompt + output)


def block_ratio(prompt: float, output: float, extend: float = 1.0) -> float:
    """PaddleNLP's formula for ``BLOCK_RATIO``, at most 1.

    Args:
        extend: 1.1 to 1.3 where prompts differ much in length (``EXTEND_RATIO``).
    """
    return min((prompt + MARGIN) / (prompt + output) * extend, 1.0)
