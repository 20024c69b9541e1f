"""Checks of every op of the CUDA backend against the reference, computed in float32 on the same device."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice, product
from typing import Any

import torch
from shapes import Scale
from torch import Tensor

from penstock.core.quantization import SCHEMES, UNQUANTIZED, Format
from penstock.ops import AttentionMetadata, AttentionOptions, KVSpec, QKNorms, Routing, backend, reference
from penstock.ops.quantized_weight import QuantizedWeight

TOLERANCE = {torch.bfloat16: 1.2e-2, torch.float16: 2e-3, torch.float32: 2e-5}
"""Allowed relative errors (root mean square of the errors over the root mean square of the result) by dtype: about one
and a half roundings."""
SUMS = {"": 2e-5, "integers": 2e-3, "fp8": 2e-2}
"""Allowed relative errors of matrix products with float32 results by weight format: activations near the middle of two
8-bit values may be rounded differently, and tensor cores accumulate fp8 products with fewer bits."""
MXFP4 = Format(4, 32, floating=True)
Check = tuple[str, Callable[[], tuple[float, float]]]
"""Name of a check, and a function that returns the error and the allowed error."""


def run(scale: Scale, portion: str = "0/1") -> dict[str, Any]:
    """Run every n-th check from the i-th on, where ``portion`` is ``i/n``."""
    first, portions = map(int, portion.split("/"))
    device = torch.device(scale.device)
    ops = backend(device, scale.ops)
    dtypes = [torch.float32, torch.float16] if scale.interpret else [torch.bfloat16, torch.float16, torch.float32]
    rows: list[dict[str, Any]] = []
    for name, check in islice(checks(ops, device, scale, dtypes), first, None, portions):
        try:
            error, allowed = check()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            rows.append({"op": name, "error": error, "allowed": allowed, "right": bool(error <= allowed)})
        except Exception as failure:
            message = "".join(traceback.format_exception_only(failure)).strip()
            rows.append({"op": name, "right": False, "failure": message[-1500:]})
            if is_lost(device):
                break  # this process can run no more kernels
    wrong = [row["op"] for row in rows if not row["right"]]
    return {"checks": rows, "count": len(rows), "wrong": wrong}


def is_lost(device: torch.device) -> bool:
    """True if a kernel failure has made the GPU unusable for this process."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def relative(found: Tensor, expected: Tensor) -> float:
    """Root mean square of the errors, relative to that of the expected values; infinite if a value is not finite."""
    if found.shape != expected.shape or not found.isfinite().all():
        return float("inf")
    difference, size = found.double() - expected.double(), expected.double().square().mean().sqrt()
    return float(difference.square().mean().sqrt() / size.clamp(min=1e-30))


