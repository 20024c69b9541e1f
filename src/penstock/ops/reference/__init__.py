"""Reference backend: the definition of each op in plain PyTorch. Tests compare all other backends with it.

Ops compute in float32 and round the result to the input's dtype. They run on all PyTorch devices. They are not
batch-invariant, since PyTorch's order of summation depends on the shapes.
"""

from __future__ import annotations

import torch

from ..activations import activation, activation_and_mul
from ..experts import combine_experts, count_experts, place_experts, select_experts
from ..sampling import argmax_of_logits, sample_random
from .attention import attention, rope_and_store
from .compressed import compress, compressed_attention, rotate_tail, select_entries
from .elementwise import (
    add_residual,
    add_rms_norm,
    clone,
    gaussian_topk,
    index_select,
    layer_norm,
    rms_norm,
    rope,
    scale,
    to_float32,
)
from .experts import experts_activation_and_mul, experts_linear, stack_experts
from .graph import capture, empty, is_capturing
from .kv_cache import copy_blocks, copy_slots, export_kv, gather_kv, import_kv, new_kv_cache, store_kv
from .latent import latent_attention, latent_rope_and_store, linear_by_head, pack_by_head, select_keys
from .lightning import lightning_attention
from .logits import apply_bitmask, log_softmax, topk
from .lora import add_lora, new_lora_slots, pack_lora, set_lora
from .matrix import (
    LAYOUT,
    argmax,
    embedding,
    from_packed,
    linear,
    linear_activation_and_mul,
    pack,
    pack_quantized,
    packed_tensors,
    supports,
)
from .scans import multiply, rg_lru, selective_scan
from .state_space import concatenate, state_space
from .states import gated_delta_rule, gated_rms_norm, multiply_gate, short_convolution
from .streams import collapse_streams, equalize_streams, hyper_weights, mix_streams

NAME = "reference"
BATCH_INVARIANT = False
ASYNCHRONOUS = False


def fingerprint() -> str:
    """Name of the backend and version of PyTorch. Results also depend on shapes and the number of threads."""
    return f"{NAME}-{torch.__version__}"


def set_threads(count: int) -> None:
    """Set the number of PyTorch's threads; 0: keep PyTorch's default."""
    if count:
        torch.set_num_threads(count)
