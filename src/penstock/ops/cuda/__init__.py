"""The CUDA backend: Triton kernels, batch-invariant for one GPU architecture and version of Triton.

Modules here launch the kernels of ``kernels``, and own the memory. No op waits for the GPU, and none reads a value from
it, so that steps can be captured as CUDA graphs.
"""

from __future__ import annotations

import torch
import triton

from penstock.core import Code, PenstockError

from ..reference import count_experts, empty, place_experts
from .attention import attention
from .elementwise import (
    activation,
    activation_and_mul,
    add_residual,
    add_rms_norm,
    clone,
    index_select,
    layer_norm,
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
from .kv_cache import copy_blocks, copy_slots, export_kv, import_kv, new_kv_cache, rope_and_store, store_kv
from .latent import latent_attention, latent_rope_and_store, linear_by_head, pack_by_head
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
from .sampling import apply_bitmask, argmax, log_softmax, sample_random, topk

NAME = "cuda"
BATCH_INVARIANT = True
"""False after ``set_batch_invariant(False)``."""
ASYNCHRONOUS = True
NUMERICS = 1
"""Version of the kernels' results: raised with every change that changes the bits of any of them."""
MIN_CAPABILITY = (8, 0)
"""Compute capability of the oldest GPUs that the kernels are compiled for, Ampere."""


def check(device: torch.device) -> None:
    """Raise ``PenstockError`` (``unsupported``) where the kernels cannot run on a device."""
    if device.type != "cuda":
        if INTERPRETED:
            return
        message = (
            f"the CUDA kernels do not run on {device}: give device cuda (TRITON_INTERPRET=1 interprets them, for tests)"
        )
        raise PenstockError(Code.UNSUPPORTED, message, "ops")
    if (capability := torch.cuda.get_device_capability(device)) < MIN_CAPABILITY:
        needed, own = (".".join(map(str, each)) for each in (MIN_CAPABILITY, capability))
        message = (
            f"the CUDA kernels need compute capability {needed} (Ampere), and {device} has {own}: give ops reference"
        )
        raise PenstockError(Code.UNSUPPORTED, message, "ops")


def set_threads(count: int) -> None:
    """The host only launches kernels."""


def fingerprint() -> str:
    """Backend, GPU architecture, and versions of compiler and kernels, which decide the bits of results."""
    where = "interpreted" if INTERPRETED else "sm{}{}".format(*torch.cuda.get_device_capability())
    return f"{NAME}-{where}-triton{triton.__version__}-{NUMERICS}{'' if BATCH_INVARIANT else '-cublas'}"


def set_batch_invariant(enabled: bool) -> None:
    """Whether results are batch-invariant from now on. Otherwise products of weights that are not quantized are
    cuBLAS's."""
    global BATCH_INVARIANT
    BATCH_INVARIANT = enabled
    use_cublas(not enabled)
