"""Kernels of products with matrices, and of embeddings.

Weights are the rows of the matrix instruction (``acc[BN, BT] += weights[BN, BK] @ inputs[BT, BK].T``), tokens its
columns: so one token and thousands take the same instruction (on Hopper ``wgmma`` of 64 rows), which sums over the
inputs in ascending order into one accumulator, and a token's bits depend on none of BN, BT, BK. A program has the first
``8 * eights`` of the BN rows; the others are zeros that are not read, so that small matrices occupy all
multiprocessors, too. With GATED, the activation of a gate, it has as many outputs, of two rows each. Kernels are
compiled once for any number of rows, and with a bias or without.

Packed weights lie in panels of 64 outputs, and in those in blocks of 64 outputs: what a program reads next follows what
it read last.
"""

import triton
import triton.language as tl

from .elementwise import gated

PANEL = tl.constexpr(64)
"""Outputs of a panel."""
BLOCK = tl.constexpr(128)
"""Inputs of a block of 8-bit weights: 128 bytes a row."""
GROUP = tl.constexpr(8)
"""Tiles of tokens that follow each other over the same weights, so that programs that run together read few of either
from memory, and the rest from L2."""
ASM = tl.constexpr(not triton.knobs.runtime.interpret)
"""Whether assembler widens weights, four at a time: a conversion of each takes three times as many instructions. The
interpreter has no assembler."""


@triton.jit
def _widen_int8(weights, dtype: tl.constexpr):
    """8-bit integers as ``dtype``. Bytes become the low bits of the mantissas of numbers with a known exponent, of
    which what that exponent adds is taken away, exactly."""
    if ASM and dtype == tl.bfloat16:  # 7 bits: 128 + (q & 127), less 128 where q has no sign, or 256
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
    if ASM and dtype == tl.float16:  # 1024 + 128 + q, less 1152
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
    """The low and the high halves of bytes, 4-bit integers, as ``dtype``: sixteenfold. As above, with 8 added to each:
    to 128 in bfloat16, to 1024 in float16."""
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
    if ASM and dtype == tl.bfloat16:  # times 16, less 16 * (128 + 8)
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
    if ASM and dtype == tl.float16:  # times 16, less 16 * (1024 + 8)
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
    """4-bit floating-point numbers (e2m1), whose sign is inverted, as float16 numbers that are 2 ** -14 times as large:
    exponent and mantissa are the low bits of float16's exponent and the high one of its mantissa."""
    bits = ((codes & 7) << 9) | (((codes & 8) ^ 8) << 12)
    return bits.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _widen_float4(weights, dtype: tl.constexpr):
    """The low and the high halves of bytes, as of ``_as_float16``, as ``dtype``."""
    pair = weights.to(tl.int32)
    return _as_float16(pair).to(dtype), _as_float16(pair >> 4).to(dtype)


@triton.jit
def _tile(tokens, outputs, eights, BT: tl.constexpr):
    """First output and first token of this program."""
    program = tl.program_id(0)
    share = eights * 8
    row_tiles = tl.cdiv(outputs, share)
    first = program // (GROUP * row_tiles) * GROUP
    size = tl.minimum(tl.cdiv(tokens, BT) - first, GROUP)
    within = program % (GROUP * row_tiles)
    return within // size * share, (first + within % size) * BT


@triton.jit
def _token_rows(first_token, tokens, choices, owners, choices_per_row, BT: tl.constexpr):
    """Rows of ``x`` and of ``out`` that are a program's tokens, which of them there are, and the expert whose matrix
    they are multiplied with: -1 where there is nothing to do."""
    token = first_token + tl.arange(0, BT)
    if choices is None:
        x_row, out_row, there, expert = token, token, token < tokens, 0
    else:
        out_row = tl.load(choices + token)
        x_row, there, expert = out_row // choices_per_row, out_row >= 0, tl.load(owners + first_token // BT)
    return x_row, out_row, there, expert


@triton.jit
def _weight_rows(first, size, eights, BN: tl.constexpr, GATED: tl.constexpr):
    """Rows of the matrix that are a program's, and which of them it has. With GATED, ``first`` counts outputs, each is
    of two rows, and every eight rows of the first half are followed by the eight of the second: one thread has both."""
    row = tl.arange(0, BN)
    if GATED is not None:
        output = first + row // 16 * 8 + row % 8
        return output + row // 8 % 2 * size, (row < eights * 16) & (output < size)
    return first + row, (row < eights * 8) & (first + row < size)


