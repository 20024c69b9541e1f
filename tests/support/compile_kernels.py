"""Compile every kernel of the CUDA backend, as ops launch it, for GPUs that this machine does not have.

    python tests/support/compile_kernels.py [--targets 80,90,100] [--ops NAME,…] [--whole] [--cache FOLDER]
        [--ptx FOLDER]

Each function of ``OPS`` calls ops with the shapes of common models. Launches are recorded, and launches with the same
code are compiled once. Prints one JSON object: ``kernels``, a list of ``Compiled`` objects, and ``skipped``, the labels
of calls that a target does not support.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from penstock.core import Code, PenstockError
from penstock.core.quantization import SCHEMES, Format
from penstock.ops.activations import ACTIVATIONS
from penstock.ops.cuda import lora, matrix
from penstock.ops.cuda.launch import ARCHITECTURES, Launch, record_launches

PROCESSES = 2
CPU = torch.device("cpu")
MIN_FP8 = 89
"""First target with FP8 matrix instructions."""


@dataclass(frozen=True)
class Model:
    """Sizes of a model's matrices and heads."""

    hidden: int
    inter: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


MODELS = (
    Model(1024, 3072, 16, 8, 128, 151936),  # Qwen3-0.6B
    Model(4096, 14336, 32, 8, 128, 128256),  # Llama-3.1-8B
)
TOKENS = (1, 64, 128, 256, 500, 2048)
"""Numbers of tokens of a step; the matrix products of ``MODELS`` use every tile shape with them."""


@dataclass
class Compiled:
    """A kernel compiled for a target, with its resources."""

    kernel: str
    target: int
    products: list[str]
    """Labels of the calls that launch this kernel. Calls with the same label must compute the same bits of a row."""
    arguments: dict[str, Any]
    """Types of arguments, and values of constants."""
    num_warps: int
    num_stages: int
    registers: int = 0
    """Registers per thread."""
    local: int = 0
    """Bytes of local memory (stack) per thread, used by spilled registers."""
    shared: int = 0
    """Bytes of shared memory per program."""
    tensor_memory: int = 0
    """Columns of tensor memory per program (Blackwell)."""
    mma: list[str] = field(default_factory=list)
    """Kinds of matrix instructions, without the size that depends on the number of tokens."""
    seconds: float = 0.0
    """Compile time in seconds."""
    error: str = ""


# --- Ops: each function yields labels and calls that launch kernels. Add new functions to OPS. ------------------------

Calls = Iterator[tuple[str, Callable[[], object]]]


