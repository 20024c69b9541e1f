"""Memory of weights and KV cache, and settings derived from it by the formulas in PaddleNLP's and FastDeploy's
documentation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.checkpoint.kv_spec import ITEM_BYTES, KV_QUANTIZATION, SCALE_BYTES, KVSpec
from penstock.checkpoint.model_config import ModelConfig
from penstock.core import Code, PenstockError
from penstock.core.quantization import SCHEMES, UNQUANTIZED, Format, Scheme, is_sensitive_layer

from .model_size import ModelSize

HALF_BYTES = 2
"""Bytes per scale of symmetric 4-bit integer and mxfp4 weights in the CPU kernels."""
MAX_SEQS = 128
"""Maximum number of running sequences in the documentation of PaddleNLP and FastDeploy."""
PROMPT_MARGIN = 128
"""Number of tokens that PaddleNLP's formula adds to the average prompt."""


def blocks_of_sequences(sequences: float, max_len: int, block_size: int) -> int:
    """Number of KV blocks for ``sequences`` (PaddleNLP's ``BLOCK_BS``) sequences of ``max_len`` tokens."""
    return int(sequences * math.ceil(max_len / block_size))


def weight_bytes(size: ModelSize, quantization: str = "none", dtype: str = "auto", mtp: bool = False) -> int:
    """Bytes of a model's matrices, without norms and biases, which are negligible.

    Args:
        quantization: a key of ``SCHEMES``.
        dtype: data type of the computation; ``auto``: the checkpoint's.
        mtp: include the layers for multi-token prediction.
    """
    layers = size.layer_weights + (size.mtp_weights if mtp else 0)
    layer, head = bytes_per_weight(size, quantization, dtype)
    vision = size.vision_weights * ITEM_BYTES[_computed_dtype(size, dtype)]
    return int(layers * layer + size.embedding_weights * head + vision)


def bytes_per_weight(size: ModelSize, quantization: str, dtype: str) -> tuple[float, float]:
    """Bytes per parameter of the layers, and of embedding and LM head. Arguments as for ``weight_bytes``."""
    scheme, computed = SCHEMES[quantization], _computed_dtype(size, dtype)

    def weight(format: Format) -> float:
        if format.is_mxfp4:
            return format.bits / 8 + HALF_BYTES / format.group_size
        if not format.bits or format == Format(4, format.group_size, floating=True):  # nf4 and fp4 are dequantized
            return ITEM_BYTES[computed]
        each = HALF_BYTES if format.bits == 4 and not format.asymmetric else SCALE_BYTES * (1 + format.asymmetric)
        each = 1 if format.integer_scales else each
        scales = each / (format.rows_per_scale or size.hidden_size)
        return format.bits / 8 + scales / (format.group_size or size.hidden_size)

    def mean(wanted: Format, stored: Mapping[Format, float]) -> float:
        return sum(share * weight(_kept(scheme, wanted, format)) for format, share in stored.items())

    layers, head = size.gguf_layers or {size.stored: 1.0}, size.gguf_head or {UNQUANTIZED: 1.0}
    plain = size.unquantized_weights / max(size.layer_weights, 1)
    rounded = mean(scheme.layers, layers)
    if scheme.sensitive:
        share = sensitive_share(size)
        rounded = (1 - share) * rounded + share * mean(scheme.sensitive, layers)
    layer = plain * ITEM_BYTES[computed] + (1 - plain) * rounded
    return layer, mean(scheme.head, head)


def sensitive_share(size: ModelSize) -> float:
    """Share of the layers' weights in sensitive matrices (``is_sensitive``)."""
    layers = sum(is_sensitive_layer(layer) for layer in range(size.num_layers))
    weights = size.value_weights + size.down_weights * layers / size.num_layers
    return weights / max(size.layer_weights, 1)


def _kept(scheme: Scheme, wanted: Format, stored: Format) -> Format:
    """Format of a loaded matrix: the checkpoint's if ``wanted`` has the same number of bits."""
    kept = scheme.kept(wanted, stored)
    same = not kept.bits or (kept.bits, kept.floating) == (stored.bits, stored.floating)
    return stored if stored.bits and same else wanted