@triton.jit
def _finish(
    acc,
    bias,
    biases,
    out,
    rows,
    own,
    first_output,
    token,
    own_tokens,
    outputs,
    eights,
    out_stride,
    DTYPE: tl.constexpr,
    GATED: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
):
    """Bias, gate, and the store of a tile. A product is rounded to DTYPE before it is gated."""
    acc += tl.load(bias + rows, mask=own & (rows < biases), other=0.0)[:, None]
    SIZE: tl.constexpr = BN // 2 if GATED is not None else BN
    if GATED is not None:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BN // 16, 2, 8, BT)), (0, 2, 3, 1)))
        gate = gate.to(DTYPE).to(tl.float32)
        up = up.to(DTYPE).to(tl.float32)
        acc = tl.reshape(gated(gate, up, GATED), (SIZE, BT))
    at = tl.arange(0, SIZE)
    column = first_output + at
    inside = ((at < eights * 8) & (column < outputs))[None, :] & own_tokens[:, None]
    values = tl.trans(acc).to(out.dtype.element_ty)
    tl.store(out + token.to(tl.int64)[:, None] * out_stride + column[None, :], values, mask=inside)


@triton.jit(do_not_specialize=["biases", "tokens", "eights", "places"])
def product(
    x,
    x_scales,
    weight,
    scales,
    bias,
    biases,
    out,
    tokens,
    outputs,
    inputs,
    eights,
    x_stride,
    out_stride,
    choices,
    owners,
    choices_per_row,
    places,
    weight_size,
    scales_size,
    DTYPE: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    """Products whose weights have at most one scale an output.

    Weights are ``[outputs, inputs]``, or with GATED ``[2 * outputs, inputs]``: row-major and of the inputs' dtype where
    ``scales`` is None; else 8 bits packed, and the inputs either 8 bits with a scale a token, padded to whole blocks,
    or of DTYPE, to which weights are widened. EVEN: BK divides the inputs that ``x`` has.

    With ``choices`` (``experts.group_choices``, ``[places]``) the matrices of experts lie ``weight_size`` weights and
    ``scales_size`` scales apart, and a tile of tokens is of choices of the expert in ``owners``: the c-th choice is row
    ``c // choices_per_row`` of ``x`` and row ``c`` of ``out``.
    """
    first_output, first_token = _tile(places, outputs, eights, BT)
    x_row, out_row, own_tokens, expert = _token_rows(first_token, tokens, choices, owners, choices_per_row, BT)
    if choices is not None:
        if expert < 0:
            return
        weight += tl.cast(expert, tl.int64) * weight_size
        if scales is not None:
            scales += tl.cast(expert, tl.int64) * scales_size
        bias += tl.cast(expert, tl.int64) * biases
    rows, own = _weight_rows(first_output, outputs, eights, BN, GATED)
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
        own_weights, own_inputs = own[:, None], own_tokens[:, None]
        if not EVEN:
            inside = (k < inputs - start)[None, :]
            own_inputs = own_inputs & inside
            if scales is None:
                own_weights = own_weights & inside
            elif BK > BLOCK:  # a packed matrix ends with a block
                own_weights = own_weights & (k < tl.cdiv(inputs, BLOCK) * BLOCK - start)[None, :]
        weights = tl.load(weight_at, mask=own_weights, other=0.0)
        values = tl.load(x_at, mask=own_inputs, other=0.0)
        if WIDEN:
            weights = _widen_int8(weights, x.dtype.element_ty)
        acc = tl.dot(weights, tl.trans(values), acc, input_precision="ieee", out_dtype=acc.dtype)
        weight_at += BK if scales is None else BK * PANEL
        x_at += BK
    acc = acc.to(tl.float32)
    if scales is not None:
        acc *= tl.load(scales + rows, mask=own, other=0.0)[:, None]
    if x_scales is not None:
        acc *= tl.load(x_scales + x_row, mask=own_tokens, other=0.0)[None, :]
    _finish(
        acc, bias, biases, out, rows, own, first_output, out_row, own_tokens, outputs, eights, out_stride,
        DTYPE, GATED, BN, BT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["biases", "tokens", "eights", "places"])
def product_int4(
    x,
    x_scales,
    weight,
    scales,
    bias,
    biases,
    out,
    tokens,
    outputs,
    inputs,
    eights,
    x_stride,
    out_stride,
    choices,
    owners,
    choices_per_row,
    places,
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
    """Products whose weights are 4 bits with a scale an output and SIZE inputs, and perhaps an offset: integers, or
    with FLOATS floating-point numbers.

    A block has two groups of inputs: one in the low halves of its bytes, the other in the high ones. In an 8-bit
    integer a weight stands in the high half, sixteenfold, which takes one instruction for four weights and has a sign;
    scales are a sixteenth. UNROLL blocks are read at a time. EVEN: they divide the inputs that ``x`` has. After all
    groups, offsets join, each times the sum of its group's inputs (``x_sums``, ``[groups, tokens]``).

    Triton reads ahead what matrix instructions take. Scales, which they do not, are read here in the iteration before;
    from two before on, Triton would read nothing ahead.
    """
    first_output, first_token = _tile(places, outputs, eights, BT)
    x_row, out_row, own_tokens, expert = _token_rows(first_token, tokens, choices, owners, choices_per_row, BT)
    if choices is not None:
        if expert < 0:
            return
        weight += tl.cast(expert, tl.int64) * weight_size
        scales += tl.cast(expert, tl.int64) * scales_size
        if offsets is not None:
            offsets += tl.cast(expert, tl.int64) * scales_size
        bias += tl.cast(expert, tl.int64) * biases
    rows, own = _weight_rows(first_output, outputs, eights, BN, GATED)
    k = tl.arange(0, SIZE)
    blocks = tl.cdiv(inputs, 2 * SIZE)
    panel = (rows // PANEL).to(tl.int64) * blocks
    weight_at = weight + (panel * (PANEL * SIZE) + rows % PANEL * SIZE)[:, None] + k[None, :]
    scales_at = scales + panel * (2 * PANEL) + rows % PANEL
    x_at = x + x_row.to(tl.int64)[:, None] * x_stride + k[None, :]
    TOGETHER: tl.constexpr = 128 // BT  # groups whose offsets are read before they are used, as registers allow
    INTEGERS: tl.constexpr = x.dtype.element_ty == tl.int8
    SUM: tl.constexpr = tl.int32 if INTEGERS else tl.float32
    acc = tl.zeros((BN, BT), tl.float32)
    ahead = ()
    for i in tl.static_range(2 * UNROLL):
        ahead += (tl.load(scales_at + i * PANEL, mask=own & (rows * 0 + i < 2 * blocks), other=0.0),)  # type: ignore[assignment]
    for first in range(0, blocks, UNROLL):
        for i in tl.static_range(2 * UNROLL):
            group = 2 * UNROLL + i
            there = own & (rows * 0 + group < 2 * (blocks - first))
            ahead += (tl.load(scales_at + group * PANEL, mask=there, other=0.0),)  # type: ignore[assignment]
        for i in tl.static_range(UNROLL):
            own_weights, own_low, own_high = own, own_tokens[:, None], own_tokens[:, None]
            if not EVEN:
                left = inputs - (first + i) * (2 * SIZE)
                own_low = own_low & (k < left)[None, :]
                own_high = own_high & (k < left - SIZE)[None, :]
                if i > 0:
                    own_weights = own_weights & (tl.zeros((BN,), tl.int32) < left)
            weights = tl.load(weight_at + i * (PANEL * SIZE), mask=own_weights[:, None], other=0)
            low = tl.load(x_at + 2 * i * SIZE, mask=own_low, other=0.0)
            high = tl.load(x_at + (2 * i + 1) * SIZE, mask=own_high, other=0.0)
            if FLOATS:
                low_weights, high_weights = _widen_float4(weights, x.dtype.element_ty)
            else:
                low_weights, high_weights = _widen_int4(weights, x.dtype.element_ty)
            zero = tl.zeros((BN, BT), SUM)
            part = tl.dot(low_weights, tl.trans(low), zero, input_precision="ieee", out_dtype=SUM)
            acc = tl.fma(part.to(tl.float32), tl.broadcast_to(ahead[2 * i].to(tl.float32)[:, None], (BN, BT)), acc)
            part = tl.dot(high_weights, tl.trans(high), zero, input_precision="ieee", out_dtype=SUM)
            acc = tl.fma(part.to(tl.float32), tl.broadcast_to(ahead[2 * i + 1].to(tl.float32)[:, None], (BN, BT)), acc)
        ahead = ahead[2 * UNROLL :]  # type: ignore[assignment]
        weight_at += UNROLL * PANEL * SIZE
        scales_at += UNROLL * 2 * PANEL
        x_at += UNROLL * 2 * SIZE
    if offsets is not None:
        offsets_at = offsets + (rows // PANEL).to(tl.int64) * blocks * (2 * PANEL) + rows % PANEL
        for group in range(0, 2 * blocks, TOGETHER):
            for i in tl.static_range(TOGETHER):
                there = own & (rows * 0 + group + i < 2 * blocks)
                offset = tl.load(offsets_at + (group + i) * PANEL, mask=there, other=0.0)
                summed = own_tokens & (x_row * 0 + group + i < 2 * blocks)
                total = tl.load(x_sums + (group + i) * tokens + x_row, mask=summed, other=0.0)
                acc = tl.fma(tl.broadcast_to(offset[:, None], (BN, BT)), tl.broadcast_to(total[None, :], (BN, BT)), acc)
    if x_scales is not None:
        acc *= tl.load(x_scales + x_row, mask=own_tokens, other=0.0)[None, :]
    _finish(
        acc, bias, biases, out, rows, own, first_output, out_row, own_tokens, outputs, eights, out_stride,
        DTYPE, GATED, BN, BT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["biases", "tokens", "eights", "places"])
def product_fp8_blocks(
    x,
    x_scales,
    weight,
    scales,
    bias,
    biases,
    out,
    tokens,
    outputs,
    inputs,
    eights,
    x_stride,
    out_stride,
    choices,
    owners,
    choices_per_row,
    places,
    weight_size,
    scales_size,
    DTYPE: tl.constexpr,
    GATED: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
):
    """Products of 8-bit floating-point numbers with a scale each 128 x 128 weights, and each 128 inputs and token
    (``x_scales`` is ``[blocks, tokens]``). A block of inputs is summed by the matrix instructions alone, and joins the
    outputs in float32. Scales are read as in ``product_int4``."""
    first_output, first_token = _tile(places, outputs, eights, BT)
    x_row, out_row, own_tokens, expert = _token_rows(first_token, tokens, choices, owners, choices_per_row, BT)
    if choices is not None:
        if expert < 0:
            return
        weight += tl.cast(expert, tl.int64) * weight_size
        scales += tl.cast(expert, tl.int64) * scales_size
        bias += tl.cast(expert, tl.int64) * biases
    rows, own = _weight_rows(first_output, outputs, eights, BN, GATED)
    k = tl.arange(0, BLOCK)
    blocks = tl.cdiv(inputs, BLOCK)
    weight_at = weight + ((rows // PANEL).to(tl.int64) * (blocks * PANEL * BLOCK) + rows % PANEL * BLOCK)[:, None]
    weight_at += k[None, :]
    scales_at = scales + rows // BLOCK * blocks
    x_at = x + x_row.to(tl.int64)[:, None] * x_stride + k[None, :]
    acc = tl.zeros((BN, BT), tl.float32)
    row_scales = tl.load(scales_at, mask=own, other=0.0)
    token_scales = tl.load(x_scales + x_row, mask=own_tokens, other=0.0)
    for block in range(blocks):
        there = tl.minimum(block + 1, blocks - 1)
        next_row_scales = tl.load(scales_at + there, mask=own, other=0.0)
        next_token_scales = tl.load(x_scales + there * tokens + x_row, mask=own_tokens, other=0.0)
        weights = tl.load(weight_at, mask=own[:, None], other=0.0)
        values = tl.load(x_at, mask=own_tokens[:, None], other=0.0)
        part = tl.dot(weights, tl.trans(values), out_dtype=tl.float32)
        acc = tl.fma(part, row_scales[:, None] * token_scales[None, :], acc)
        row_scales, token_scales = next_row_scales, next_token_scales
        weight_at += PANEL * BLOCK
        x_at += BLOCK
    _finish(
        acc, bias, biases, out, rows, own, first_output, out_row, own_tokens, outputs, eights, out_stride,
        DTYPE, GATED, BN, BT,
    )  # fmt: skip


@triton.jit
def _rotated(x, ROTATION: tl.constexpr):
    """Blocks of ROTATION numbers, 64 at most, of what lies row by row in ``x``, in float32: as ``ops.hadamard``, to the
    bit."""
    for stage in tl.static_range(6):
        if 2**stage < ROTATION:
            pairs = tl.reshape(x, (x.numel // (2 * 2**stage), 2, 2**stage))
            even, odd = tl.split(tl.permute(pairs, (0, 2, 1)))
            x = tl.reshape(tl.permute(tl.join(even + odd, even - odd), (0, 2, 1)), x.shape)
    return x


@triton.jit
def rotate_rows(x, out, inputs, x_stride, ROTATION: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows of activations, rotated in blocks of ROTATION inputs."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    given = tl.load(x + row * x_stride + at, mask=at < inputs, other=0.0).to(tl.float32)
    tl.store(out + row * inputs + at, _rotated(given, ROTATION).to(out.dtype.element_ty), mask=at < inputs)


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
    """A row of activations in 8 bits, zeros up to ``padded``: its largest magnitude, or that of each ITEMS with
    GROUPED, is MAX. ``values`` are integers or floating-point numbers. Blocks of ROTATION inputs are rotated first."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SIZE)[:, None] * ITEMS + tl.arange(0, ITEMS)[None, :]
    given = tl.load(x + row * x_stride + at, mask=at < inputs, other=0.0).to(tl.float32)
    given = _rotated(given, ROTATION)
    # Rows with what is no number get an infinite scale, and so no finite product.
    magnitude = tl.where(given == given, tl.abs(given), float("inf"))
    maximum = tl.max(magnitude, 1)
    if not GROUPED:
        maximum = tl.max(maximum, 0) + tl.zeros((SIZE,), tl.float32)
    largest = tl.full((SIZE,), MAX, tl.float32)
    usable = (maximum > MIN) & (maximum < float("inf"))
    inverse = tl.where(usable, tl.div_rn(largest, tl.where(usable, maximum, 1.0)), 0.0)
    scaled = tl.where(usable[:, None], given * inverse[:, None], 0.0)
    if values.dtype.element_ty == tl.int8:
        scaled = (scaled + 12582912.0) - 12582912.0  # 1.5 * 2**23: rounds to nearest, ties to even
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
    """Sums of SIZE inputs of a row each, to ``[groups, tokens]``; those of GROUPS by one program."""
    row, tokens = tl.program_id(0), tl.num_programs(0)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    given = tl.load(x + row.to(tl.int64) * x_stride + at, mask=at < inputs, other=0.0).to(tl.float32)
    tl.store(sums + group * tokens + row, tl.sum(given, 1), mask=group < groups)


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
    """Row ``ids[program]`` of a matrix; nothing is written for ids of none of its rows. BITS is 0 where it is
    row-major. What is rotated in blocks of ROTATION is rotated back."""
    token = tl.program_id(0)
    row = tl.load(ids + token) - first
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    rows_of = row + tl.zeros((COLUMNS,), tl.int64)
    inside = (rows_of >= 0) & (rows_of < rows) & (column < size)
    if BITS == 0:
        values = tl.load(weight + row * size + column, mask=inside)
    elif BITS == 8:
        blocks = tl.cdiv(size, BLOCK)
        at = (row // PANEL * blocks + column // BLOCK) * (PANEL * BLOCK) + row % PANEL * BLOCK + column % BLOCK
        values = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        if GROUP_SIZE:
            values *= tl.load(scales + row // ROWS_PER_SCALE * blocks + column // GROUP_SIZE, mask=inside, other=0.0)
        else:
            values *= tl.load(scales + rows_of, mask=inside, other=0.0)
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
        values = _rotated(values, ROTATION)
    if order is not None:
        column = tl.load(order + column, mask=inside, other=0)
    tl.store(out + token.to(tl.int64) * out_stride + column, values.to(out.dtype.element_ty), mask=inside)