class Draw:
    """Generator of random tensors on a device."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self._generator, device=self._device) * scale).to(dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, shape, generator=self._generator, device=self._device, dtype=dtype)


def checks(ops: Any, device: torch.device, scale: Scale, dtypes: list[torch.dtype]) -> Iterator[Check]:
    small = scale.interpret
    draw = Draw(device)
    tokens = (1, 3, 33) if small else (1, 2, 17, 64, 130, 513, 2048)
    matrices = ((72, 100),) if small else ((1024, 3072), (4096, 4096), (1000, 333), (14336, 4096))
    formats = [("", UNQUANTIZED)] + [(name, scheme.layers) for name, scheme in SCHEMES.items() if scheme.layers.bits]
    formats.append(("fp8 blocks", Format(8, 128, 8, floating=True, rows_per_scale=128)))
    for dtype, (inputs, outputs), (name, format) in product(dtypes, matrices, formats):
        if small and dtype == torch.float32:
            continue  # float32 sums are not exact in the interpreter
        for gated in (False, True) if outputs % 2 == 0 else (False,):
            label = f"{'linear_activation_and_mul' if gated else 'linear'} {name} {dtype} {inputs} x {outputs}"
            yield label, partial(products, ops, draw, tokens, inputs, outputs, dtype, format, gated)
    for dtype in dtypes:
        for name, check in rowwise(ops, draw, dtype, small).items():
            yield f"{name} {dtype}", check
        for quantization in ("", "int8", "fp8"):
            for window, (heads, kv_heads, dim) in product(
                (0,) if small else (0, 700), ((4, 2, 16),) if small else ((32, 8, 128), (16, 8, 128), (4, 4, 80))
            ):
                label = f"attention {quantization} {dtype} heads {heads}/{kv_heads} of {dim} window {window}"
                yield (
                    label,
                    lambda d=dtype, q=quantization, w=window, h=heads, k=kv_heads, n=dim: attention(
                        ops, draw, device, d, q, w, h, k, n, small
                    ),
                )
        yield f"add_lora {dtype}", lambda d=dtype: lora(ops, draw, device, d, small)
        kinds = [each for each in formats if each[0] in ("", "w8a8", "wint4", "fp8", "fp8 blocks")]
        for (name, format), tokens in product([*kinds, ("mxfp4", MXFP4)], (9,) if small else (1, 8, 100, 2048)):
            if not (small and dtype == torch.float32):
                label = f"experts {name} {dtype}, {tokens} tokens"
                yield label, partial(experts, ops, draw, tokens, dtype, format, small)
        for quantization, heads in product(("", "int8", "fp8"), (4,) if small else (16, 128)):
            label = f"latent_attention {quantization} {dtype} {heads} heads"
            yield label, partial(latent_attention, ops, draw, device, dtype, quantization, heads, small)
    for vocab in (301,) if small else (151936, 128256, 50257):
        yield f"sampling of {vocab}", lambda v=vocab: sampling(ops, draw, device, v, 3 if small else 64)


def products(
    ops: Any,
    draw: Draw,
    tokens: tuple[int, ...],
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    format: Format,
    gated: bool,
) -> tuple[float, float]:
    """Check matrix products for several numbers of tokens; each row must be bitwise identical in all of them."""
    weight = draw.normal(outputs, inputs, dtype=dtype, scale=inputs**-0.5)
    bias = draw.normal(outputs, dtype=dtype)
    packed, plain = ops.pack([weight], bias, format), reference.pack([weight.float()], bias.float(), format)
    call = partial(ops.linear_activation_and_mul, function="silu") if gated else partial(ops.linear, out_float32=True)
    define = partial(reference.linear_activation_and_mul, function="silu") if gated else reference.linear
    x = draw.normal(max(tokens), inputs, dtype=dtype)
    whole = call(x, packed)
    for count in tokens:
        if not torch.equal(call(x[:count].clone(), packed), whole[:count]):
            raise AssertionError(f"a row has different bits in a batch of {count} tokens than in one of {max(tokens)}")
    allowed = SUMS["fp8" if format.floating else "integers" if format.bits else ""]
    return relative(whole, define(x.float(), plain)), max(allowed, TOLERANCE[dtype]) if gated else allowed


def rowwise(ops: Any, draw: Draw, dtype: torch.dtype, small: bool) -> dict[str, Callable[[], tuple[float, float]]]:
    tokens, size, dim = (5, 48, 16) if small else (777, 4096, 128)
    x, residual = draw.normal(tokens, size, dtype=dtype), draw.normal(tokens, size, dtype=dtype)
    weight, heads = draw.normal(size, dtype=dtype), draw.normal(tokens, 4, dim, dtype=dtype)
    positions, table = draw.integers(0, 999, tokens), draw.normal(1000, dim)
    vocabulary = draw.normal(301, size, dtype=dtype)
    ids, allowed = draw.integers(0, 301, tokens), TOLERANCE[dtype]

    def compared(found: Tensor, expected: Tensor) -> tuple[float, float]:
        return relative(found, expected), allowed

    return {
        "rms_norm": lambda: compared(
            ops.rms_norm(x, weight, 1e-6), reference.rms_norm(x.float(), weight.float(), 1e-6)
        ),
        "add_rms_norm": lambda: compared(
            torch.cat(ops.add_rms_norm(x, residual.clone(), weight, 1e-6)),
            torch.cat(reference.add_rms_norm(x.float(), residual.float(), weight.float(), 1e-6)),
        ),
        "add_residual": lambda: compared(ops.add_residual(x, residual.clone()), x.float() + residual.float()),
        "rope": lambda: compared(ops.rope(heads, positions, table), reference.rope(heads.float(), positions, table)),
        "activation_and_mul": lambda: compared(
            ops.activation_and_mul(x, "silu"), reference.activation_and_mul(x.float(), "silu")
        ),
        "embedding": lambda: compared(ops.embedding(ids, ops.pack([vocabulary])), vocabulary[ids]),
        "index_select": lambda: compared(ops.index_select(x, positions % tokens), x[positions % tokens]),
    }


def attention(
    ops: Any,
    draw: Draw,
    device: torch.device,
    dtype: torch.dtype,
    quantization: str,
    window: int,
    heads: int,
    kv_heads: int,
    dim: int,
    small: bool,
) -> tuple[float, float]:
    """Check ``rope_and_store`` and ``attention`` with a batch of decodes, chunks and a prompt, over scattered blocks.
    The output of each sequence must be bitwise identical if it is computed alone."""
    size = 16 if small else 64
    batch = (
        [(1, 3), (1, 40), (9, 30), (20, 20)]
        if small
        else [(1, 1), (1, 64), (1, 1025), (1, 5000), (100, 900), (700, 700)]
    )
    dtype_name = str(dtype).removeprefix("torch.")
    spec = KVSpec(kv_heads, dim, dtype_name, size)
    if quantization:
        spec = replace(spec, quantization=quantization)
    blocks = sum(-(-length // size) for _, length in batch)
    (cache,) = ops.new_kv_cache([spec], blocks, device)
    (plain,) = reference.new_kv_cache([replace(spec, dtype="float32")], blocks, device)
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).tolist()
    width = max(-(-length // size) for _, length in batch)
    tables = torch.zeros(len(batch), width, dtype=torch.int32)
    table = draw.normal(6000, dim)
    for i, (_, length) in enumerate(batch):
        own = [order.pop() for _ in range(-(-length // size))]
        tables[i, : len(own)] = torch.tensor(own, dtype=torch.int32)
    tables = tables.to(device)
    norms = QKNorms(draw.normal(dim, dtype=dtype), draw.normal(dim, dtype=dtype), 1e-6)
    wide_norms = QKNorms(norms.q_weight.float(), norms.k_weight.float(), 1e-6)
    queries, expected_queries = [], []
    for i, (count, length) in enumerate(batch):
        positions = torch.arange(length, device=device)
        slots = tables[i, positions // size].long() * size + positions % size
        q, k, v = (draw.normal(length, n, dim, dtype=dtype) for n in (heads, kv_heads, kv_heads))
        queries.append(ops.rope_and_store(q, k, v, positions, table, cache, slots, norms)[-count:])
        wide = (each.float() for each in (q, k, v))
        expected = reference.rope_and_store(*wide, positions, table, plain, slots, wide_norms)
        expected_queries.append(expected[-count:])
    counts, lengths = ([pair[i] for pair in batch] for i in (0, 1))

    def metadata(rows: slice) -> AttentionMetadata:
        starts = torch.tensor([0, *counts[rows]]).cumsum(0).to(device, torch.int32)
        return AttentionMetadata(starts, torch.tensor(lengths[rows], dtype=torch.int32, device=device), tables[rows])

    whole, options = slice(0, len(batch)), AttentionOptions(dim**-0.5, window)
    found = ops.attention(torch.cat(queries), cache, metadata(whole), options)
    expected = reference.attention(torch.cat(expected_queries), plain, metadata(whole), options)
    at = 0
    for i, own_queries in enumerate(queries):
        alone = ops.attention(own_queries.contiguous(), cache, metadata(slice(i, i + 1)), options)
        if not torch.equal(alone, found[at : at + counts[i]]):
            raise AssertionError(f"sequence {i} has different bits alone")
        at += counts[i]
    return relative(found, expected), {"": TOLERANCE[dtype], "int8": 0.02, "fp8": 0.08}[quantization]


def experts(ops: Any, draw: Draw, tokens: int, dtype: torch.dtype, format: Format, small: bool) -> tuple[float, float]:
    """Check the router and both matrix products of an MoE layer. The outputs of the first and last token must be
    bitwise identical if each is computed alone."""
    count, hidden, size = (4, 64, 96) if small else (32, 1024, 768)
    routing = Routing(2 if small else 8, renormalize=True)

    def pair(outputs: int, inputs: int) -> tuple[Any, Any]:
        if format.is_mxfp4:
            codes = draw.integers(-8, 8, outputs, inputs).to(torch.int8)
            scales = torch.exp2(draw.integers(-9, -5, outputs, inputs // format.group_size).float())
            weight = QuantizedWeight(codes, scales, format)
            return ops.pack_quantized([weight], dtype), reference.pack_quantized([weight], torch.float32)
        weight = draw.normal(outputs, inputs, dtype=dtype, scale=inputs**-0.5)
        return ops.pack([weight], None, format), reference.pack([weight.float()], None, format)

    def stacked(outputs: int, inputs: int) -> tuple[Any, Any]:
        ours, theirs = zip(*(pair(outputs, inputs) for _ in range(count)), strict=True)
        return ops.stack_experts(ours), reference.stack_experts(theirs)

    gate_up, down = stacked(2 * size, hidden), stacked(hidden, size)
    x, logits = draw.normal(tokens, hidden, dtype=dtype), draw.normal(tokens, count)
    ids, weights = ops.select_experts(logits, routing)
    expected_ids, expected_weights = reference.select_experts(logits, routing)
    if not torch.equal(ids, expected_ids) or relative(weights, expected_weights) > 1e-5:
        raise AssertionError("the router selects other experts or weights than the reference")

    def layer(rows: slice) -> Tensor:
        gated = ops.experts_activation_and_mul(x[rows].clone(), gate_up[0], ids[rows], "silu")
        return ops.combine_experts(ops.experts_linear(gated, down[0], ids[rows]), weights[rows])

    whole = layer(slice(None))
    for row in {0, tokens - 1}:
        if not torch.equal(layer(slice(row, row + 1))[0], whole[row]):
            raise AssertionError(f"token {row} has different bits alone than in a batch of {tokens}")
    wide = reference.experts_activation_and_mul(x.float(), gate_up[1], ids, "silu")
    expected = reference.combine_experts(reference.experts_linear(wide, down[1], ids), weights)
    allowed = SUMS["fp8" if format.floating and format.bits == 8 else "integers" if format.bits else ""]
    return relative(whole, expected), max(2 * allowed, TOLERANCE[dtype])


def latent_attention(
    ops: Any, draw: Draw, device: torch.device, dtype: torch.dtype, quantization: str, heads: int, small: bool
) -> tuple[float, float]:
    """Check ``latent_rope_and_store`` and ``latent_attention`` with decodes, chunks and a prompt. The output of each
    sequence must be bitwise identical if it is computed alone."""
    size, latent, rope = (16, 48, 16) if small else (64, 512, 64)
    batch = [(1, 3), (1, 40), (9, 30)] if small else [(1, 1), (1, 64), (1, 1025), (1, 5000), (100, 900), (300, 300)]
    spec = KVSpec(1, latent + rope, str(dtype).removeprefix("torch."), size, quantization, latent=latent)
    needed = [-(-length // size) for _, length in batch]
    (cache,) = ops.new_kv_cache([spec], sum(needed), device)
    (plain,) = reference.new_kv_cache([replace(spec, dtype="float32")], sum(needed), device)
    order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(0)).int().split(needed)
    tables = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True).to(device)
    table, queries, expected_queries = draw.normal(6000, rope), [], []
    for i, (count, length) in enumerate(batch):
        positions = torch.arange(length, device=device)
        slots = tables[i, positions // size].long() * size + positions % size
        q, k = draw.normal(length, heads, rope, dtype=dtype), draw.normal(length, rope, dtype=dtype)
        vectors, turned = (
            draw.normal(length, latent, dtype=dtype),
            draw.normal(length, heads, latent + rope, dtype=dtype),
        )
        wide = turned.float()
        own = q, k, vectors, positions, table, cache, slots, True, turned[..., latent:]
        ops.latent_rope_and_store(*own)
        exact = q.float(), k.float(), vectors.float(), positions, table, plain, slots, True, wide[..., latent:]
        reference.latent_rope_and_store(*exact)
        queries.append(turned[-count:].contiguous())
        expected_queries.append(wide[-count:])
    counts, lengths = ([pair[i] for pair in batch] for i in (0, 1))

    def metadata(rows: slice) -> AttentionMetadata:
        starts = torch.tensor([0, *counts[rows]]).cumsum(0).to(device, torch.int32)
        return AttentionMetadata(starts, torch.tensor(lengths[rows], dtype=torch.int32, device=device), tables[rows])

    whole = slice(0, len(batch))
    scale = (latent + rope) ** -0.5
    found = ops.latent_attention(torch.cat(queries), cache, metadata(whole), scale, latent)
    expected = reference.latent_attention(torch.cat(expected_queries), plain, metadata(whole), scale, latent)
    at = 0
    for i, own_queries in enumerate(queries):
        alone = ops.latent_attention(own_queries, cache, metadata(slice(i, i + 1)), scale, latent)
        if not torch.equal(alone, found[at : at + counts[i]]):
            raise AssertionError(f"sequence {i} has different bits alone")
        at += counts[i]
    return relative(found, expected), {"": TOLERANCE[dtype], "int8": 0.02, "fp8": 0.08}[quantization]


def lora(ops: Any, draw: Draw, device: torch.device, dtype: torch.dtype, small: bool) -> tuple[float, float]:
    from penstock.ops import LoRAWeights

    inputs, outputs, tokens = (40, 56, 7) if small else (1024, 3072, 300)
    own, plain = (each.new_lora_slots(4, inputs, outputs, 32, dtype, device) for each in (ops, reference))
    for slot, rank in ((0, 8), (2, 16), (3, 32)):
        a, b = draw.normal(rank, inputs, dtype=dtype, scale=inputs**-0.5), draw.normal(outputs, rank, dtype=dtype)
        parts = [LoRAWeights(a, b, 0, 0.5)]
        ops.set_lora(own, slot, ops.pack_lora(parts))
        reference.set_lora(plain, slot, reference.pack_lora(parts))
    x, out = draw.normal(tokens, inputs, dtype=dtype), draw.normal(tokens, outputs, dtype=dtype)
    row_slots = torch.tensor([-1, 0, 2, 3], dtype=torch.int32, device=device).repeat(tokens)[:tokens]
    found = ops.add_lora(out.clone(), x, own, row_slots)
    return relative(found, reference.add_lora(out.clone(), x, plain, row_slots)), TOLERANCE[dtype] * 2


def sampling(ops: Any, draw: Draw, device: torch.device, vocab: int, rows: int) -> tuple[float, float]:
    """Share of rows in which sampling and the reference choose different tokens, due to rounding; at most 2 %."""
    logits = draw.normal(rows, vocab, scale=3.0)
    bitmask = draw.integers(-(2**31), 2**31, rows, -(-vocab // 32), dtype=torch.int32)
    expected = reference.apply_bitmask(logits.clone(), bitmask)
    assert torch.equal(ops.apply_bitmask(logits.clone(), bitmask), expected)

    def column(*values: float) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device).repeat(rows)[:rows]

    columns = [column(1.0, 0.7), column(0, 50, 5), column(1.0, 0.9, 0.95, 1.0, 0.5), column(0.0, 0.0, 0.0, 0.05)]
    columns.append(torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device))
    found, largest = ops.sample_random(logits, *columns)
    assert torch.equal(largest, logits.amax(-1))
    alone = torch.cat([ops.sample_random(logits[i : i + 1], *(c[i : i + 1] for c in columns))[0] for i in range(rows)])
    assert torch.equal(found, alone), "a row gets another token alone than in the batch"
    differ = (found != reference.sample_random(logits, *columns)[0]).double().mean().item()
    return differ, 0.02
