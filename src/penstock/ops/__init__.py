"""Ops (kernels) and their backends. ``reference`` defines the result of each op in plain PyTorch."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from penstock.checkpoint.experts_config import Routing
from penstock.checkpoint.kv_spec import KVSpec, TransferLayout
from penstock.core import Code, PenstockError
from penstock.core.quantization import UNQUANTIZED, Format

from . import reference
from .batch import (
    AttentionMetadata,
    AttentionOptions,
    Batch,
    CaptureOptions,
    CrossAttention,
    ForwardFn,
    LayerExport,
    QKNorms,
    StateBatch,
)
from .compressed import Compression
from .lora import LoRAWeights
from .quantized_weight import QuantizedWeight
from .scans import ScanWeights
from .states import DeltaSizes, StateSpaceSizes

logger = logging.getLogger(__name__)


class Ops(Protocol):
    """A backend: a module that defines or imports these functions. mypy checks the backends against this protocol in
    ``backend``. ``reference`` documents the functions, with shapes and dtypes."""

    NAME: str
    """Name of the backend."""
    BATCH_INVARIANT: bool
    """True if the bits of a row do not depend on the other rows of the batch."""
    ASYNCHRONOUS: bool
    """True if ops return before their results are computed, as on a GPU. A step may then be submitted while the
    previous step runs, and refer to the tokens that the previous step samples (``Batch.token_ids``)."""
    LAYOUT: str
    """Version of the layout of ``packed_tensors``."""

    def fingerprint(self) -> str: ...
    def set_threads(self, count: int) -> None: ...
    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor: ...
    def supports(self, format: Format, dtype: torch.dtype) -> bool: ...
    def pack(self, parts: Sequence[Tensor], bias: Tensor | None = None, format: Format = UNQUANTIZED) -> Any: ...
    def pack_quantized(
        self, parts: Sequence[QuantizedWeight], dtype: torch.dtype, bias: Tensor | None = None
    ) -> Any: ...
    def packed_tensors(self, matrix: Any) -> dict[str, Tensor]: ...
    def from_packed(
        self,
        tensors: Mapping[str, Tensor],
        inputs: int,
        outputs: int,
        dtype: torch.dtype,
        bias: Tensor | None,
        format: Format,
    ) -> Any: ...
    def linear(self, x: Tensor, matrix: Any, out_float32: bool = False, out: Tensor | None = None) -> Tensor: ...
    def linear_activation_and_mul(self, x: Tensor, matrix: Any, function: str, out: Tensor | None = None) -> Tensor: ...
    def select_experts(
        self,
        logits: Tensor,
        routing: Routing,
        bias: Tensor | None = None,
        factors: Tensor | None = None,
        token_ids: Tensor | None = None,
        table: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...
    def count_experts(self, ids: Tensor, counts: Tensor, num_tokens: Tensor | None = None) -> None: ...
    def place_experts(self, ids: Tensor, places: Tensor) -> Tensor: ...
    def stack_experts(self, matrices: Sequence[Any], first: int = 0) -> Any: ...
    def experts_linear(self, x: Tensor, experts: Any, ids: Tensor, out: Tensor | None = None) -> Tensor: ...
    def experts_activation_and_mul(
        self, x: Tensor, experts: Any, ids: Tensor, function: str, out: Tensor | None = None
    ) -> Tensor: ...
    def combine_experts(
        self,
        x: Tensor,
        weights: Tensor,
        shared: Tensor | None = None,
        gate: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor: ...
    def new_lora_slots(
        self, slots: int, inputs: int, outputs: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> Any: ...
    def pack_lora(self, parts: Sequence[LoRAWeights]) -> Any: ...
    def set_lora(self, slots: Any, slot: int, packed: Any | None) -> None: ...
    def add_lora(self, out: Tensor, x: Tensor, slots: Any, row_slots: Tensor) -> Tensor: ...
    def argmax(self, x: Tensor, matrix: Any, bitmask: Tensor | None = None) -> tuple[Tensor, Tensor]: ...
    def apply_bitmask(self, logits: Tensor, bitmask: Tensor) -> Tensor: ...
    def log_softmax(self, logits: Tensor) -> Tensor: ...
    def topk(self, values: Tensor, k: int) -> tuple[Tensor, Tensor]: ...
    def argmax_of_logits(self, logits: Tensor) -> tuple[Tensor, Tensor]: ...
    def sample_random(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
    ) -> tuple[Tensor, Tensor]: ...
    def embedding(self, token_ids: Tensor, matrix: Any, first: int = 0, out: Tensor | None = None) -> Tensor: ...
    def index_select(self, x: Tensor, rows: Tensor) -> Tensor: ...
    def clone(self, x: Tensor) -> Tensor: ...
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...
    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor: ...
    def scale(self, x: Tensor, factor: float, cap: float = 0.0) -> Tensor: ...
    def to_float32(self, x: Tensor) -> Tensor: ...
    def add_residual(self, x: Tensor, residual: Tensor) -> Tensor: ...
    def activation(self, x: Tensor, function: str, out: Tensor | None = None) -> Tensor: ...
    def activation_and_mul(self, x: Tensor, function: str, out: Tensor | None = None) -> Tensor: ...
    def rope(self, x: Tensor, positions: Tensor, table: Tensor, interleaved: bool = False) -> Tensor: ...
    def rope_and_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        table: Tensor,
        cache: Any,
        slot_mapping: Tensor,
        norms: QKNorms | None = None,
        interleaved: bool = False,
    ) -> Tensor: ...
    def new_kv_cache(self, specs: Sequence[KVSpec], blocks: int, device: torch.device) -> list[Any]: ...
    def store_kv(self, cache: Any, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None: ...
    def attention(
        self, q: Tensor, cache: Any, metadata: AttentionMetadata, options: AttentionOptions, out: Tensor | None = None
    ) -> Tensor: ...
    def pack_by_head(self, weight: Tensor) -> Any: ...
    def linear_by_head(self, x: Tensor, matrices: Any, out: Tensor | None = None) -> Tensor: ...
    def latent_rope_and_store(
        self,
        q: Tensor,
        k: Tensor,
        latent: Tensor,
        positions: Tensor,
        table: Tensor,
        cache: Any,
        slot_mapping: Tensor,
        interleaved: bool,
        out: Tensor,
        index_keys: Tensor | None = None,
    ) -> None: ...
    def latent_attention(
        self,
        q: Tensor,
        cache: Any,
        metadata: AttentionMetadata,
        scale: float,
        latent: int,
        selected: bool = False,
    ) -> Tensor: ...
    def select_keys(
        self, q: Tensor, weights: Tensor, cache: Any, metadata: AttentionMetadata, top_k: int, scale: float
    ) -> AttentionMetadata: ...
    def compress(
        self,
        x: Tensor,
        sizes: Compression,
        bias: Tensor,
        norm: Tensor,
        table: Tensor,
        cache: Any,
        states: Mapping[str, Tensor],
        batch: Batch,
    ) -> None: ...
    def select_entries(
        self,
        cache: Any,
        metadata: AttentionMetadata,
        tokens: int,
        window: int,
        rate: int,
        top_k: int,
        q: Tensor | None = None,
        weights: Tensor | None = None,
        scale: float = 1.0,
    ) -> AttentionMetadata: ...
    def compressed_attention(
        self, q: Tensor, cache: Any, selection: AttentionMetadata, scale: float, sinks: Tensor
    ) -> Tensor: ...
    def rotate_tail(self, x: Tensor, positions: Tensor, table: Tensor, inverse: bool = False) -> None: ...
    def hyper_weights(
        self, logits: Tensor, base: Tensor, scale: Tensor, streams: int, iterations: int, eps: float
    ) -> Tensor: ...
    def collapse_streams(self, x: Tensor, weights: Tensor, streams: int) -> Tensor: ...
    def mix_streams(self, x: Tensor, residual: Tensor, weights: Tensor, streams: int) -> Tensor: ...
    def equalize_streams(self, x: Tensor, streams: int, min_square: float) -> Tensor: ...
    def gaussian_topk(self, x: Tensor, multiplier: float) -> Tensor: ...
    def export_kv(
        self,
        cache: Any,
        slot_mapping: Tensor,
        buffer: Tensor,
        places: Tensor,
        layout: TransferLayout,
        progress: Tensor | None = None,
    ) -> None: ...
    def import_kv(
        self, cache: Any, slot_mapping: Tensor, buffer: Tensor, places: Tensor, layout: TransferLayout
    ) -> None: ...
    def gather_kv(self, cache: Any, block_table: Tensor, length: int) -> tuple[Tensor, Tensor]: ...
    def copy_blocks(self, source: list[Any], target: list[Any], pairs: list[tuple[int, int]]) -> None: ...
    def copy_slots(self, cache: Any, sources: Tensor, targets: Tensor) -> None: ...
    def short_convolution(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        silu: bool,
        cache: Mapping[str, Tensor],
        batch: Batch,
        out: Tensor | None = None,
    ) -> Tensor: ...
    def gated_delta_rule(
        self,
        qkv: Tensor,
        gates: Tensor,
        log_decay: Tensor,
        gate_bias: Tensor,
        sizes: DeltaSizes,
        cache: Mapping[str, Tensor],
        batch: Batch,
    ) -> Tensor: ...
    def gated_rms_norm(
        self,
        x: Tensor,
        gate: Tensor,
        weight: Tensor,
        eps: float,
        gate_first: bool = False,
        out: Tensor | None = None,
        sigmoid: bool = False,
    ) -> Tensor: ...
    def multiply_gate(self, x: Tensor, gate: Tensor, out: Tensor | None = None) -> Tensor: ...
    def state_space(
        self,
        xbc: Tensor,
        steps: Tensor,
        log_decay: Tensor,
        step_bias: Tensor,
        skip: Tensor,
        sizes: StateSpaceSizes,
        cache: Mapping[str, Tensor],
        batch: Batch,
        out: Tensor | None = None,
    ) -> Tensor: ...
    def multiply(self, x: Tensor, gate: Tensor, function: str = "", out: Tensor | None = None) -> Tensor: ...
    def selective_scan(
        self,
        x: Tensor,
        steps: Tensor,
        b: Tensor,
        c: Tensor,
        gate: Tensor,
        weights: ScanWeights,
        cache: Mapping[str, Tensor],
        batch: Batch,
        out: Tensor | None = None,
    ) -> Tensor: ...
    def rg_lru(
        self,
        x: Tensor,
        gates: Tensor,
        rates: Tensor,
        bias: Tensor,
        cache: Mapping[str, Tensor],
        batch: Batch,
        out: Tensor | None = None,
    ) -> Tensor: ...
    def lightning_attention(
        self,
        qkv: Tensor,
        decay: Tensor,
        cache: Mapping[str, Tensor],
        batch: Batch,
        out: Tensor | None = None,
    ) -> Tensor: ...
    def concatenate(self, x: Tensor, y: Tensor) -> Tensor: ...
    def capture(self, forward: ForwardFn, options: CaptureOptions) -> ForwardFn: ...
    def is_capturing(self) -> bool: ...


def backend(
    device: torch.device, name: Literal["auto", "reference", "cpu", "cuda"] = "auto", batch_invariant: bool = True
) -> Ops:
    """Return the fastest backend for a device ("auto"), or the named backend.

    Args:
        batch_invariant: False allows the CUDA backend of this process to use faster kernels that are not
            batch-invariant.

    Raises ``PenstockError`` (``unsupported``) if the backend cannot run on the device or in this installation.
    """
    if name == "reference":
        return reference
    if name == "cuda" or (name == "auto" and device.type == "cuda"):
        return _cuda(device, name, batch_invariant)
    if device.type != "cpu":
        raise PenstockError(Code.UNSUPPORTED, f"the CPU kernels do not run on {device}: use ops reference", "ops")
    try:
        from . import cpu
    except ImportError as error:
        if name == "cpu" or os.environ.get("PENSTOCK_ISA"):
            message = f"the CPU kernels cannot be used ({error}): reinstall penstock with a C++ compiler"
            raise PenstockError(Code.UNSUPPORTED, f"{message}, or use ops reference", "ops") from error
        reason = (
            "are missing in this installation (built without a C++ compiler, or with PENSTOCK_SETS=none)"
            if isinstance(error, ModuleNotFoundError)
            else f"cannot be loaded ({error})"
        )
        logger.warning(
            "The CPU kernels %s. Falling back to plain PyTorch, which is slow and not batch-invariant. "
            "Install a compiler (apt install g++), then reinstall penstock with pip's --no-cache-dir.",
            reason,
        )
        return reference
    return cpu


def _cuda(device: torch.device, name: str, batch_invariant: bool) -> Ops:
    """The CUDA backend; with ``name`` "auto", the reference backend if Triton is missing."""
    try:
        from . import cuda
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        if name == "cuda":
            raise PenstockError(
                Code.UNSUPPORTED, "the CUDA kernels require Triton: install penstock-llm[cuda]", "ops"
            ) from error
        logger.warning(
            "Triton is not installed. Falling back to plain PyTorch on %s, which is slow and not batch-invariant. "
            "Install penstock-llm[cuda].",
            device,
        )
        return reference
    cuda.check(device)
    cuda.set_batch_invariant(batch_invariant)
    return cuda
