"""Tiles of products, by their shapes alone. No choice made here changes a bit of any result."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.quantization import Format

from .launch import Architecture

DRAM = 21.0
"""Bytes that memory gives a multiprocessor in a clock (an H200: 4.8 TB/s, 132 of 1.7 GHz)."""
L2 = 32.0
"""Bytes that a multiprocessor reads from L2 in a clock."""
SHARED = 128.0
"""Bytes that matrix instructions read of shared memory in a clock."""
PRODUCTS = 2048.0
"""Products of 16-bit numbers that a multiprocessor makes in a clock; of 8-bit numbers twice as many."""
NOT_HIDDEN = 0.25
"""Share of reading and multiplying that does not happen beside each other."""
MAX_STAGES = 8
"""More bytes than this many stages hold are not needed to hide memory's latency."""
KEPT_SHARED = 2048
"""Bytes of a multiprocessor's shared memory that buffers leave to reductions, barriers and the system (1 KiB each)."""


@dataclass(frozen=True)
class Tile:
    """What a program computes, and how."""

    rows: int
    """Rows of weights that it has, at most ``bn``; with a gate two rows are one output."""
    bn: int
    """Rows of weights of its matrix instructions."""
    bt: int
    """Tokens."""
    bk: int
    """Inputs that are read at a time."""
    num_warps: int
    num_stages: int
    group: int = 8
    """Tiles of tokens that follow each other over the same weights, for L2."""


def choose_tile(
    architecture: Architecture,
    multiprocessors: int,
    tokens: int,
    rows: int,
    inputs: int,
    x_bytes: int,
    format: Format,
    gated: bool,
) -> Tile:
    """The tile that takes the least time, as far as one can say without measuring.

    For each input, a multiprocessor with some tiles reads their weights and tokens from L2 and multiplies them, while
    memory gives the whole matrix once: the longest of these counts. So few tokens take as many programs as memory needs
    to be read by, and many tokens the largest tile that still leaves no multiprocessor idle.

    Args:
        rows: of the matrix.
        x_bytes: of an input, as the product takes it.
    """
    w_bytes = format.bits / 8 or x_bytes
    rate = PRODUCTS * (2 if x_bytes == 1 else 1)
    best, least = None, float("inf")
    for bn, bt, share in _candidates(architecture, tokens, x_bytes, format, gated):
        tiles = -(-rows // share) * -(-tokens // bt)
        rounds = -(-tiles // multiprocessors)
        multiplied = max(bn * bt / rate, (bn + bn / 64 * bt) * x_bytes / SHARED)
        read = (share * w_bytes + min(bt, tokens) * x_bytes) / L2
        given = rows * w_bytes / multiprocessors / DRAM
        times = rounds * multiplied, rounds * read, given
        time = max(times) + NOT_HIDDEN * sum(times)
        if time < least * 0.999:  # of equal ones the first, the largest
            best, least = (bn, bt, share, rounds), time
    assert best is not None
    bn, bt, share, rounds = best
    bk = _inputs_at_a_time(bt, x_bytes, format)
    stage = int(bn * bk * w_bytes) + bt * bk * x_bytes
    # Two programs share a multiprocessor where there are enough: one computes while the other starts or ends.
    together = 2 if rounds > 1 and bn * bt <= 64 * 128 else 1
    room = architecture.shared_memory // together - KEPT_SHARED
    stages = max(min(room // stage, MAX_STAGES), 2)
    return Tile(share, bn, bt, bk, bn // 16, stages)


def _candidates(
    architecture: Architecture, tokens: int, x_bytes: int, format: Format, gated: bool
) -> list[tuple[int, int, int]]:
    """Rows of instructions, tokens, and rows of weights of tiles, largest first.

    A thread has 255 registers. 128 x 256 sums take half of them; half as many sums are possible where operands are
    registers, too (weights that are widened; any before Hopper), a quarter where each group of inputs is summed by
    itself. Plain arithmetic (float32) has small tiles.
    """
    weight_only = format.bits and not format.activation_bits
    hopper = (9, 0) <= architecture.capability < (12, 0)
    if x_bytes == 4:
        sizes = [(64, 32), (64, 16)]
    elif format.group_size:
        sizes = [(128, 64)] * hopper + [(64, 64), (64, 32), (64, 16)]
    elif weight_only or not hopper:
        sizes = [(128, 128), (64, 128), (64, 64), (64, 32), (64, 16)]
    else:
        sizes = [(128, 256), (128, 128), (64, 256), (64, 128), (64, 64), (64, 32), (64, 16)]
    enough = next((bt for bt in (16, 32, 64, 128, 256) if bt >= tokens), 256)
    return [
        (bn, bt, share)
        for bn, bt in sizes
        if bt <= max(enough, min(bt for _, bt in sizes))
        for share in ((128,) if bn == 128 else (64, 32, 16))
    ]


def _inputs_at_a_time(bt: int, x_bytes: int, format: Format) -> int:
    """Few tokens: 256 bytes of each row of weights, which memory gives faster than less of more rows, and a barrier for
    many bytes. Many tokens: as little as instructions are long enough to hide, for more stages."""
    if format.bits == 4:  # two groups of inputs at least
        return 512 if bt <= 32 and format.group_size > 32 else 256
    if x_bytes == 4:
        return 128 if format.bits else 32
    if format.bits == 8:
        return 256 if bt <= 32 and not format.group_size else 128
    return 128 if bt <= 32 else 64
