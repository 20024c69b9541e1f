"""The KV cache entry of an attention layer, its size in bytes, and its place in a transfer buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number, by the name of its dtype."""
SCALE_BYTES = 4
"""Bytes of the float32 scale of a quantized vector."""
KV_QUANTIZATION = {"auto": "", "int8": "int8", "fp8": "fp8", "fp8_e4m3": "fp8"}
"""``KVSpec.quantization`` for each value of the option ``kv_cache_dtype``."""
PROGRESS_BITS = 16
"""Lower bits of the number by which a rank tells how many layers of which step it has exported
(``ops.LayerExport.progress``)."""
CANONICAL_LAYOUT = 1
"""Version of the layout in which KV caches are exchanged (``TransferLayout``)."""


@dataclass(frozen=True)
class KVSpec:
    """The KV cache of one layer on one rank.

    A block holds ``block_size`` tokens. Of each token it keeps a key and a value vector a head, or, with ``latent``,
    one vector that all heads share: their key, of which the first ``latent`` numbers are their value (multi-head latent
    attention; DeepSeek-AI, 2024).
    """

    kv_heads: int
    """Heads of this rank's keys and values; 1 with ``latent``."""
    head_dim: int
    """Numbers in a vector; with ``latent``, of the compressed keys and values and the rotary key together."""
    dtype: str
    """Dtype of unquantized vectors: a key of ``ITEM_BYTES``."""
    block_size: int = 64
    """Tokens a block."""
    quantization: str = ""
    """What vectors are kept in, each with a float32 scale: ``int8``, or ``fp8``, which is e4m3; empty is ``dtype``."""
    window: int = 0
    """Positions that a query sees, its own included (sliding window); 0 is all."""
    latent: int = 0
    """Numbers of the one vector's beginning that are the value; 0: keys and values are vectors of their own."""

    @property
    def vectors(self) -> int:
        """That are kept of a token and head."""
        return 1 if self.latent else 2

    @property
    def bytes_per_token(self) -> int:
        return self.vectors * self.kv_heads * self.bytes_per_vector

    @property
    def bytes_per_vector(self) -> int:
        return self.head_dim + SCALE_BYTES if self.quantization else self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def bytes_per_block(self) -> int:
        return self.block_size * self.bytes_per_token


def bytes_per_token(specs: Sequence[KVSpec]) -> int:
    """Bytes of a token in the caches of all layers together."""
    return sum(spec.bytes_per_token for spec in specs)


def bytes_per_block(specs: Sequence[KVSpec]) -> int:
    """Bytes of a block in the caches of all layers together."""
    return sum(spec.bytes_per_block for spec in specs)


@dataclass(frozen=True)
class TransferLayout:
    """Where keys and values of one layer lie in a transfer buffer: the same for all backends, ranks and block sizes.

    A buffer is slots of ``slot_tokens`` tokens. In a slot the layers follow one another, each
    ``[vectors, slot_tokens, kv_heads, vector_bytes]``, keys first. A vector is ``head_dim`` numbers of the KV cache's
    dtype, or, quantized, ``head_dim`` of 8 bits and the vector's float32 scale. Numbers are little-endian.
    """

    slot_tokens: int
    slot_bytes: int
    """Of all layers of the model."""
    offset: int
    """Bytes from a slot's start to this layer."""
    kv_heads: int
    """Heads of all ranks."""
    vector_bytes: int
    first_head: int = 0
    """First head of this rank."""
    numbers: str = ""
    """Type of a vector's numbers: a dtype or ``KVSpec.quantization``."""
    vectors: int = 2
    """Of a token and head: key and value, or one that is both (``KVSpec.latent``)."""


def transfer_layouts(specs: Sequence[KVSpec], slot_tokens: int) -> list[TransferLayout]:
    """The place of each layer in a transfer buffer.

    Args:
        specs: of all layers of the model, with the heads of all ranks.
        slot_tokens: tokens a slot.
    """
    slot_bytes, offset, layouts = slot_tokens * bytes_per_token(specs), 0, []
    for spec in specs:
        layouts.append(
            TransferLayout(
                slot_tokens,
                slot_bytes,
                offset,
                spec.kv_heads,
                spec.bytes_per_vector,
                numbers=spec.quantization or spec.dtype,
                vectors=spec.vectors,
            )
        )
        offset += slot_tokens * spec.bytes_per_token
    return layouts
