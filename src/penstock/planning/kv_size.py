"""Sums over memory: what weights take, what a token keeps, and what a cache of so many blocks is good for.

The formulas are those of PaddleNLP's and FastDeploy's documents, under our names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.core.quantization import SCHEMES, Format

from .kv_spec import ITEM_BYTES, SCALE_BYTES, KVSpec
from .model_size import Shape

MOST_SEQS = 128
"""Sequences at the same time that both documents allow at most."""
MARGIN = 128
"""Tokens that PaddleNLP reckons with for a prompt beyond its own."""


def blocks_of_sequences(sequences: float, longest: int, block_size: int) -> int:
    """Blocks for so many sequences of the longest length, as PaddleNLP's ``BLOCK_BS`` counts them."""
    return int(sequences * math.ceil(longest / block_size))


def weight_bytes(shape: Shape, quantization: str = "none", dtype: str = "auto", mtp: bool = False) -> int:
    """Bytes of a model's matrices; norms and biases are too few to count.

    Args:
        quantization: a name of ``SCHEMES``.
        dtype: that the model computes in; ``auto`` is the checkpoint's.
        mtp: whether the layers for multi-token prediction are loaded.
    """
    layers = shape.layer_weights + (shape.ahead_weights if mtp else 0)
    scheme, computed = SCHEMES[quantization], _computed(shape, dtype)

    def weight(format: Format) -> float:
        if not format.bits:
            return ITEM_BYTES[computed]
        return format.bits / 8 + SCALE_BYTES / (format.group_size or shape.hidden)

    return int(layers * weight(scheme.layers) + shape.embedding_weights * weight(scheme.head))


def kv_specs(
    shape: Shape,
    block_size: int = 64,
    kv_cache_dtype: str = "auto",
    dtype: str = "auto",
    mtp: bool = False,
    ranks: int = 1,
) -> list[KVSpec]:
    """What each layer of a model keeps in the KV cache of one rank.

    Args:
        kv_cache_dtype: as the option: ``auto`` or ``int8``.
        dtype: that the model computes in; ``auto`` is the checkpoint's.
        mtp: whether the layers for multi-token prediction are loaded.
        ranks: tensor-parallel ranks that share the heads. A head is kept by one rank at least, a latent vector by each.
    """
    heads, quantized = math.ceil(shape.kv_heads / ranks), kv_cache_dtype == "int8"
    spec = KVSpec(heads, shape.kv_dim, _computed(shape, dtype), block_size, quantized, latent=shape.latent)
    return [spec] * (shape.layers + (shape.ahead_layers if mtp else 0))


def _computed(shape: Shape, dtype: str) -> str:
    """The dtype that the model computes in."""
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
