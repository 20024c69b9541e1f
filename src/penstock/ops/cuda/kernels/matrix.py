"""Kernels of products with matrices, and of embeddings.

Weights are the rows of the matrix instruction (``acc[BN, BT] += weights[BN, BK] @ inputs[BT, BK].T``), tokens its
columns. Thus any number of tokens uses the same instruction (on Hopper ``wgmma`` with 64 rows), which sums over the
inputs in ascending order in one accumulator, and a token's bits do not depend on BN, BT and BK. A program computes the
first ``8 * row_groups`` of the BN rows. The other rows are zeros that are not read, so that small matrices also use all
multiprocessors. With GATED (the activation of a gate), a program computes the same number of outputs from two rows
each. Kernels are compiled once for any number of rows, with and without a bias.

Packed weights are stored in panels of 64 outputs, and within a panel in blocks of inputs, so that a program reads
memory sequentially.
"""

import triton
import triton.language as tl

from .elementwise import gated

PANEL = tl.constexpr(64)
"""Number of outputs of a panel."""
BLOCK = tl.constexpr(128)
"""Number of inputs of a block of 8-bit weights: 128 bytes per row."""
GROUP = tl.constexpr(8)
"""Number of consecutive tiles of tokens with the same weights, so that concurrent programs read most tokens and weights
from L2."""
ASM = tl.constexpr(not triton.knobs.runtime.interpret)
"""Convert weights by inline assembly, four at a time, which takes a third of the instructions of separate conversions.
False in the interpreter, which does not support inline assembly."""


@triton.jit
def _widen_int8(weights, dtype: tl.constexpr):
    """Convert 8-bit integers to ``dtype``. Bytes become the low mantissa bits of numbers with a known exponent; the
    contribution of the exponent is then subtracted exactly."""
    if ASM and dtype == tl.bfloat16:  # 7 mantissa bits: 128 + (q & 127), minus 128 for q >= 0, minus 256 for q < 0
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d;
            prmt.b32 a, $2, 0, 0x4140;
            prmt.b32 b, $2, 0, 0x4342;
            lop3.b32 c, a, 0x00800080, 0x43004300, 0xEA;
            lop3.b32 d, b, 0x00800080, 0x43004300, 0xEA;
            lop3.b32 a, a, 0x007F007F, 0x43004300, 0xEA;
            lop3.b32 b, b, 0x007F007F, 0x43004300, 0xEA;
            mov.b32 $0, 0xBF80BF80;
            fma.rn.bf16x2 $1, d, $0, b;
            fma.rn.bf16x2 $0, c, $0, a;
            }""",
            "=&r,=&r,r",
            [weights],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    if ASM and dtype == tl.float16:  # computes (1024 + 128 + q) - 1152
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, one, less;
            prmt.b32 a, $2, 0, 0x4140;
            prmt.b32 b, $2, 0, 0x4342;
            xor.b32 a, a, 0x64806480;
            xor.b32 b, b, 0x64806480;
            mov.b32 one, 0x3C003C00;
            mov.b32 less, 0xE480E480;
            fma.rn.f16x2 $0, a, one, less;
            fma.rn.f16x2 $1, b, one, less;
            }""",
            "=&r,=&r,r",
            [weights],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    return weights.to(dtype)


