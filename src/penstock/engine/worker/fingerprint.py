"""The fingerprint of an engine: identifies all that affects the bits of its results, except the weights."""

from __future__ import annotations

from importlib import metadata

import torch

from penstock.layers import depends_on_length
from penstock.models.model import Model
from penstock.ops import KVSpec, Ops


def fingerprint(ops: Ops, model: Model, quantization: str, kv_spec: KVSpec) -> str:
    """A string that is equal for engines with bit-identical results, given equal weights.

    With ``BATCH_INVARIANT`` kernels, results do not depend on threads, ranks, batches, chunks, block size, prefix
    cache, preemption and speculation, so these are not included.

    Args:
        ops: the kernels.
        quantization: format of the weights, a key of ``SCHEMES``.
        kv_spec: KV cache of any layer (all have the same dtype).
    """
    capability = torch.backends.cpu.get_cpu_capability().lower()  # PyTorch computes RoPE tables and samples
    parts = [ops.fingerprint(), f"torch{torch.__version__}", capability, str(model.dtype).removeprefix("torch.")]
    if model.config.model_impl == "transformers":
        parts.append(f"transformers{metadata.version('transformers')}")
    if quantization != "none":
        parts.append(quantization)
    if kv_spec.quantization:
        parts.append({"int8": "kv8", "fp8": "kvfp8"}[kv_spec.quantization])
    if depends_on_length(model.config.rope_parameters):
        parts.append(f"rope{max(model.max_len, model.config.max_position_embeddings)}")
    return "-".join(parts)
