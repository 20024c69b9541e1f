"""Tiles of products, by their shapes alone. No choice made here changes a bit of any result."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.quantization import Format

from .launch import Architecture

MAX_STAGES = 8
"""More are hardly needed to hide memory's latency, and take longer to compile."""
MAX_FLOAT32_STAGES = 4
"""Of float32, whose widened weights take shared memory besides."""
KEPT_SHARED = 2048
"""Bytes of a multiprocessor's shared memory that buffers leave to reductions, barriers and the system (1 KiB each)."""
READING = 64
"""What it takes to read a row of a tile, of weights or tokens, against multiplying one by one: instructions wait for
reading (from L2) in tiles that are smaller than twice this squared."""


@dataclass(frozen=True)
class Size:
    """A tile that kernels are compiled with."""

    bn: int
    """Rows of weights of its matrix instructions."""
    bt: int
    """Tokens."""
    bk: int
    """Inputs that are read at a time."""


@dataclass(frozen=True)
class Tile(Size):
    """What a program computes, and how."""

    rows: int
    """Rows of weights that it has, at most ``bn``; with a gate two rows are one output."""
    num_warps: int
    num_stages: int


def sizes(architecture: Architecture, x_bytes: int, format: Format) -> tuple[Size, ...]:
    """The tiles of products of one kind, few tokens first.

    A thread has 255 registers. 128 x 256 sums take half of them; half as many sums are possible where operands are
    registers, too (weights that are widened; 8 bits on Blackwell; any before Hopper), a quarter where each group of
    inputs is summed by itself. Plain arithmetic (float32) has small tiles. For few tokens, 256 bytes of each row are
    read at a time, for fewer barriers; for many, no more than instructions are long enough to hide.
    """
    hopper = (9, 0) <= architecture.capability < (12, 0)
    if x_bytes == 4:
        bk = 256 if format.bits == 4 else 128 if format.bits else 32
        return Size(64, 16, bk), Size(64, 32, bk)
    if format.group_size:
        bk = 256 if format.bits == 4 else 128
        few = 2 * bk if format.bits == 4 and format.group_size > 32 else bk
        # Blackwell has tensor memory for four sums of groups, Ampere registers for two, beside offsets.
        bk = min(bk, (4 if hopper or not format.asymmetric else 2) * format.group_size)
        small = Size(64, 16, few), Size(64, 64, bk)
        blackwell = architecture.capability >= (10, 0)  # where widening floating-point numbers takes registers besides
        return (*small, Size(128, 64, bk)) if hopper and not (blackwell and format.is_mxfp4) else small
    few, many = (256, 128) if format.bits else (128, 64)
    several = Size(64, 16, few), Size(64, 64, many), Size(64, 128, many), Size(128, 128, many)
    large = not format.bits or (format.activation_bits and architecture.capability < (10, 0))
    return (*several, Size(128, 256, many)) if hopper and large else several


def choose_tile(
    architecture: Architecture, multiprocessors: int, tokens: int, rows: int, x_bytes: int, format: Format
) -> Tile:
    """The tile that takes the least time: as large as leaves few multiprocessors idle.

    Few tokens of few rows take as many programs as there are multiprocessors, alone on each with all its shared memory
    to read ahead; of more rows, two share a multiprocessor, so that one reads while the other starts or ends.

    Args:
        rows: of the matrix.
        x_bytes: of an input, as the product takes it.
    """

    def time(size: Size) -> int:
        tiles = -(-rows // size.bn) * -(-tokens // size.bt)
        return -(-tiles // multiprocessors) * (size.bn * size.bt + READING * (size.bn + size.bt))

    offered = sizes(architecture, x_bytes, format)
    most = max(size.bt for size in offered)
    size = min((size for size in offered if size.bt >= min(tokens, 64, most)), key=time)
    own, tiles_of_tokens = size.bn, -(-tokens // size.bt)
    while size.bn == 64 and own > 16 and -(-rows // (own // 2)) * tiles_of_tokens <= multiprocessors:
        own //= 2
    together = 2 if -(-rows // 64) > multiprocessors and size.bn * size.bt <= 64 * 64 else 1
    room = architecture.shared_memory // together - KEPT_SHARED
    stage = int(size.bn * size.bk * (format.bits / 8 or x_bytes)) + size.bt * size.bk * x_bytes
    stages = max(min(room // stage, MAX_FLOAT32_STAGES if x_bytes == 4 else MAX_STAGES), 2)
    return Tile(size.bn, size.bt, size.bk, own, size.bn // 16, stages)
