"""The CUDA backend: Triton kernels, batch-invariant per GPU architecture and Triton version.

The modules of this package launch the kernels in ``kernels``, and allocate the memory. No op synchronizes with the GPU
or reads a value from it, so that steps can be captured as CUDA graphs.
"""

from __future__ import annotations

import torch
import triton

from penstock.core import Code, PenstockError

from ..reference import concatenate, count_experts, empty, place_experts
from .attention import attention
from .compressed import (
    collapse_streams,
    compress,
    compressed_attention,
    hyper_weights,
    mix_streams,
    rotate_tail,
    select_entries,
)
from .elementwise import (
    activation,
    activation_and_mul,
    add_residual,
    add_rms_norm,
    clone,
    gated_rms_norm,
    gaussian_topk,
    index_select,
    layer_norm,
    multiply,
    multiply_gate,
    rms_norm,
    rope,
    scale,
    to_float32,
)
from .experts import (
    combine_experts,
    experts_activation_and_mul,
    experts_linear,
    select_experts,
    stack_experts,
)
from .graph import capture, is_capturing
from .kv_cache import copy_blocks, copy_slots, export_kv, gather_kv, import_kv, new_kv_cache, rope_and_store, store_kv
from .latent import latent_attention, latent_rope_and_store, linear_by_head, pack_by_head, select_keys
from .launch import INTERPRETED
from .lora import add_lora, new_lora_slots, pack_lora, set_lora
from .matrix import (
    LAYOUT,
    embedding,
    from_packed,
    linear,
    linear_activation_and_mul,
    pack,
    pack_quantized,
    packed_tensors,
    supports,
    use_cublas,
)
from .sampling import apply_bitmask, argmax, argmax_of_logits, log_softmax, sample_random, topk
from .scans import rg_lru, selective_scan
from .states import gated_delta_rule, lightning_attention, short_convolution, state_space
from .streams import equalize_streams

NAME = "cuda"
BATCH_INVARIANT = True
"""False after ``set_batch_invariant(False)``."""
ASYNCHRONOUS = True
NUMERICS = 2
"""Version of the bits of results. Increment it with every change of the bits."""
MIN_CAPABILITY = (8, 0)
"""Minimum compute capability (Ampere)."""


def check(device: torch.device) -> None:
    """Raise ``PenstockError`` (``unsupported``) if the kernels cannot run on a device."""
    if device.type != "cuda":
        if INTERPRETED:
            return
        message = f"the CUDA kernels do not run on {device}: use device cuda (or TRITON_INTERPRET=1 for tests)"
        raise PenstockError(Code.UNSUPPORTED, message, "ops")
    if (capability := torch.cuda.get_device_capability(device)) < MIN_CAPABILITY:
        needed, actual = ("{}.{}".format(*version) for version in (MIN_CAPABILITY, capability))
        message = f"the CUDA kernels require compute capability {needed} (Ampere), but {device} has {actual}"
        raise PenstockError(Code.UNSUPPORTED, f"{message}: use ops reference", "ops")


def set_threads(count: int) -> None:
    """Do nothing: the kernels do not run on CPU threads."""


def fingerprint() -> str:
    """Backend, GPU architecture, and versions of Triton and the kernels, which determine the bits of results."""
    target = "interpreted" if INTERPRETED else "sm{}{}".format(*torch.cuda.get_device_capability())
    return f"{NAME}-{target}-triton{triton.__version__}-{NUMERICS}{'' if BATCH_INVARIANT else '-cublas'}"


def set_batch_invariant(enabled: bool) -> None:
    """Enable or disable batch invariance. If disabled, products of unquantized weights use cuBLAS."""
    global BATCH_INVARIANT
    BATCH_INVARIANT = enabled
    use_cublas(not enabled)