def check_kv_cache_dtype(kv_cache_dtype: str, model: ModelConfig | ModelSize) -> None:
    """Raise ``PenstockError`` (``unsupported``) for a quantized cache of sparse or compressed attention."""
    if (model.index_dim or model.entry_dims) and KV_QUANTIZATION[kv_cache_dtype]:
        message = f"kv_cache_dtype: {kv_cache_dtype} is not supported for {model.architecture}, whose attention"
        message = f"{message} stores index keys or compressed entries unquantized; use auto"
        raise PenstockError(Code.UNSUPPORTED, message, "kv_cache_dtype")


def kv_specs(
    size: ModelSize,
    block_size: int = 64,
    kv_cache_dtype: str = "auto",
    dtype: str = "auto",
    mtp: bool = False,
    ranks: int = 1,
) -> list[KVSpec]:
    """KV cache spec of each layer of a model that has one, on one rank.

    Args:
        kv_cache_dtype: value of the option, a key of ``KV_QUANTIZATION``.
        dtype: data type of the computation; ``auto``: the checkpoint's.
        mtp: include the layers for multi-token prediction.
        ranks: number of tensor-parallel ranks, which split the KV heads. Each rank has at least one head; latent
            vectors are stored on all ranks.

    Raises ``PenstockError`` (``unsupported``) for a quantized cache of a model with sparse attention.
    """
    check_kv_cache_dtype(kv_cache_dtype, size)
    quantization, computed = KV_QUANTIZATION[kv_cache_dtype], _computed_dtype(size, dtype)

    def spec(heads: int, dim: int) -> KVSpec:
        heads, elements = math.ceil(heads / ranks), dim + size.index_dim
        return KVSpec(heads, elements, computed, block_size, quantization, latent=size.latent, index_dim=size.index_dim)

    usual = size.num_kv_heads, size.kv_dim
    if size.entry_dims:
        return [replace(spec(1, size.kv_dim + extra), index_dim=extra) for extra in size.entry_dims]
    if size.encoder:  # the layers of an encoder share one KV cache
        return [spec(*usual)]
    layers = size.num_layers if size.num_kv_layers < 0 else size.num_kv_layers
    shapes = [*(size.kv_shapes or (usual,) * layers), *(usual,) * (size.num_mtp_layers if mtp else 0)]
    return [
        spec(*shape).without_index_keys() if layer in size.shared_layers else spec(*shape)
        for layer, shape in enumerate(shapes)
    ]


def _computed_dtype(size: ModelSize, dtype: str) -> str:
    return size.dtype if dtype == "auto" else dtype


@dataclass(frozen=True)
class CachePlan:
    """Size of a KV cache, and settings derived from it."""

    blocks: int
    block_size: int
    bytes_per_token: int
    max_len: int
    """Maximum number of tokens of a sequence."""
    ratio: float
    """Share of the blocks that newly admitted prompts may fill (``kv_cache_ratio``)."""

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_size

    @property
    def bytes(self) -> int:
        return self.tokens * self.bytes_per_token

    @property
    def sequences(self) -> float:
        """Number of sequences of ``max_len`` tokens that fit (PaddleNLP's ``BLOCK_BS``)."""
        return self.tokens / self.max_len

    @property
    def prompt_blocks(self) -> int:
        """Number of blocks that newly admitted prompts may fill (FastDeploy's ``prefill_kvcache_block_num``)."""
        return int(self.blocks * self.ratio)

    def max_num_seqs(self, output: float) -> int:
        """FastDeploy's formula for ``max_num_seqs``: number of outputs with ``output`` tokens that fit into the blocks
        not available to prompts, at most ``MAX_SEQS``."""
        room = (self.blocks - self.prompt_blocks) * self.block_size
        return max(min(int(room / output), MAX_SEQS), 1)

    def batch_size(self, prompt: float, output: float) -> int:
        """PaddleNLP's formula for ``BATCH_SIZE``: number of sequences with ``prompt`` and ``output`` tokens on average
        that fit, at most ``MAX_SEQS``."""
        return max(min(int(self.tokens / (prompt + output)), MAX_SEQS), 1)


def kv_cache_ratio(prompt: float, output: float) -> float:
    """FastDeploy's formula for ``kv_cache_ratio``: share of prompt tokens among all tokens."""
    return prompt / (prompt + output)


def block_ratio(prompt: float, output: float, extend: float = 1.0) -> float:
    """PaddleNLP's formula for ``BLOCK_RATIO``, at most 1.

    Args:
        extend: ``EXTEND_RATIO``, 1.1 to 1.3 if the lengths of prompts vary a lot.
    """
    return min((prompt + PROMPT_MARGIN) / (prompt + output) * extend, 1.0)
