"""Choice of the tiles of products by their shapes. The choice does not change the bits of results."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.quantization import Format

from .launch import Architecture

MAX_STAGES = 8
"""Maximum number of pipeline stages. More stages hardly hide more memory latency, and compile slower."""
MAX_FLOAT32_STAGES = 4
"""Maximum number of pipeline stages for float32: its converted weights use additional shared memory."""
RESERVED_SHARED = 2048
"""Shared memory of a multiprocessor that is reserved for reductions, barriers and the system (1 KiB each), in bytes."""
READ_COST = 64
"""Cost of reading a row of a tile (weights or tokens, from L2) relative to a multiplication. A square tile with sides
of less than ``2 * READ_COST`` is bound by reads."""


@dataclass(frozen=True)
class Size:
    """Tile size for which kernels are compiled."""

    bn: int
    """Number of rows of weights of the matrix instructions."""
    bt: int
    """Number of tokens."""
    bk: int
    """Number of inputs that are read at a time."""


@dataclass(frozen=True)
class Tile(Size):
    """Tile of a program, and launch options."""

    rows: int
    """Number of rows of weights that are used, at most ``bn``. With a gate, an output has two rows."""
    num_warps: int
    num_stages: int


def sizes(architecture: Architecture, x_bytes: int, format: Format) -> tuple[Size, ...]:
    """Return the tile sizes for a kind of product, the sizes for few tokens first.

    A thread has 255 registers. 128 x 256 sums use half of them. Half of these sums are possible if operands are also in
    registers (converted weights; 8 bits on Blackwell; all products before Hopper), a quarter if groups of inputs are
    summed separately. Products without matrix instructions (float32) have small tiles. For few tokens, 256 bytes of
    each row are read at a time, to reduce barriers. For many tokens, it is the number of bytes that instructions can
    hide.

    Args:
        x_bytes: size of an input of the product in bytes, after quantization.
    """
    hopper = (9, 0) <= architecture.capability < (12, 0)
    if x_bytes == 4:
        bk = 256 if format.bits == 4 else 128 if format.bits else 32
        return Size(64, 16, bk), Size(64, 32, bk)
    if format.group_size:
        bk = 256 if format.bits == 4 else 128
        few = 2 * bk if format.bits == 4 and format.group_size > 32 else bk
        # Blackwell has tensor memory for four sums of groups. Ampere has registers for two sums of groups and offsets.
        bk = min(bk, (4 if hopper or not format.asymmetric else 2) * format.group_size)
        small = Size(64, 16, few), Size(64, 64, bk)
        blackwell = architecture.capability >= (10, 0)  # where converting floating-point weights uses more registers
        return (*small, Size(128, 64, bk)) if hopper and not (blackwell and format.is_mxfp4) else small
    few, many = (256, 128) if format.bits else (128, 64)
    several = Size(64, 16, few), Size(64, 64, many), Size(64, 128, many), Size(128, 128, many)
    large = not format.bits or (format.activation_bits and architecture.capability < (10, 0))
    return (*several, Size(128, 256, many)) if hopper and large else several


def choose_tile(
    architecture: Architecture, multiprocessors: int, tokens: int, rows: int, x_bytes: int, format: Format
) -> Tile:
    """Choose the fastest tile: as large as possible with few idle multiprocessors.

    For few tokens and few rows, each multiprocessor runs one program, with all shared memory for prefetching. With more
    rows, two programs share a multiprocessor, so that one reads while the other starts or ends.

    Args:
        rows: number of rows of the matrix.
        x_bytes: size of an input of the product in bytes, after quantization.
    """

    def time(size: Size) -> int:
        tiles = -(-rows // size.bn) * -(-tokens // size.bt)
        return -(-tiles // multiprocessors) * (size.bn * size.bt + READ_COST * (size.bn + size.bt))

    candidates = sizes(architecture, x_bytes, format)
    max_bt = max(size.bt for size in candidates)
    size = min((size for size in candidates if size.bt >= min(tokens, 64, max_bt)), key=time)
    used_rows, tiles_of_tokens = size.bn, -(-tokens // size.bt)
    while size.bn == 64 and used_rows > 16 and -(-rows // (used_rows // 2)) * tiles_of_tokens <= multiprocessors:
        used_rows //= 2
    programs = 2 if -(-rows // 64) > multiprocessors and size.bn * size.bt <= 64 * 64 else 1
    available = architecture.shared_memory // programs - RESERVED_SHARED
    stage = int(size.bn * size.bk * (format.bits / 8 or x_bytes)) + size.bt * size.bk * x_bytes
    stages = max(min(available // stage, MAX_FLOAT32_STAGES if x_bytes == 4 else MAX_STAGES), 2)
    return Tile(size.bn, size.bt, size.bk, used_rows, size.bn // 16, stages)
