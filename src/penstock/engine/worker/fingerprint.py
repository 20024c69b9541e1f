"""The fingerprint of an engine: identifies everything that affects the bits of its results, except the weights."""

from __future__ import annotations

from importlib import metadata

import torch

from penstock.layers import depends_on_length
from penstock.models.model import Model
from penstock.ops import Ops


def fingerprint(ops: Ops, model: Model, quantization: str, kv_quantization: str) -> str:
    """Fingerprint, a string: engines with equal fingerprints and equal weights have bit-identical results.

    It excludes threads, ranks, batches, chunks, block size, prefix cache, preemption and speculation, because they do
    not affect results with ``BATCH_INVARIANT`` kernels.

    Args:
        ops: the kernels.
        quantization: format of the weights, a key of ``SCHEMES``.
        kv_quantization: ``KVSpec.quantization`` of all layers.
    """
    capability = torch.backends.cpu.get_cpu_capability().lower()  # PyTorch computes RoPE tables and log probabilities
    parts = [ops.fingerprint(), f"torch{torch.__version__}", capability, str(model.dtype).removeprefix("torch.")]
    if model.config.model_impl == "transformers":
        parts.append(f"transformers{metadata.version('transformers')}")
    if quantization != "none":
        parts.append(quantization)
    if kv_quantization:
        parts.append({"int8": "kv8", "fp8": "kvfp8"}[kv_quantization])
    if depends_on_length(model.config.rope_parameters):
        parts.append(f"rope{max(model.max_len, model.config.max_position_embeddings)}")
    return "-".join(parts)
