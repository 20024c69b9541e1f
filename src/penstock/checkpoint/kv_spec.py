"""KV cache of an attention layer: shape, size in bytes, and layout in a transfer buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element, by dtype name."""
SCALE_BYTES = 4
"""Bytes of a quantized vector's float32 scale."""
KV_QUANTIZATION = {"auto": "", "int8": "int8", "fp8": "fp8", "fp8_e4m3": "fp8"}
"""Option ``kv_cache_dtype`` → ``KVSpec.quantization``."""
PROGRESS_BITS = 16
"""Low bits of ``ops.LayerExport.progress`` that count a rank's exported layers; the high bits are the step."""
CANONICAL_LAYOUT = 1
"""Version of the layout in which KV caches are exchanged (``TransferLayout``)."""


@dataclass(frozen=True)
class KVSpec:
    """KV cache of one layer on one rank.

    A block holds ``block_size`` tokens. Each token has a key and a value vector per head, or, with ``latent``, one
    vector for all heads: it is the key, and its first ``latent`` elements are the value (multi-head latent attention;
    DeepSeek-AI, 2024). The last ``index_dim`` elements of the vector are not part of the key: with sparse attention,
    the token's index key; with compressed attention, the entry that ends with the token, and the entry's index key.
    """

    kv_heads: int
    """Number of key and value heads of this rank; 1 with ``latent``."""
    head_dim: int
    """Elements per vector; with ``latent``, compressed keys and values plus rotary key, plus index key."""
    dtype: str
    """Dtype of unquantized vectors: a key of ``ITEM_BYTES``."""
    block_size: int = 64
    """Tokens per block."""
    quantization: str = ""
    """Element type of quantized vectors: ``int8`` or ``fp8`` (e4m3), one float32 scale each; empty: unquantized."""
    window: int = 0
    """Sliding window: number of positions that a query sees, including its own; 0: all."""
    latent: int = 0
    """Number of leading elements of a token's vector that are its value; 0: separate keys and values."""
    index_dim: int = 0
    """Elements that follow the key (sparse and compressed attention), only with ``latent``."""

    def without_index_keys(self) -> KVSpec:
        """The KV cache of a layer that attends to the keys selected by another layer."""
        return replace(self, head_dim=self.head_dim - self.index_dim, index_dim=0)

    @property
    def vectors(self) -> int:
        """Number of vectors stored per token and head (2: key and value; 1 with ``latent``)."""
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
    """Bytes per token, summed over all layers."""
    return sum(spec.bytes_per_token for spec in specs)


def bytes_per_block(specs: Sequence[KVSpec]) -> int:
    """Bytes per block, summed over all layers."""
    return sum(spec.bytes_per_block for spec in specs)


@dataclass(frozen=True)
class TransferLayout:
    """Layout of one layer's keys and values in a transfer buffer: the same for all backends, ranks and block sizes.

    A buffer is an array of slots of ``slot_tokens`` tokens. A slot has all layers in order, each
    ``[vectors, slot_tokens, kv_heads, vector_bytes]``, keys first. A vector is ``head_dim`` elements of the KV cache's
    dtype; a quantized vector is ``head_dim`` 8-bit elements and a float32 scale. Elements are little-endian.
    """

    slot_tokens: int
    slot_bytes: int
    """Bytes per slot, for all layers of the model."""
    offset: int
    """Byte offset of this layer in a slot."""
    kv_heads: int
    """Number of key and value heads of all ranks."""
    vector_bytes: int
    first_head: int = 0
    """First head of this rank."""
    numbers: str = ""
    """Type of the elements: a dtype or ``KVSpec.quantization``."""
    vectors: int = 2
    """Number of vectors per token and head (``KVSpec.vectors``)."""


def transfer_layouts(specs: Sequence[KVSpec], slot_tokens: int) -> list[TransferLayout]:
    """Layouts of all layers in a transfer buffer.

    Args:
        specs: all layers of the model, with the heads of all ranks.
        slot_tokens: tokens per slot.
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