@triton.jit
def _widen_int4(weights, dtype: tl.constexpr):
    """Convert 4-bit integers q, the low and the high halves of bytes, to ``16 * q`` in ``dtype``, with the method of
    ``_widen_int8``: ``q + 8`` is the mantissa of 128 in bfloat16, of 1024 in float16."""
    if ASM and dtype == tl.int8:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a;
            shl.b32 a, $2, 4;
            and.b32 $0, a, 0xF0F0F0F0;
            and.b32 $1, $2, 0xF0F0F0F0;
            }""",
            "=&r,=&r,r",
            [weights],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    if ASM and dtype == tl.bfloat16:  # computes 16 * (128 + 8 + q) - 16 * (128 + 8)
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, times, less;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            shr.u32 c, a, 4;
            shr.u32 d, b, 4;
            lop3.b32 a, a, 0x000F000F, 0x43084308, 0x6A;
            lop3.b32 b, b, 0x000F000F, 0x43084308, 0x6A;
            lop3.b32 c, c, 0x000F000F, 0x43084308, 0x6A;
            lop3.b32 d, d, 0x000F000F, 0x43084308, 0x6A;
            mov.b32 times, 0x41804180;
            mov.b32 less, 0xC508C508;
            fma.rn.bf16x2 $0, a, times, less;
            fma.rn.bf16x2 $1, b, times, less;
            fma.rn.bf16x2 $2, c, times, less;
            fma.rn.bf16x2 $3, d, times, less;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [weights],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    if ASM and dtype == tl.float16:  # computes 16 * (1024 + 8 + q) - 16 * (1024 + 8)
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, times, less;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            shr.u32 c, a, 4;
            shr.u32 d, b, 4;
            lop3.b32 a, a, 0x000F000F, 0x64086408, 0x6A;
            lop3.b32 b, b, 0x000F000F, 0x64086408, 0x6A;
            lop3.b32 c, c, 0x000F000F, 0x64086408, 0x6A;
            lop3.b32 d, d, 0x000F000F, 0x64086408, 0x6A;
            mov.b32 times, 0x4C004C00;
            mov.b32 less, 0xF408F408;
            fma.rn.f16x2 $0, a, times, less;
            fma.rn.f16x2 $1, b, times, less;
            fma.rn.f16x2 $2, c, times, less;
            fma.rn.f16x2 $3, d, times, less;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [weights],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    return (weights << 4).to(dtype), (weights & -16).to(dtype)


@triton.jit
def _as_float16(codes):
    """Convert 4-bit floating-point codes (e2m1) with inverted sign to float16, times 2 ** -14: their exponent becomes
    the low bits of float16's exponent, their mantissa the high bit of float16's mantissa."""
    bits = ((codes & 7) << 9) | (((codes & 8) ^ 8) << 12)
    return bits.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _widen_float4(weights, dtype: tl.constexpr):
    """Convert the low and the high halves of bytes to ``dtype`` with ``_as_float16``."""
    pair = weights.to(tl.int32)
    return _as_float16(pair).to(dtype), _as_float16(pair >> 4).to(dtype)


@triton.jit
def _program_tile(tokens, outputs, row_groups, BT: tl.constexpr):
    """First output and first token of this program."""
    program = tl.program_id(0)
    program_outputs = row_groups * 8
    row_tiles = tl.cdiv(outputs, program_outputs)
    first = program // (GROUP * row_tiles) * GROUP
    size = tl.minimum(tl.cdiv(tokens, BT) - first, GROUP)
    within = program % (GROUP * row_tiles)
    return within // size * program_outputs, (first + within % size) * BT


@triton.jit
def _token_rows(first_token, tokens, assignments, tile_experts, per_row, BT: tl.constexpr):
    """Returns the rows of ``x`` and of ``out`` of a program, their mask, and the expert for these rows (0 without
    experts, -1 for an unused tile)."""
    token = first_token + tl.arange(0, BT)
    if assignments is None:
        x_row, out_row, mask, expert = token, token, token < tokens, 0
    else:
        out_row = tl.load(assignments + token)
        x_row, mask, expert = out_row // per_row, out_row >= 0, tl.load(tile_experts + first_token // BT)
    return x_row, out_row, mask, expert


@triton.jit
def _weight_rows(first, size, row_groups, BN: tl.constexpr, GATED: tl.constexpr):
    """Returns the rows of the matrix of a program, and their mask. With GATED, ``first`` counts outputs of two rows
    each, and eight rows of the first half alternate with eight rows of the second half, so that one thread has both
    rows of an output."""
    row = tl.arange(0, BN)
    if GATED is not None:
        output = first + row // 16 * 8 + row % 8
        return output + row // 8 % 2 * size, (row < row_groups * 16) & (output < size)
    return first + row, (row < row_groups * 8) & (first + row < size)


@triton.jit
def _store_tile(
    acc,
    bias,
    num_biases,
    out,
    rows,
    row_mask,
    first_output,
    token,
    token_mask,
    outputs,
    row_groups,
    out_stride,
    DTYPE: tl.constexpr,
    GATED: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
):
    """Adds the bias, applies the gate, and stores a tile. Products are rounded to DTYPE before the gate is applied."""
    acc += tl.load(bias + rows, mask=row_mask & (rows < num_biases), other=0.0)[:, None]
    SIZE: tl.constexpr = BN // 2 if GATED is not None else BN
    if GATED is not None:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BN // 16, 2, 8, BT)), (0, 2, 3, 1)))
        gate = gate.to(DTYPE).to(tl.float32)
        up = up.to(DTYPE).to(tl.float32)
        acc = tl.reshape(gated(gate, up, GATED), (SIZE, BT))
    at = tl.arange(0, SIZE)
    column = first_output + at
    inside = ((at < row_groups * 8) & (column < outputs))[None, :] & token_mask[:, None]
    values = tl.trans(acc).to(out.dtype.element_ty)
    tl.store(out + token.to(tl.int64)[:, None] * out_stride + column[None, :], values, mask=inside)


@triton.jit(do_not_specialize=["num_biases", "tokens", "row_groups", "num_rows"])
def product(
    x,
    x_scales,
    weight,
    scales,
    bias,
    num_biases,
    out,
    tokens,
    outputs,
    inputs,
    row_groups,
    x_stride,
    out_stride,
    assignments,
    tile_experts,
    per_row,
    num_rows,
    weight_size,
    scales_size,
    DTYPE: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    """Products of unquantized weights, or 8-bit weights with one scale per output.

    Weights are ``[outputs, inputs]``, or with GATED ``[2 * outputs, inputs]``. If ``scales`` is None, weights are in
    row-major order and in the dtype of the inputs. Otherwise weights have 8 bits and are packed, and the inputs either
    have 8 bits with a scale per token, padded to whole blocks, or are in DTYPE, to which weights are converted. EVEN:
    BK divides the number of inputs of ``x``.

    With ``assignments`` (``experts.group_assignments``, ``[num_rows]``), the matrices of experts are ``weight_size``
    weights and ``scales_size`` scales apart, and a tile of tokens consists of assignments of the expert in
    ``tile_experts``: assignment c is row ``c // per_row`` of ``x`` and row ``c`` of ``out``.
    """
    first_output, first_token = _program_tile(num_rows, outputs, row_groups, BT)
    x_row, out_row, token_mask, expert = _token_rows(first_token, tokens, assignments, tile_experts, per_row, BT)
    if assignments is not None:
        if expert < 0:
            return
        weight += tl.cast(expert, tl.int64) * weight_size
        if scales is not None:
            scales += tl.cast(expert, tl.int64) * scales_size
        bias += tl.cast(expert, tl.int64) * num_biases
    rows, row_mask = _weight_rows(first_output, outputs, row_groups, BN, GATED)
    k = tl.arange(0, BK)
    if scales is None:
        weight_at = weight + rows.to(tl.int64)[:, None] * inputs + k[None, :]
    else:
        panel = (rows // PANEL).to(tl.int64) * (tl.cdiv(inputs, BLOCK) * PANEL * BLOCK)
        weight_at = weight + (panel + rows % PANEL * BLOCK)[:, None]
        weight_at += (k // BLOCK * (PANEL * BLOCK) + k % BLOCK)[None, :]
    x_at = x + x_row.to(tl.int64)[:, None] * x_stride + k[None, :]
    WIDEN: tl.constexpr = x.dtype.element_ty != weight.dtype.element_ty
    INTEGERS: tl.constexpr = x.dtype.element_ty == tl.int8
    acc = tl.zeros((BN, BT), tl.int32 if INTEGERS else tl.float32)
    for start in range(0, inputs, BK):
        weight_mask, input_mask = row_mask[:, None], token_mask[:, None]
        if not EVEN:
            inside = (k < inputs - start)[None, :]
            input_mask = input_mask & inside
            if scales is None:
                weight_mask = weight_mask & inside
            elif BK > BLOCK:  # a packed matrix ends with a full block
                weight_mask = weight_mask & (k < tl.cdiv(inputs, BLOCK) * BLOCK - start)[None, :]
        weights = tl.load(weight_at, mask=weight_mask, other=0.0)
        values = tl.load(x_at, mask=input_mask, other=0.0)
        if WIDEN:
            weights = _widen_int8(weights, x.dtype.element_ty)
        acc = tl.dot(weights, tl.trans(values), acc, input_precision="ieee", out_dtype=acc.dtype)
        weight_at += BK if scales is None else BK * PANEL
        x_at += BK
    acc = acc.to(tl.float32)
    if scales is not None:
        acc *= tl.load(scales + rows, mask=row_mask, other=0.0)[:, None]
    if x_scales is not None:
        acc *= tl.load(x_scales + x_row, mask=token_mask, other=0.0)[None, :]
    _store_tile(
        acc, bias, num_biases, out, rows, row_mask, first_output, out_row, token_mask, outputs, row_groups, out_stride,
        DTYPE, GATED, BN, BT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_biases", "tokens", "row_groups", "num_rows"])
def product_int4(
    x,
    x_scales,
    weight,
    scales,
    bias,
    num_biases,
    out,
    tokens,
    outputs,
    inputs,
    row_groups,
    x_stride,
    out_stride,
    assignments,
    tile_experts,
    per_row,
    num_rows,
    weight_size,
    scales_size,
    offsets,
    x_sums,
    DTYPE: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    SIZE: tl.constexpr,
    UNROLL: tl.constexpr,
    FLOATS: tl.constexpr,
):
    """Products of 4-bit weights, integers or e2m1 (FLOATS), with a scale and optionally an offset per output and SIZE
    inputs.

    A block has two groups of inputs: one in the low halves of its bytes, the other in the high halves. Weights are
    converted to 8-bit integers by moving them to the high half of a byte. This multiplies them by 16, takes one
    instruction for four weights, and extends the sign; scales are divided by 16. UNROLL blocks are loaded at a time.
    EVEN: UNROLL blocks divide the inputs of ``x``. After all groups, the offsets times the sums of the groups' inputs
    (``x_sums``, ``[groups, tokens]``) are added.

    Triton prefetches only the operands of matrix instructions. Therefore this kernel loads scales one iteration ahead;
    with two iterations, Triton would no longer prefetch.
    """
    first_output, first_token = _program_tile(num_rows, outputs, row_groups, BT)
    x_row, out_row, token_mask, expert = _token_rows(first_token, tokens, assignments, tile_experts, per_row, BT)
    if assignments is not None:
        if expert < 0:
            return
        weight += tl.cast(expert, tl.int64) * weight_size
        scales += tl.cast(expert, tl.int64) * scales_size
        if offsets is not None:
            offsets += tl.cast(expert, tl.int64) * scales_size
        bias += tl.cast(expert, tl.int64) * num_biases
    rows, row_mask = _weight_rows(first_output, outputs, row_groups, BN, GATED)
    k = tl.arange(0, SIZE)
    blocks = tl.cdiv(inputs, 2 * SIZE)
    panel = (rows // PANEL).to(tl.int64) * blocks
    weight_at = weight + (panel * (PANEL * SIZE) + rows % PANEL * SIZE)[:, None] + k[None, :]
    scales_at = scales + panel * (2 * PANEL) + rows % PANEL
    x_at = x + x_row.to(tl.int64)[:, None] * x_stride + k[None, :]
    OFFSETS_AT_ONCE: tl.constexpr = 128 // BT  # number of groups for which registers can hold the offsets
    INTEGERS: tl.constexpr = x.dtype.element_ty == tl.int8
    SUM: tl.constexpr = tl.int32 if INTEGERS else tl.float32
    acc = tl.zeros((BN, BT), tl.float32)
    loaded = ()
    for i in tl.static_range(2 * UNROLL):
        loaded += (tl.load(scales_at + i * PANEL, mask=row_mask & (rows * 0 + i < 2 * blocks), other=0.0),)  # type: ignore[assignment]
    for first in range(0, blocks, UNROLL):
        for i in tl.static_range(2 * UNROLL):
            group = 2 * UNROLL + i
            mask = row_mask & (rows * 0 + group < 2 * (blocks - first))
            loaded += (tl.load(scales_at + group * PANEL, mask=mask, other=0.0),)  # type: ignore[assignment]
        for i in tl.static_range(UNROLL):
            weight_mask, low_mask, high_mask = row_mask, token_mask[:, None], token_mask[:, None]
            if not EVEN:
                remaining = inputs - (first + i) * (2 * SIZE)
                low_mask = low_mask & (k < remaining)[None, :]
                high_mask = high_mask & (k < remaining - SIZE)[None, :]
                if i > 0:
                    weight_mask = weight_mask & (tl.zeros((BN,), tl.int32) < remaining)
            weights = tl.load(weight_at + i * (PANEL * SIZE), mask=weight_mask[:, None], other=0)
            low = tl.load(x_at + 2 * i * SIZE, mask=low_mask, other=0.0)
            high = tl.load(x_at + (2 * i + 1) * SIZE, mask=high_mask, other=0.0)
            if FLOATS:
                low_weights, high_weights = _widen_float4(weights, x.dtype.element_ty)
            else:
                low_weights, high_weights = _widen_int4(weights, x.dtype.element_ty)
            zero = tl.zeros((BN, BT), SUM)
            partial = tl.dot(low_weights, tl.trans(low), zero, input_precision="ieee", out_dtype=SUM)
            acc = tl.fma(partial.to(tl.float32), tl.broadcast_to(loaded[2 * i].to(tl.float32)[:, None], (BN, BT)), acc)
            partial = tl.dot(high_weights, tl.trans(high), zero, input_precision="ieee", out_dtype=SUM)
            acc = tl.fma(
                partial.to(tl.float32), tl.broadcast_to(loaded[2 * i + 1].to(tl.float32)[:, None], (BN, BT)), acc
            )
        loaded = loaded[2 * UNROLL :]  # type: ignore[assignment]
        weight_at += UNROLL * PANEL * SIZE
        scales_at += UNROLL * 2 * PANEL
        x_at += UNROLL * 2 * SIZE
    if offsets is not None:
        offsets_at = offsets + (rows // PANEL).to(tl.int64) * blocks * (2 * PANEL) + rows % PANEL
        for group in range(0, 2 * blocks, OFFSETS_AT_ONCE):
            for i in tl.static_range(OFFSETS_AT_ONCE):
                mask = row_mask & (rows * 0 + group + i < 2 * blocks)
                offset = tl.load(offsets_at + (group + i) * PANEL, mask=mask, other=0.0)
                sum_mask = token_mask & (x_row * 0 + group + i < 2 * blocks)
                total = tl.load(x_sums + (group + i) * tokens + x_row, mask=sum_mask, other=0.0)
                acc = tl.fma(tl.broadcast_to(offset[:, None], (BN, BT)), tl.broadcast_to(total[None, :], (BN, BT)), acc)
    if x_scales is not None:
        acc *= tl.load(x_scales + x_row, mask=token_mask, other=0.0)[None, :]
    _store_tile(
        acc, bias, num_biases, out, rows, row_mask, first_output, out_row, token_mask, outputs, row_groups, out_stride,
        DTYPE, GATED, BN, BT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_biases", "tokens", "row_groups", "num_rows"])
def product_fp8_blocks(
    x,
    x_scales,
    weight,
    scales,
    bias,
    num_biases,
    out,
    tokens,
    outputs,
    inputs,
    row_groups,
    x_stride,
    out_stride,
    assignments,
    tile_experts,
    per_row,
    num_rows,
    weight_size,
    scales_size,
    DTYPE: tl.constexpr,
    GATED: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
):
    """Products of e4m3 weights with a scale per 128 x 128 block, and inputs with a scale per token and 128 inputs
    (``x_scales`` is ``[blocks, tokens]``). Matrix instructions sum a block of inputs, and the sums are added to the
    outputs in float32. Scales are loaded one iteration ahead, like in ``product_int4``."""
    first_output, first_token = _program_tile(num_rows, outputs, row_groups, BT)
    x_row, out_row, token_mask, expert = _token_rows(first_token, tokens, assignments, tile_experts, per_row, BT)
    if assignments is not None:
        if expert < 0:
            return
        weight += tl.cast(expert, tl.int64) * weight_size
        scales += tl.cast(expert, tl.int64) * scales_size
        bias += tl.cast(expert, tl.int64) * num_biases
    rows, row_mask = _weight_rows(first_output, outputs, row_groups, BN, GATED)
    k = tl.arange(0, BLOCK)
    blocks = tl.cdiv(inputs, BLOCK)
    weight_at = weight + ((rows // PANEL).to(tl.int64) * (blocks * PANEL * BLOCK) + rows % PANEL * BLOCK)[:, None]
    weight_at += k[None, :]
    scales_at = scales + rows // BLOCK * blocks
    x_at = x + x_row.to(tl.int64)[:, None] * x_stride + k[None, :]
    acc = tl.zeros((BN, BT), tl.float32)
    row_scales = tl.load(scales_at, mask=row_mask, other=0.0)
    token_scales = tl.load(x_scales + x_row, mask=token_mask, other=0.0)
    for block in range(blocks):
        next_block = tl.minimum(block + 1, blocks - 1)
        next_row_scales = tl.load(scales_at + next_block, mask=row_mask, other=0.0)
        next_token_scales = tl.load(x_scales + next_block * tokens + x_row, mask=token_mask, other=0.0)
        weights = tl.load(weight_at, mask=row_mask[:, None], other=0.0)
        values = tl.load(x_at, mask=token_mask[:, None], other=0.0)
        partial = tl.dot(weights, tl.trans(values), out_dtype=tl.float32)
        acc = tl.fma(partial, row_scales[:, None] * token_scales[None, :], acc)
        row_scales, token_scales = next_row_scales, next_token_scales
        weight_at += PANEL * BLOCK
        x_at += BLOCK
    _store_tile(
        acc, bias, num_biases, out, rows, row_mask, first_output, out_row, token_mask, outputs, row_groups, out_stride,
        DTYPE, GATED, BN, BT,
    )  # fmt: skip


@triton.jit
def _rotate_blocks(x, ROTATION: tl.constexpr):
    """Rotate blocks of ROTATION (at most 64) consecutive elements of ``x`` in float32, with the same bits as
    ``ops.hadamard``."""
    for stage in tl.static_range(6):
        if 2**stage < ROTATION:
            pairs = tl.reshape(x, (x.numel // (2 * 2**stage), 2, 2**stage))
            even, odd = tl.split(tl.permute(pairs, (0, 2, 1)))
            x = tl.reshape(tl.permute(tl.join(even + odd, even - odd), (0, 2, 1)), x.shape)
    return x


@triton.jit
def rotate_rows(x, out, inputs, x_stride, ROTATION: tl.constexpr, COLUMNS: tl.constexpr):
    """Rotates rows of activations in blocks of ROTATION inputs."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    values_in = tl.load(x + row * x_stride + at, mask=at < inputs, other=0.0).to(tl.float32)
    tl.store(out + row * inputs + at, _rotate_blocks(values_in, ROTATION).to(out.dtype.element_ty), mask=at < inputs)


