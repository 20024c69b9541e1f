"""Kernels with recurrent state: short convolution, linear attention, and inputs of drafts.

A recurrence applies one token after another in one loop, with the state in registers, so that the arithmetic of a token
is the same code in a prompt, a decode step and a draft. The first inputs are those of accepted drafts; the state is
written after the last token that is no draft. Sequences without tokens or with slot -1 are padding: nothing is computed
and written for them.
"""

import triton
import triton.language as tl

from .elementwise import sum_pairs


@triton.jit
def sum_rows(x):
    """Sum of the rows of a tile, a power of two: row ``i`` and row ``i + rows / 2`` first, and so on.

    As with ``sum_pairs``, the order is fixed. The first sums are within a thread if its rows are far from each other,
    as in a tile of a row-major state.
    """
    for _ in tl.static_range(16):
        if x.shape[0] > 1:
            x = tl.sum(x.reshape([2, x.shape[0] // 2, x.shape[1]]), 0)
    return x.reshape([x.shape[1]])


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """log(1 + e^x), with a relative error of 1e-7."""
    y = tl.exp(-tl.abs(x))
    s = y / (2.0 + y)  # log(1 + y) = 2 artanh(s), s <= 1/3
    square = s * s
    p = square * (1.0 / 15.0) + 1.0 / 13.0
    p = p * square + 1.0 / 11.0
    p = p * square + 1.0 / 9.0
    p = p * square + 1.0 / 7.0
    p = p * square + 1.0 / 5.0
    p = p * square + 1.0 / 3.0
    p = p * square + 1.0
    return tl.maximum(x, 0.0) + 2.0 * s * p


@triton.jit
def sequence_inputs(starts, slots, accepted, drafts, sequence):
    """Slot of a sequence, its first token, number of accepted drafts to apply, number of all inputs to apply (0 for
    padding), and number of inputs that the stored state includes."""
    slot = tl.load(slots + sequence).to(tl.int64)
    start = tl.load(starts + sequence).to(tl.int64)
    tokens = tl.load(starts + sequence + 1) - start.to(tl.int32)
    before = tl.load(accepted + sequence)
    total = tl.where((slot >= 0) & (tokens > 0), before + tokens, 0)
    return slot, start, before, total, total - tl.load(drafts + sequence)


@triton.jit
def input_row(x, kept, i, before, start, slot, stride, width, max_drafts):
    """Address of input ``i`` of a sequence: first those of accepted drafts, then those of the step's tokens."""
    return tl.where(i < before, kept + (slot * max_drafts + i) * width, x + (start + i - before) * stride)


@triton.jit
def segment_end(segment, saves, first_save, before, saved, total, slot, save_after, save_slots):
    """End of a segment of a sequence's inputs, and the slot for the state after it. A segment ends at each snapshot
    (there are ``saves`` of them), then at the last token that is no draft, then at the last draft."""
    is_snapshot = segment < saves
    after = tl.load(save_after + first_save + segment, mask=is_snapshot, other=0)
    snapshot = tl.load(save_slots + first_save + segment, mask=is_snapshot, other=0).to(tl.int64)
    end = tl.where(is_snapshot, before + after, tl.where(segment == saves, saved, total))
    return end, tl.where(is_snapshot, snapshot, slot)


@triton.jit(do_not_specialize=["max_drafts"])
def keep_inputs(starts, slots, drafts, x, kept, stride, width, max_drafts, BLOCK: tl.constexpr):
    """Copy a block of columns of the inputs of a sequence's drafts. Grid: block, draft, sequence."""
    sequence = tl.program_id(2)
    draft = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + sequence).to(tl.int64)
    count = tl.load(drafts + sequence)
    inside = columns < tl.where((draft < count) & (slot >= 0), width, 0)
    row = (tl.load(starts + sequence + 1) - count + draft).to(tl.int64)
    values = tl.load(x + row * stride + columns, mask=inside)
    tl.store(kept + (slot * max_drafts + draft) * width + columns, values, mask=inside)


@triton.jit
def convolution_inputs(
    x, kept, state, index, before, start, slot, columns, inside, stride, channels, max_drafts, HISTORY: tl.constexpr
):
    """Inputs of a convolution, ``[rows, columns]``. Input ``index`` of a sequence is in its state if below HISTORY;
    then come those of ``before`` accepted drafts, and those of the step's tokens."""
    applied = index - HISTORY
    token = start + applied - before
    old = tl.load(
        state + (slot * HISTORY + index)[:, None] * channels + columns, mask=inside & (applied < 0)[:, None], other=0.0
    )
    drafted = tl.load(
        kept + (slot * max_drafts + applied)[:, None] * channels + columns,
        mask=inside & ((applied >= 0) & (applied < before))[:, None],
        other=0.0,
    )
    new = tl.load(x + token[:, None] * stride + columns, mask=inside & (applied >= before)[:, None], other=0.0)
    return tl.where((applied < 0)[:, None], old, tl.where((applied < before)[:, None], drafted, new))


@triton.jit(do_not_specialize=["sequences", "max_drafts"])
def convolution(
    starts,
    slots,
    accepted,
    x,
    kept,
    state,
    weight,
    bias,
    out,
    sequences,
    stride,
    out_stride,
    channels,
    max_drafts,
    KERNEL: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """Convolution of a block of tokens and channels. Grid: channels, tokens. Outputs of padding are not written."""
    tokens = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None]
    sequence = tl.full((ROWS,), -1, tl.int32)
    for first in range(0, sequences, SEQUENCES):
        at = first + tl.arange(0, SEQUENCES)
        firsts = tl.load(starts + at, mask=at < sequences, other=1 << 30)
        sequence += tl.sum((firsts[None] <= tokens[:, None]).to(tl.int32), 1)
    slot = tl.load(slots + sequence).to(tl.int64)
    is_token = (tokens < tl.load(starts + sequences)) & (slot >= 0)
    start = tl.load(starts + sequence).to(tl.int64)
    before = tl.load(accepted + sequence)
    inside = is_token[:, None] & (columns < channels)
    first = tokens - start + before
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    if bias is not None:
        sums += tl.load(bias + columns, mask=columns < channels, other=0.0)
    for i in tl.static_range(KERNEL):
        values = convolution_inputs(
            x, kept, state, first + i, before, start, slot, columns, inside, stride, channels, max_drafts, KERNEL - 1
        )
        sums += values.to(tl.float32) * tl.load(weight + i * channels + columns, mask=columns < channels, other=0.0)
    if SILU:
        sums = sums * sigmoid(sums)
    tl.store(out + tokens.to(tl.int64)[:, None] * out_stride + columns, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["max_drafts"])
def convolution_state(
    starts,
    slots,
    accepted,
    drafts,
    save_starts,
    save_after,
    save_slots,
    x,
    kept,
    state,
    stride,
    channels,
    max_drafts,
    HISTORY: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The last HISTORY inputs of a block of channels, for the snapshots of a sequence and for its slot. Grid: channels,
    sequence."""
    sequence = tl.program_id(1)
    slot, start, before, total, saved = sequence_inputs(starts, slots, accepted, drafts, sequence)
    rows = tl.arange(0, ROWS)
    columns = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None]
    inside = (rows < HISTORY)[:, None] & (columns < tl.where(total > 0, channels, 0))
    target = state + rows[:, None] * channels + columns
    for save in range(tl.load(save_starts + sequence), tl.load(save_starts + sequence + 1)):
        last = before + tl.load(save_after + save)
        values = convolution_inputs(
            x, kept, state, last + rows, before, start, slot, columns, inside, stride, channels, max_drafts, HISTORY
        )
        snapshot = tl.load(save_slots + save).to(tl.int64)
        tl.store(target + snapshot * HISTORY * channels, values, mask=inside)
    values = convolution_inputs(
        x, kept, state, saved + rows, before, start, slot, columns, inside, stride, channels, max_drafts, HISTORY
    )
    tl.debug_barrier()  # waits until all threads have read the old state
    tl.store(target + slot * HISTORY * channels, values, mask=inside)


@triton.jit(do_not_specialize=["max_drafts"])
def linear_attention(
    starts,
    slots,
    accepted,
    drafts,
    save_starts,
    save_after,
    save_slots,
    x,
    gates,
    out,
    state,
    kept,
    kept_gates,
    decays,
    log_decays,
    gate_bias,
    skips,
    x_stride,
    gates_stride,
    out_stride,
    width,
    gates_width,
    max_drafts,
    groups,
    q_offset,
    k_offset,
    v_offset,
    step_offset,
    scale,
    l2_eps,
    beta_scale,
    min_step,
    max_step,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DELTA: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Linear attention of a head, for a slice of the value dimension. Grid: slice, head, sequence.

    The decay of a head is constant (``decays``), or depends on the token, by head or for each row of the state
    (BY_CHANNEL). DELTA: the gated delta rule, with normalized queries and keys; else values are scaled by the step.
    """
    sequence = tl.program_id(2)
    head = tl.program_id(1)
    slot, start, before, total, saved = sequence_inputs(starts, slots, accepted, drafts, sequence)
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_key, is_value = rows < KEY_DIM, columns < tl.where(total > 0, VALUE_DIM, 0)
    inside = is_key[:, None] & is_value[None]
    slot_size = tl.num_programs(1) * (KEY_DIM * VALUE_DIM)
    target = state + head * (KEY_DIM * VALUE_DIM) + rows[:, None] * VALUE_DIM + columns[None]
    s = tl.load(target + slot * slot_size, mask=inside, other=0.0)
    key = head // groups * KEY_DIM + rows
    value = head * VALUE_DIM + columns
    if decays is not None:
        decay = tl.load(decays + head)
    else:
        rate = -tl.exp(tl.load(log_decays + head))
        if BY_CHANNEL:
            bias = tl.load(gate_bias + head * KEY_DIM + rows, mask=is_key, other=0.0)
        else:
            bias = tl.load(gate_bias + head)
    first_save = tl.load(save_starts + sequence)
    saves = tl.load(save_starts + sequence + 1) - first_save
    done = total * 0
    for segment in range(saves + 2):
        end, to = segment_end(segment, saves, first_save, before, saved, total, slot, save_after, save_slots)
        for i in range(done, end):
            row = input_row(x, kept, i, before, start, slot, x_stride, width, max_drafts)
            q = tl.load(row + q_offset + key, mask=is_key, other=0.0).to(tl.float32)
            k = tl.load(row + k_offset + key, mask=is_key, other=0.0).to(tl.float32)
            v = tl.load(row + v_offset + value, mask=is_value, other=0.0).to(tl.float32)
            if DELTA:
                q = q * (scale * tl.rsqrt(sum_pairs(q * q) + l2_eps))
                k = k * tl.rsqrt(sum_pairs(k * k) + l2_eps)
            change = v
            if decays is None:
                gate_row = input_row(gates, kept_gates, i, before, start, slot, gates_stride, gates_width, max_drafts)
                if BY_CHANNEL:
                    steps = tl.load(gate_row + step_offset + head * KEY_DIM + rows, mask=is_key, other=0.0).to(
                        tl.float32
                    )
                    decay = tl.exp(softplus(steps + bias) * rate)[:, None]
                else:
                    step = softplus(tl.load(gate_row + step_offset + head).to(tl.float32) + bias)
                    step = tl.minimum(tl.maximum(step, min_step), max_step)
                    decay = tl.exp(step * rate)
                    if not DELTA:
                        change = v * step
            decayed = s * decay
            result = sum_rows(decayed * q[:, None])
            if DELTA:
                beta = sigmoid(tl.load(gate_row + head).to(tl.float32)) * beta_scale
                change = (v - sum_rows(decayed * k[:, None])) * beta
            s = decayed + k[:, None] * change[None]
            result += change * sum_pairs(q * k)
            if skips is not None:
                result += v * tl.load(skips + head)
            if i >= before:
                target_row = out + (start + i - before) * out_stride
                tl.store(target_row + value, result.to(out.dtype.element_ty), mask=is_value)
        done = end
        if segment <= saves:
            tl.store(target + to * slot_size, s, mask=inside)
