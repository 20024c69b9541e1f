"""The CPU backend: compiled kernels (``csrc/``), batch-invariant per instruction set.

Kernels take addresses and sizes, and do not check all of them: the modules of this package do, and keep the memory
alive.
"""

from __future__ import annotations

from .. import _kernels, native
from ..reference import apply_bitmask, log_softmax, topk
from .compressed import compress, compressed_attention, rotate_tail, select_entries
from .elementwise import (
    activation,
    activation_and_mul,
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
from .experts import (
    combine_experts,
    count_experts,
    experts_activation_and_mul,
    experts_linear,
    place_experts,
    select_experts,
    stack_experts,
)
from .graph import capture, empty, is_capturing
from .kv_cache import (
    attention,
    copy_blocks,
    copy_slots,
    export_kv,
    gather_kv,
    import_kv,
    new_kv_cache,
    rope_and_store,
    store_kv,
)
from .latent import latent_attention, latent_rope_and_store, linear_by_head, pack_by_head, select_keys
from .lightning import lightning_attention
from .limits import measure_limits, set_threads
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
    quantize,
    supports,
)
from .sampling import argmax_of_logits, sample_random
from .scans import multiply, rg_lru, selective_scan
from .sketch import argmax
from .state_space import concatenate, state_space
from .states import gated_delta_rule, gated_rms_norm, multiply_gate, short_convolution
from .streams import collapse_streams, equalize_streams, hyper_weights, mix_streams

native.set_up()

NAME = "cpu"
BATCH_INVARIANT = True
ASYNCHRONOUS = False
NUMERICS = 8
"""Version of the kernels' numerics. Increment it with every change that makes results differ bitwise."""


def fingerprint() -> str:
    """Backend, instruction set and version of the kernels, which determine the bits of their results."""
    return f"{NAME}-{_kernels.current()}-{NUMERICS}"