@triton.jit
def quantize_rows(
    x,
    values,
    scales,
    inputs,
    padded,
    x_stride,
    MAX: tl.constexpr,
    MIN: tl.constexpr,
    GROUPED: tl.constexpr,
    ROTATION: tl.constexpr,
    SIZE: tl.constexpr,
    ITEMS: tl.constexpr,
):
    """Quantizes a row of activations to 8-bit integers or e4m3, padded with zeros to ``padded`` elements: the largest
    magnitude of the row, or with GROUPED of ITEMS elements, becomes MAX. Blocks of ROTATION inputs are rotated
    before."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SIZE)[:, None] * ITEMS + tl.arange(0, ITEMS)[None, :]
    values_in = tl.load(x + row * x_stride + at, mask=at < inputs, other=0.0).to(tl.float32)
    values_in = _rotate_blocks(values_in, ROTATION)
    # Rows with NaN get an infinite scale, so that their products are not finite.
    magnitude = tl.where(values_in == values_in, tl.abs(values_in), float("inf"))
    maximum = tl.max(magnitude, 1)
    if not GROUPED:
        maximum = tl.max(maximum, 0) + tl.zeros((SIZE,), tl.float32)
    largest = tl.full((SIZE,), MAX, tl.float32)
    usable = (maximum > MIN) & (maximum < float("inf"))
    inverse = tl.where(usable, tl.div_rn(largest, tl.where(usable, maximum, 1.0)), 0.0)
    scaled = tl.where(usable[:, None], values_in * inverse[:, None], 0.0)
    if values.dtype.element_ty == tl.int8:
        scaled = (scaled + 12582912.0) - 12582912.0  # 1.5 * 2**23: rounds to nearest, half to even
    else:
        scaled = tl.minimum(tl.maximum(scaled, -MAX), MAX)
    tl.store(values + row * padded + at, scaled.to(values.dtype.element_ty), mask=at < padded)
    scale = tl.div_rn(maximum, largest)
    if GROUPED:
        group = tl.arange(0, SIZE)
        tl.store(scales + group * tl.num_programs(0) + row, scale, mask=group * ITEMS < padded)
    else:
        tl.store(scales + row + tl.zeros((SIZE,), tl.int32), scale, mask=tl.arange(0, SIZE) == 0)


@triton.jit
def sum_groups(x, sums, inputs, groups, x_stride, SIZE: tl.constexpr, GROUPS: tl.constexpr):
    """Writes the sums of groups of SIZE inputs to ``sums``, ``[groups, tokens]``. A program sums GROUPS groups of a
    row."""
    row, tokens = tl.program_id(0), tl.num_programs(0)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    values_in = tl.load(x + row.to(tl.int64) * x_stride + at, mask=at < inputs, other=0.0).to(tl.float32)
    tl.store(sums + group * tokens + row, tl.sum(values_in, 1), mask=group < groups)


@triton.jit
def gather_rows(
    ids,
    weight,
    scales,
    offsets,
    order,
    out,
    first,
    rows,
    size,
    out_stride,
    GROUP_SIZE: tl.constexpr,
    ROWS_PER_SCALE: tl.constexpr,
    BITS: tl.constexpr,
    FLOATS: tl.constexpr,
    ROTATION: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Copies row ``ids[program] - first`` of a matrix to ``out``, dequantized and unrotated. Nothing is written for ids
    of rows outside the matrix. BITS is 0 for a row-major unquantized matrix."""
    token = tl.program_id(0)
    row = tl.load(ids + token) - first
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row_vector = row + tl.zeros((COLUMNS,), tl.int64)
    inside = (row_vector >= 0) & (row_vector < rows) & (column < size)
    if BITS == 0:
        values = tl.load(weight + row * size + column, mask=inside)
    elif BITS == 8:
        blocks = tl.cdiv(size, BLOCK)
        at = (row // PANEL * blocks + column // BLOCK) * (PANEL * BLOCK) + row % PANEL * BLOCK + column % BLOCK
        values = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        if GROUP_SIZE:
            values *= tl.load(scales + row // ROWS_PER_SCALE * blocks + column // GROUP_SIZE, mask=inside, other=0.0)
        else:
            values *= tl.load(scales + row_vector, mask=inside, other=0.0)
    else:
        block = row // PANEL * tl.cdiv(size, 2 * GROUP_SIZE) + column // (2 * GROUP_SIZE)
        at = block * (PANEL * GROUP_SIZE) + row % PANEL * GROUP_SIZE + column % GROUP_SIZE
        group = block * 2 + column // GROUP_SIZE % 2
        pair = tl.load(weight + at, mask=inside, other=0)
        if FLOATS:
            values = _as_float16(pair.to(tl.int32) >> (column // GROUP_SIZE % 2 * 4)).to(tl.float32)
        else:
            values = tl.where(column // GROUP_SIZE % 2 == 0, pair << 4, pair & -16).to(tl.float32)
        values *= tl.load(scales + group * PANEL + row % PANEL, mask=inside, other=0.0)
        if offsets is not None:
            values += tl.load(offsets + group * PANEL + row % PANEL, mask=inside, other=0.0)
    if ROTATION > 1:
        values = _rotate_blocks(values, ROTATION)
    if order is not None:
        column = tl.load(order + column, mask=inside, other=0)
    tl.store(out + token.to(tl.int64) * out_stride + column, values.to(out.dtype.element_ty), mask=inside)
