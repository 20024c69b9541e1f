"""The fingerprint of an engine: all that decides the bits of its results, besides the model's weights."""

from __future__ import annotations

import torch

from penstock.layers import depends_on_length
from penstock.models import Model
from penstock.ops import KVSpec, Ops


def fingerprint(ops: Ops, model: Model, quantization: str, kv_spec: KVSpec) -> str:
    """Engines of equal fingerprints and weights give equal results, whatever else their options say.

    Not in it, because results do not depend on them: threads, ranks, batches, chunks, prefix cache, preemption and
    speculation (only as far as ``ops.BATCH_INVARIANT`` says so).

    Args:
        quantization: of the weights, a name of ``SCHEMES``.
        kv_spec: of any layer of the KV cache.
    """
    capability = torch.backends.cpu.get_cpu_capability().lower()  # PyTorch computes rope tables and samples
    parts = [ops.fingerprint(), f"torch{torch.__version__}", capability, str(model.dtype).removeprefix("torch.")]
    if quantization != "none":
        parts.append(quantization)
    if kv_spec.quantized:
        parts.append("kv8")
    parts.append(f"block{kv_spec.block_size}")  # attention sums block by block
    if depends_on_length(model.config.rope_parameters):
        parts.append(f"rope{max(model.max_len, model.config.max_position_embeddings)}")
    return "-".join(parts)