FORMATS = {name: scheme.layers for name, scheme in SCHEMES.items()} | {
    "fp8 blocks": Format(8, 128, 8, floating=True, rows_per_scale=128),
    "4 bits, offsets": Format(4, 128, asymmetric=True),
    "4 bits, offsets, 8-bit activations": Format(4, 32, 8, asymmetric=True),
    "mxfp4": Format(4, 32, floating=True),
}


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def packed(outputs: int, inputs: int, format: Format, bias: bool = False) -> Any:
    """A packed matrix with uninitialized values."""
    shapes = matrix.packed_shapes(inputs, outputs, torch.bfloat16, format)
    tensors = {name: empty(*shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    return matrix.from_packed(tensors, inputs, outputs, torch.bfloat16, empty(outputs) if bias else None, format)


def products(whole: bool) -> Calls:
    """Linear layers of the models. Without ``whole``: the attention output layer, unquantized with all tiles, and
    quantized with a few tiles; the gated MLP and the output head with the largest and smallest tiles only."""
    tokens_of = {"none": TOKENS, "w8a8": (1, 2048), "fp8": (1, 2048), "fp8 blocks": (256,), "wint4": (64, 2048)}
    # wint4-g32 and w4a8-g32 are aliases of the formats without suffix.
    tokens_of |= {"wint4-g32": (64,), "w4a8-g32": (), "w4a8": (128,), "wint8": (1,), "mxfp4": (2048,)}
    tokens_of |= {"4 bits, offsets, 8-bit activations": (64,), "4 bits, offsets": (256,)}
    for name, format in FORMATS.items():
        for model in MODELS if whole else MODELS[1:]:
            attention_output = ("o", packed(model.hidden, model.heads * model.head_dim, format, bias=True))
            gate_up = packed(2 * model.inter, model.hidden, format)
            heads = model.heads + 2 * model.kv_heads
            others = [
                ("qkv", packed(heads * model.head_dim, model.hidden, format)),
                ("down", packed(model.hidden, model.inter, format)),
            ]
            for tokens in TOKENS:
                if not whole and tokens not in tokens_of[name]:
                    continue
                for layer, weights in [attention_output, *others] if whole else [attention_output]:
                    x = empty(tokens, weights.inputs)
                    yield f"{name} {layer}", partial(matrix.linear, x, weights)
                if whole or (name == "none" and tokens in (TOKENS[0], TOKENS[-1])):
                    x = empty(tokens, model.hidden)
                    yield f"{name} gate_up", partial(matrix.linear_activation_and_mul, x, gate_up, "silu")
    for model in MODELS if whole else MODELS[1:]:
        head = packed(model.vocab, model.hidden, Format())
        for tokens in TOKENS if whole else TOKENS[:1]:
            yield "head", partial(matrix.linear, empty(tokens, model.hidden), head, out_float32=True)


def embeddings(whole: bool) -> Calls:
    for format in FORMATS.values() if whole else (Format(), SCHEMES["w8a8"].head):
        for model in MODELS:
            table = packed(model.vocab, model.hidden, format)
            label = " fp8" * (format.floating and format.bits == 8)
            yield f"embedding{label}", partial(matrix.embedding, empty(8).long(), table)


def rows(whole: bool) -> Calls:
    from penstock.ops.cuda import elementwise, streams

    for model in MODELS if whole else MODELS[1:]:
        x, weight = empty(8, model.hidden), empty(model.hidden)
        yield "rms_norm", lambda x=x, weight=weight: elementwise.rms_norm(x, weight, 1e-6)
        yield "add_rms_norm", lambda x=x, weight=weight: elementwise.add_rms_norm(x, x, weight, 1e-6)
        yield "add_residual", lambda x=x: elementwise.add_residual(x, x)
        gate_up = empty(8, 2 * model.inter)
        yield "silu_and_mul", lambda gate_up=gate_up: elementwise.activation_and_mul(gate_up, "silu")
        q, table = empty(8, model.heads, model.head_dim), torch.empty(4096, model.head_dim)
        weight = empty(model.head_dim)
        yield "rms_norm", lambda q=q, weight=weight: elementwise.rms_norm(q, weight, 1e-6)
        yield "rope", lambda q=q, table=table: elementwise.rope(q, torch.empty(8).long(), table)
        half = torch.empty(4096, model.head_dim // 2)
        yield "rope_some", lambda q=q, half=half: elementwise.rope(q, torch.empty(8).long(), half, True)
        wide = torch.empty(model.hidden)
        yield "rms_norm", lambda x=x, wide=wide: elementwise.rms_norm(x, wide, 1e-6)
        yield "layer_norm", lambda x=x, wide=wide: elementwise.layer_norm(x, wide, wide, 1e-6)
        yield "scale", lambda x=x: elementwise.scale(x, 2.0, 30.0)
        yield "rotate", lambda x=x: matrix.rotate(x, 64)
        yield "gaussian_topk", lambda gate_up=gate_up: elementwise.gaussian_topk(gate_up, 1.6)
        several = empty(8, 4 * model.hidden)
        yield "equalize_streams", partial(streams.equalize_streams, several, 4, 1e-5)
        for name in ACTIVATIONS:
            yield name, lambda x=x, name=name: elementwise.activation(x, name)
        yield "gelu_and_mul", lambda gate_up=gate_up: elementwise.activation_and_mul(gate_up, "gelu_tanh")


KV_CACHES = ("", "int8", "fp8")


def kv_caches(whole: bool) -> Calls:
    from penstock.checkpoint.kv_spec import transfer_layouts
    from penstock.ops import KVSpec, QKNorms
    from penstock.ops.cuda import kv_cache

    for model, quantization in product(MODELS, KV_CACHES):
        if not whole and model is MODELS[0] and quantization:
            continue
        heads, dim = (model.heads, model.kv_heads, model.kv_heads), model.head_dim
        spec = KVSpec(model.kv_heads, dim, "bfloat16", 64, quantization)
        cache = kv_cache.new_kv_cache([spec] * 2, 2, CPU)[1]
        q, k, v = (
            part.unflatten(-1, (-1, dim))
            for part in torch.empty(8, sum(heads) * dim, dtype=torch.bfloat16).split([n * dim for n in heads], -1)
        )
        slots, table, weight = torch.empty(8).long(), torch.empty(4096, dim), torch.empty(dim, dtype=torch.bfloat16)
        norms = QKNorms(weight, weight, 1e-6) if model.hidden == 1024 else None
        for label, call in (
            ("store_kv", lambda c=cache, k=k, v=v, slots=slots: kv_cache.store_kv(c, k, v, slots)),
            (
                "rope_and_store",
                lambda q=q, k=k, v=v, slots=slots, table=table, c=cache, norms=norms: kv_cache.rope_and_store(
                    q, k, v, slots, table, c, slots, norms
                ),
            ),
        ):
            yield f"{label} {quantization}", call
        layout = transfer_layouts([spec] * 2, 64)[1]
        buffer = torch.empty(layout.slot_bytes, dtype=torch.uint8)
        for copy in (kv_cache.export_kv, kv_cache.import_kv):
            yield (
                "exchange_kv",
                lambda copy=copy, c=cache, b=buffer, slots=slots, layout=layout: copy(c, slots, b, slots, layout),
            )


def sampling(whole: bool) -> Calls:
    from penstock.ops.cuda import sampling

    for model in MODELS if whole else MODELS[1:]:
        logits, bitmask = torch.empty(4, model.vocab), torch.empty(4, model.vocab // 32, dtype=torch.int32)
        columns = [torch.empty(4, dtype=torch.float64)] * 5
        yield "argmax", lambda logits=logits: sampling.argmax_of_logits(logits)
        yield "argmax", lambda logits=logits, bitmask=bitmask: sampling.argmax_of_logits(logits, bitmask)
        yield "apply_bitmask", lambda logits=logits, bitmask=bitmask: sampling.apply_bitmask(logits, bitmask)
        yield "log_softmax", lambda logits=logits: sampling.log_softmax(logits)
        yield "topk", lambda logits=logits: sampling.topk(logits, 20)
        yield "sample_random", lambda logits=logits, columns=columns: sampling.sample_random(logits, *columns)


def adapters(whole: bool) -> Calls:
    model = MODELS[1]
    outputs = (model.heads + 2 * model.kv_heads) * model.head_dim
    slots = lora.new_lora_slots(1, model.hidden, outputs, 3 * 16, torch.bfloat16, torch.device("meta"))
    slots = lora.LoRASlots(*(empty(*each.shape, dtype=each.dtype) for each in vars(slots).values()))
    for tokens in (1, 2048):  # few and many tokens use different kernels
        out, x, rows = empty(tokens, outputs), empty(tokens, model.hidden), empty(tokens, dtype=torch.int32)
        yield "adapters", partial(lora.add_lora, out, x, slots, rows)


def mixtures(whole: bool) -> Calls:
    """Sixteen experts of Qwen3-30B-A3B's size."""
    from penstock.ops import Routing
    from penstock.ops.cuda import experts

    hidden, inter, top_k, count = 2048, 768, 8, 16
    routings = [Routing(top_k), Routing(top_k, "sigmoid", True, 1e-20, 2.5, 4, 2, "two best")]
    by_token = Routing(top_k, "sqrtsoftplus", True, 1e-20, 1.5)
    for tokens in TOKENS if whole else (1, 2048):
        logits, x = torch.empty(tokens, count), empty(tokens, hidden)
        for number, routing in enumerate(routings):
            vectors = (logits[0], logits[0]) if number else (None, None)
            yield f"router {number}", partial(experts.select_experts, logits, routing, *vectors)
        ids, table = torch.empty(tokens).long(), torch.empty(1000, top_k).long()
        yield "router by token", partial(experts.select_experts, logits, by_token, None, None, ids, table)
        ids, weights = torch.empty(tokens, top_k).long(), torch.empty(tokens, top_k)
        yield "combine", partial(experts.combine_experts, empty(tokens, top_k, hidden), weights, x, logits[:, :1])
        for name in FORMATS if whole else ("none", "wint4-g32"):
            matrices = [packed(2 * inter, hidden, FORMATS[name]) for _ in range(count)]
            gate_up = experts.stack_experts(matrices)
            yield f"{name} experts", partial(experts.experts_activation_and_mul, x, gate_up, ids, "silu")


def attentions(whole: bool) -> Calls:
    from penstock.ops import AttentionMetadata, AttentionOptions, KVSpec
    from penstock.ops.cuda import kv_cache
    from penstock.ops.cuda.attention import attention

    shapes = [(model.heads, model.kv_heads, model.head_dim, 64, 0) for model in (MODELS if whole else MODELS[1:])]
    others: dict[tuple[int, ...], dict[str, Any]] = {
        (16, 8, 256, 64, 4096): {"softcap": 50.0},  # Gemma-2-9B
        (64, 8, 64, 64, 128): {"sinks": torch.empty(64)},  # gpt-oss
        (32, 32, 128, 64, 0): {"alibi": torch.empty(32)},  # BLOOM-7B
        (8, 1, 512, 64, 0): {},  # global layers of Gemma 4
    }
    shapes += [*others] if whole else [*others][:1]
    if whole:
        shapes += [(32, 8, 128, 16, 0), (32, 8, 128, 64, 4096), (28, 4, 128, 64, 0), (32, 8, 64, 64, 0)]
        shapes += [(32, 32, 96, 64, 0), (8, 4, 256, 64, 0), (8, 4, 256, 32, 1024), (71, 1, 64, 64, 0)]
    for (heads, kv_heads, dim, block_size, window), quantization in product(shapes, KV_CACHES):
        if quantization and not whole and (heads, kv_heads, dim, block_size, window) in others:
            continue
        spec = KVSpec(kv_heads, dim, "bfloat16", block_size, quantization)
        cache = kv_cache.new_kv_cache([spec] * 2, 2, CPU)[1]
        for tokens, rows in ((8, 8), (2048, 8)):
            if not whole and (quantization, tokens) in (("int8", 2048), ("fp8", 8)):
                continue
            q = torch.empty(tokens, heads, dim, dtype=torch.bfloat16)

            more = others.get((heads, kv_heads, dim, block_size, window), {})

            def call(
                q: torch.Tensor = q,
                cache: Any = cache,
                window: int = window,
                rows: int = rows,
                dim: int = dim,
                more: dict[str, Any] = more,
            ) -> None:
                starts, lengths = torch.zeros(rows + 1, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
                metadata = AttentionMetadata(starts, lengths, torch.zeros(rows, 100, dtype=torch.int32))
                attention(q, cache, metadata, AttentionOptions(dim**-0.5, window, **more))

            yield f"attention {heads} {kv_heads} {dim} {block_size} {window} {quantization}", call


def latents(whole: bool) -> Calls:
    """Latent attention in the shapes of DeepSeek-V3 and, with ``whole``, of DeepSeek-V2-Lite."""
    from penstock.ops import AttentionMetadata, KVSpec
    from penstock.ops.cuda import kv_cache, latent

    for heads, quantization in product((128, 16) if whole else (128,), KV_CACHES if whole else KV_CACHES[:1]):
        cache = kv_cache.new_kv_cache([KVSpec(1, 576, "bfloat16", 64, quantization, latent=512)], 2, CPU)[0]
        q, queries = empty(8, heads, 192), empty(8, heads, 576)

        def store(q: Any = q, cache: Any = cache, queries: Any = queries) -> None:
            down, tokens, table = empty(8, 2112), torch.empty(8).long(), torch.empty(4096, 64)
            k, values, out = down[:, 2048:], down[:, 1536:2048], queries[..., 512:]
            latent.latent_rope_and_store(q[..., 128:], k, values, tokens, table, cache, tokens, True, out)

        def attend(queries: Any = queries, cache: Any = cache) -> None:
            starts, lengths = torch.zeros(9, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
            metadata = AttentionMetadata(starts, lengths, torch.zeros(8, 100, dtype=torch.int32))
            latent.latent_attention(queries, cache, metadata, 0.1, 512)

        yield f"latent_rope_and_store {quantization}", store
        yield f"latent_attention {heads} {quantization}", attend
        for outputs, inputs in ((512, 128), (128, 512)):
            weight = latent.pack_by_head(empty(heads, outputs, inputs))
            yield "linear_by_head", partial(latent.linear_by_head, empty(8, heads, inputs), weight)


def sparse(whole: bool) -> Calls:
    """Sparse attention in the shapes of DeepSeek-V3.2 and, with ``whole``, of GLM-5."""
    from penstock.ops import AttentionMetadata, KVSpec
    from penstock.ops.cuda import kv_cache, latent

    for heads, index_heads in ((128, 64), (64, 32)) if whole else ((128, 64),):
        cache = kv_cache.new_kv_cache([KVSpec(1, 704, "bfloat16", 64, latent=512, index_dim=128)], 2, CPU)[0]

        queries, numbers = empty(8, heads, 576), torch.zeros(9, dtype=torch.int32)

        def store(cache: Any = cache, queries: Any = queries) -> None:
            tokens, table, out = torch.empty(8).long(), torch.empty(4096, 64), queries[..., 512:]
            down = empty(8, 64), empty(8, 512)
            latent.latent_rope_and_store(out, *down, tokens, table, cache, tokens, True, out, empty(8, 128))

        def select(index_heads: int = index_heads, cache: Any = cache, numbers: Any = numbers) -> None:
            metadata = AttentionMetadata(numbers, numbers[:8], torch.zeros(8, 100, dtype=torch.int32))
            latent.select_keys(empty(8, index_heads, 128), torch.empty(8, index_heads), cache, metadata, 2048, 0.1)

        def attend(queries: Any = queries, cache: Any = cache, numbers: Any = numbers) -> None:
            selected = AttentionMetadata(numbers, numbers[:8], torch.zeros(8, 2048, dtype=torch.int32))
            latent.latent_attention(queries, cache, selected, 0.1, 512, selected=True)

        yield "store index keys", store
        yield f"select_keys {index_heads}", select
        yield f"sparse attention {heads}", attend


def compressed(whole: bool) -> Calls:
    """Compressed attention and hyper-connections in the shapes of DeepSeek-V4."""
    from penstock.ops import AttentionMetadata, Batch, KVSpec, StateBatch
    from penstock.ops.compressed import Compression
    from penstock.ops.cuda import compressed as ops
    from penstock.ops.cuda import kv_cache

    def integers(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32)

    tokens, heads, streams, hidden = 8, 64, 4, 4096
    attention = AttentionMetadata(integers(5), integers(4), torch.zeros(4, 100, dtype=torch.int32))
    numbers = StateBatch([], integers(4), integers(4), integers(4), integers(5), integers(12), integers(12))
    none, table = torch.zeros(tokens, dtype=torch.int64), torch.empty(4096, 64)
    batch = Batch(none, none, none, attention, none, attention, states=numbers)
    for rate, index_dim in ((4, 128), (128, 0), (0, 0)):
        entry = 512 + index_dim if rate else 0
        spec = KVSpec(1, 512 + entry, "bfloat16", 64, latent=512, index_dim=entry)
        cache = kv_cache.new_kv_cache([spec], 2, CPU)[0]
        for dim, offset in [(512, 512)] * (rate > 0) + [(index_dim, 1024)] * (index_dim > 0):
            sizes = Compression(dim, rate, index_dim > 0, offset, 1e-6, "state", "kept")
            width = 2 * sizes.channels
            kept = {"state": empty(12, sizes.span, width), "kept": empty(8, 2, width)}
            bias, norm = torch.empty(rate, sizes.channels), torch.empty(dim)
            given = empty(tokens, width), sizes, bias, norm, table, cache, kept, batch
            yield f"compress {rate} {dim}", partial(ops.compress, *given)
        index = (empty(tokens, 64, 128), torch.empty(tokens, 64), 0.1) if index_dim else ()

        def select_entries(cache: Any = cache, rate: int = rate, index: Any = index) -> AttentionMetadata:
            metadata = AttentionMetadata(integers(5), integers(4), torch.zeros(4, 100, dtype=torch.int32))
            return ops.select_entries(cache, metadata, tokens, 128, rate, 512 if rate else 0, *index)

        def attend(cache: Any = cache) -> None:
            columns = 1024 if cache.spec.index_dim else 128
            selected = AttentionMetadata(integers(5), integers(4), torch.zeros(8, columns, dtype=torch.int32))
            ops.compressed_attention(empty(tokens, heads, 512), cache, selected, 0.1, torch.empty(heads))

        yield f"select_entries {rate}", select_entries
        yield f"compressed_attention {rate}", attend
    for inverse in (False, True):
        yield "rotate_tail", partial(ops.rotate_tail, empty(tokens, heads, 512), none, table, inverse)
    for width, kinds in ((streams, 1), ((2 + streams) * streams, 3)):
        weights = torch.empty(tokens, width)
        yield "hyper_weights", partial(ops.hyper_weights, weights, weights[0], torch.empty(kinds), streams, 20, 1e-6)
    residual = empty(tokens, streams * hidden)
    yield "collapse_streams", partial(ops.collapse_streams, residual, weights, streams)
    yield "mix_streams", partial(ops.mix_streams, empty(tokens, hidden), residual, weights, streams)


def states(whole: bool) -> Calls:
    """Recurrent layers in the shapes of Qwen3-Next, Kimi-Linear, Nemotron-H, MiniMax-01, Jamba and RecurrentGemma."""
    from penstock.ops import AttentionMetadata, Batch, DeltaSizes, ScanWeights, StateBatch, StateSpaceSizes
    from penstock.ops.cuda import elementwise, scans, states

    def integers(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32)

    def cache_of(state: tuple[int, ...], **widths: int) -> dict[str, torch.Tensor]:
        kept = {name: empty(8, max_drafts, width) for name, width in widths.items()}
        return {"state": torch.empty(12, *state), **kept}

    tokens, max_drafts = 8, 2
    attention = AttentionMetadata(integers(5), integers(4), torch.zeros(4, 100, dtype=torch.int32))
    numbers = StateBatch([], integers(4), integers(4), integers(4), integers(5), integers(12), integers(12))
    none = torch.zeros(tokens, dtype=torch.int64)
    batch = Batch(none, none, none, attention, none, attention, states=numbers)
    for channels, bias in ((8192, False), (10304, True)):
        x, weight, offset = empty(tokens, channels + 4096), torch.empty(4, channels), torch.empty(channels)
        kept = {"conv": empty(12, 3, channels), "conv_in": empty(8, max_drafts, channels)}
        yield (
            "short_convolution",
            partial(states.short_convolution, x[:, :channels], weight, offset if bias else None, True, kept, batch),
        )
    for keys, values, by_channel in ((16, 32, False), (32, 32, True)):
        sizes = DeltaSizes(keys, values, 128, 128, decay_dim=128 if by_channel else 1)
        width, gates = (2 * keys + values) * 128, values * (1 + sizes.decay_dim)
        parameters = torch.empty(values), torch.empty(values * sizes.decay_dim), sizes
        kept = cache_of((values, 128, 128), qkv=width, gates=gates)
        yield (
            "gated_delta_rule",
            partial(states.gated_delta_rule, empty(tokens, width), empty(tokens, gates), *parameters, kept, batch),
        )
    for size in (StateSpaceSizes(128, 8, 64, 128), StateSpaceSizes(64, 1, 64, 256, 0.1, 0.9)):
        width = size.heads * size.head_dim + 2 * size.groups * size.state_size
        heads = [torch.empty(size.heads)] * 3
        kept = cache_of((size.heads, size.state_size, size.head_dim), xbc=width, steps=size.heads)
        yield (
            "state_space",
            partial(states.state_space, empty(tokens, width), empty(tokens, size.heads), *heads, size, kept, batch),
        )
    kept = cache_of((64, 128, 128), qkv=3 * 8192)
    yield (
        "lightning_attention",
        partial(states.lightning_attention, empty(tokens, 3 * 8192), torch.empty(64), kept, batch),
    )
    x, b = empty(tokens, 8192), empty(tokens, 16)
    weights = ScanWeights(torch.empty(16, 8192), torch.empty(8192), torch.empty(8192))
    kept = cache_of((16, 8192), x=8192, steps=8192, b=16)
    yield "selective_scan", partial(scans.selective_scan, x, x, b, b, x, weights, kept, batch)
    x, gates, rates, bias = empty(tokens, 2560), empty(tokens, 10, 512), torch.empty(10, 256), torch.empty(10, 512)
    yield "rg_lru", partial(scans.rg_lru, x, gates, rates, bias, cache_of((10, 256), x=2560, gates=5120), batch)
    for shape, first in (((128,), False), ((8, 512), True)):
        x = empty(tokens, 4096)
        yield "gated_rms_norm", partial(elementwise.gated_rms_norm, x, x, empty(*shape), 1e-6, first, sigmoid=not first)
    for function in ("", "silu", "gelu_tanh"):
        yield "multiply", partial(elementwise.multiply, empty(tokens, 2560), empty(tokens, 2560), function)
    yield "multiply_gate", partial(elementwise.multiply_gate, empty(tokens, 16, 256), empty(tokens, 4096))


OPS: tuple[Callable[[bool], Calls], ...] = (
    products,
    adapters,
    mixtures,
    embeddings,
    rows,
    kv_caches,
    attentions,
    latents,
    sparse,
    compressed,
    states,
    sampling,
)
"""Functions that call ops, with True for all variants (``--whole``), or False for the variants of the test suite."""


# --- From launches to machine code ------------------------------------------------------------------------------------


@dataclass
class Job:
    """A kernel launch to compile for a target."""

    launch: Launch
    target: int
    signature: dict[str, str]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]
    products: set[str]


def jobs(target: int, ops: list[Callable[[bool], Calls]], whole: bool) -> tuple[list[Job], set[str]]:
    """Launches of ops on a target, and labels of the calls that the target does not support."""
    backend = make_backend(GPUTarget("cuda", target, 32))
    found: dict[str, Job] = {}
    skipped: set[str] = set()
    for op in ops:
        for label, call in op(whole):
            try:
                with record_launches(ARCHITECTURES[target]) as launches:
                    call()
            except PenstockError as error:
                assert error.code is Code.UNSUPPORTED
                skipped.add(label)
            for launch in launches:
                if target < MIN_FP8 and any(
                    isinstance(arg, torch.Tensor) and arg.dtype == torch.float8_e4m3fn for arg in launch.args
                ):
                    skipped.add(label)
                    continue
                job = _job(launch, target, backend)
                key = str((launch.kernel, job.signature, job.constants, job.attributes, job.options))
                found.setdefault(key, job).products.add(label)
    return list(found.values()), skipped


def _job(launch: Launch, target: int, backend: Any) -> Job:
    """Specialize arguments as Triton's launch does: integers equal to 1, integers and addresses divisible by 16."""
    kernel = launch.kernel
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": False}
    bound, specialization, extra = bind(*launch.args, **launch.constants, **options)
    parsed, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, extra)
    return Job(launch, target, signature, constants, attributes, parsed.__dict__, set())


def compile_job(job: Job, ptx_folder: str | None) -> Compiled:
    launch, names = job.launch, list(job.signature)
    values = {names[path[0]]: str(value) for path, value in job.constants.items()}
    result = Compiled(
        launch.kernel.fn.__name__,
        job.target,
        sorted(job.products),
        {name: values.get(name, type_) for name, type_ in job.signature.items()},
        launch.num_warps,
        launch.num_stages,
    )
    started = time.perf_counter()
    try:
        source = ASTSource(launch.kernel, job.signature, job.constants, job.attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", job.target, 32), options=job.options)
    except Exception as error:
        result.error = f"{type(error).__name__}: {error}"[-2000:]
        return result
    result.seconds = round(time.perf_counter() - started, 2)
    result.shared = compiled.metadata.shared
    result.tensor_memory = getattr(compiled.metadata, "tmem_size", 0)
    result.mma = kinds_of_mma(compiled.asm["ptx"])
    result.registers, result.local = resources(compiled.asm["cubin"])
    if ptx_folder:
        name = f"{result.kernel}-sm{job.target}-{abs(hash(str(result.arguments))):x}"
        for kind in ("ptx", "ttgir"):
            Path(ptx_folder, f"{name}.{kind}").write_text(f"// {asdict(result)}\n" + compiled.asm[kind])
    return result


def kinds_of_mma(ptx: str) -> list[str]:
    """Matrix instructions in PTX, such as ``wgmma.k16.f32.bf16.bf16`` or ``mma.m16n8k16.f32.bf16.bf16.f32``."""
    kinds = set()
    for line in ptx.splitlines():
        if found := re.search(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+(k\d+)((?:\.\w+)+)", line):
            kinds.add(f"wgmma.{found[1]}{found[2]}")
        elif found := re.search(r"\bmma\.sync\.aligned\.(m\d+n\d+k\d+)(?:\.row\.col)?((?:\.\w+)+)", line):
            kinds.add(f"mma.{found[1]}{found[2]}")
        elif found := re.search(r"(tcgen05\.mma\.[\w.:]+)", line):
            kinds.add(found[1])
    return sorted(kinds)


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory per thread."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        output = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    usage = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", output)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]


@contextmanager
def triton_cache(folder: str | None) -> Iterator[None]:
    """Use a folder as Triton's cache (its keys are sources, options and Triton's version); None: an empty cache."""
    with tempfile.TemporaryDirectory() as empty_folder:
        os.environ["TRITON_CACHE_DIR"] = folder or empty_folder
        yield


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--targets", default=",".join(map(str, ARCHITECTURES)))
    parser.add_argument("--ops", help="comma-separated names of functions in OPS (default: all)")
    parser.add_argument("--whole", action="store_true", help="compile all variants, not only the test suite's")
    parser.add_argument("--cache", metavar="FOLDER", help="Triton's cache (default: a new, empty one)")
    parser.add_argument("--ptx", metavar="FOLDER", help="folder for PTX and Triton's IR (default: not written)")
    options = parser.parse_args()
    ops = [op for op in OPS if not options.ops or op.__name__ in options.ops.split(",")]
    listed: list[Job] = []
    skipped: dict[int, list[str]] = {}
    for target in map(int, options.targets.split(",")):
        found, missing = jobs(target, ops, options.whole)
        listed += found
        if missing:
            skipped[target] = sorted(missing)
    # The launches cannot be pickled: forked processes inherit these globals.
    global _listed, _ptx
    _listed, _ptx = listed, options.ptx
    with triton_cache(options.cache), ProcessPoolExecutor(PROCESSES, get_context("fork")) as pool:
        results = list(pool.map(_compile_listed, range(len(listed))))
    json.dump({"kernels": [asdict(result) for result in results], "skipped": skipped}, sys.stdout, indent=1)


_listed: list[Job] = []
_ptx: str | None = None


def _compile_listed(index: int) -> Compiled:
    torch.set_num_threads(1)
    return compile_job(_listed[index], _ptx)


if __name__ == "__main__":
    main()
