"""Recurrences with one or several states per channel: the selective scan (Mamba), and the real-gated linear recurrent
unit (RG-LRU). ``states`` has the order of their inputs."""

import triton
import triton.language as tl

from .states import input_row, segment_end, sequence_inputs, sigmoid, softplus, sum_rows


@triton.jit(do_not_specialize=["max_drafts"])
def selective_scan(
    starts,
    slots,
    accepted,
    drafts,
    save_starts,
    save_after,
    save_slots,
    x,
    steps,
    b,
    c,
    gate,
    out,
    state,
    kept_x,
    kept_steps,
    kept_b,
    rates,
    step_bias,
    skip,
    x_stride,
    steps_stride,
    b_stride,
    c_stride,
    gate_stride,
    out_stride,
    channels,
    max_drafts,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Selective scan of a block of channels. Grid: channels, sequence."""
    sequence = tl.program_id(1)
    slot, start, before, total, saved = sequence_inputs(starts, slots, accepted, drafts, sequence)
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_state, is_channel = rows < SIZE, columns < tl.where(total > 0, channels, 0)
    inside = is_state[:, None] & is_channel[None]
    at = rows[:, None] * channels + columns[None]
    slot_size = channels * SIZE
    h = tl.load(state + slot * slot_size + at, mask=inside, other=0.0)
    rate = tl.load(rates + at, mask=inside, other=0.0)
    bias = tl.load(step_bias + columns, mask=is_channel, other=0.0)
    factor = tl.load(skip + columns, mask=is_channel, other=0.0)
    first_save = tl.load(save_starts + sequence)
    saves = tl.load(save_starts + sequence + 1) - first_save
    done = total * 0
    for segment in range(saves + 2):
        end, to = segment_end(segment, saves, first_save, before, saved, total, slot, save_after, save_slots)
        for i in range(done, end):
            has_output = i >= before
            token = tl.maximum(start + i - before, start)
            x_row = input_row(x, kept_x, i, before, start, slot, x_stride, channels, max_drafts)
            steps_row = input_row(steps, kept_steps, i, before, start, slot, steps_stride, channels, max_drafts)
            b_row = input_row(b, kept_b, i, before, start, slot, b_stride, SIZE, max_drafts)
            value = tl.load(x_row + columns, mask=is_channel, other=0.0).to(tl.float32)
            step = softplus(tl.load(steps_row + columns, mask=is_channel, other=0.0).to(tl.float32) + bias)
            b_values = tl.load(b_row + rows, mask=is_state, other=0.0).to(tl.float32)
            c_values = tl.load(c + token * c_stride + rows, mask=is_state, other=0.0).to(tl.float32)
            gates = tl.load(gate + token * gate_stride + columns, mask=is_channel, other=0.0).to(tl.float32)
            h = tl.exp(step[None] * rate) * h + (step * value)[None] * b_values[:, None]
            result = (sum_rows(h * c_values[:, None]) + value * factor) * (gates * sigmoid(gates))
            if has_output:
                tl.store(out + token * out_stride + columns, result.to(out.dtype.element_ty), mask=is_channel)
        done = end
        if segment <= saves:
            tl.store(state + at + to * slot_size, h, mask=inside)


@triton.jit(do_not_specialize=["max_drafts"])
def rg_lru(
    starts,
    slots,
    accepted,
    drafts,
    save_starts,
    save_after,
    save_slots,
    positions,
    x,
    gates,
    out,
    state,
    kept_x,
    kept_gates,
    rates,
    bias,
    x_stride,
    gates_stride,
    out_stride,
    channels,
    max_drafts,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Real-gated linear recurrent unit of a block of channels, WIDTH for each head. Grid: channels, sequence."""
    sequence = tl.program_id(1)
    slot, start, before, total, saved = sequence_inputs(starts, slots, accepted, drafts, sequence)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < tl.where(total > 0, channels, 0)
    input_gate = columns // WIDTH * (2 * WIDTH) + columns % WIDTH
    decay_gate = input_gate + WIDTH
    h = tl.load(state + slot * channels + columns, mask=inside, other=0.0)
    rate = tl.load(rates + columns, mask=inside, other=0.0)
    input_bias = tl.load(bias + input_gate, mask=inside, other=0.0)
    decay_bias = tl.load(bias + decay_gate, mask=inside, other=0.0)
    first_save = tl.load(save_starts + sequence)
    saves = tl.load(save_starts + sequence + 1) - first_save
    done = total * 0
    for segment in range(saves + 2):
        end, to = segment_end(segment, saves, first_save, before, saved, total, slot, save_after, save_slots)
        for i in range(done, end):
            has_output = i >= before
            token = tl.maximum(start + i - before, start)
            x_row = input_row(x, kept_x, i, before, start, slot, x_stride, channels, max_drafts)
            gates_row = input_row(gates, kept_gates, i, before, start, slot, gates_stride, 2 * channels, max_drafts)
            value = tl.load(x_row + columns, mask=inside, other=0.0).to(tl.float32)
            value *= sigmoid(tl.load(gates_row + input_gate, mask=inside, other=0.0).to(tl.float32) + input_bias)
            decay = sigmoid(tl.load(gates_row + decay_gate, mask=inside, other=0.0).to(tl.float32) + decay_bias) * rate
            scale = tl.sqrt(tl.maximum(1.0 - tl.exp(2.0 * decay), 0.0))
            is_first = has_output & (tl.load(positions + token) == 0)
            h = tl.where(is_first, value, tl.exp(decay) * h + scale * value)
            if has_output:
                tl.store(out + token * out_stride + columns, h.to(out.dtype.element_ty), mask=inside)
        done = end
        if segment <= saves:
            tl.store(state + columns + to * channels, h, mask=inside)
