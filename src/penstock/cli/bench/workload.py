"""Workloads: which requests are sent, and when. Lengths are in tokens, times in seconds after the load begins."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path

import msgspec
import numpy as np

from penstock.core.errors import invalid

from .prompts import Piece

BLOCK = 512  # tokens that a hash id of Mooncake's traces stands for
WARMUPS = 1 << 40  # warm-up prompts are named from here on, so that no measured one begins like them


class Request(msgspec.Struct, frozen=True):
    """A prompt to be made of these pieces, how many tokens to ask for, and when to send it (0: as soon as may be)."""

    pieces: tuple[Piece, ...]
    output_len: int
    at: float = 0.0

    @property
    def input_len(self) -> int:
        return sum(length for _, length in self.pieces)


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """When requests arrive that come at ``rate`` a second with gamma-distributed gaps.

    Burstiness is the gaps' shape: 1 is a Poisson process, less comes in bursts, inf is a metronome. As in vLLM, the
    draw is scaled so that the last of them arrives at ``count / rate`` exactly: seeds differ in the pattern alone.
    """
    if math.isinf(rate):
        return [0.0] * count
    even = math.isinf(burstiness)
    gaps = np.ones(count) if even else np.random.default_rng(seed).gamma(burstiness, size=count)
    times = np.cumsum(gaps)
    seconds: list[float] = (times * (count / rate / times[-1])).tolist()
    return seconds


def random_requests(
    count: int, input_len: int, output_len: int, *, range_ratio: float = 0.0, prefix_len: int = 0, seed: int = 0
) -> list[Request]:
    """Requests of these lengths, or of lengths even between ``1 - range_ratio`` and ``1 + range_ratio`` times them.

    All prompts begin with the same ``prefix_len`` tokens, which come on top of ``input_len``.
    """
    rng = np.random.default_rng(seed)
    inputs, outputs = (_random_lengths(rng, length, range_ratio, count) for length in (input_len, output_len))
    prefix: tuple[Piece, ...] = ((0, prefix_len),) if prefix_len else ()
    return [
        Request((*prefix, (name, num_input)), num_output)
        for name, (num_input, num_output) in enumerate(zip(inputs, outputs, strict=True), start=1)
    ]


def _random_lengths(rng: np.random.Generator, length: int, ratio: float, count: int) -> list[int]:
    low, high = math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio))
    lengths: list[int] = rng.integers(max(low, 1), high, count, endpoint=True).tolist()
    return lengths


def read_trace(
    path: Path, count: int, *, speedup: float = 1.0, max_input_len: int = 0, max_output_len: int = 0
) -> list[Request]:
    """The first rows of a Mooncake JSONL or Azure CSV trace, ``speedup`` times as fast as they came.

    Equal ``hash_ids`` become equal text, so a server's prefix cache finds what it found then. Prompts and outputs are
    clipped to the maxima where these are not 0.

    Raises:
        PenstockError: the file cannot be read, or is neither kind of trace.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = itertools.chain([first := file.readline()], file)
            rows = list(itertools.islice((_mooncake if first.startswith("{") else _azure)(lines), count))
    except OSError as error:
        raise invalid("dataset_path", f"{path}: {error.strerror}") from error
    except (KeyError, ValueError) as error:
        raise invalid("dataset_path", f"{path} is neither a Mooncake JSONL nor an Azure CSV trace: {error}") from error
    if not rows:
        raise invalid("dataset_path", f"{path} has no rows")
    started = rows[0].at
    return [
        Request(
            _truncate(row.pieces, max_input_len or row.input_len),
            min(row.output_len, max_output_len or row.output_len),
            (row.at - started) / speedup,
        )
        for row in rows
    ]


class _MooncakeRow(msgspec.Struct):
    timestamp: float  # milliseconds
    input_length: int
    output_length: int
    hash_ids: list[int]


def _mooncake(lines: Iterable[str]) -> Iterator[Request]:
    decoder = msgspec.json.Decoder(_MooncakeRow)
    for line in lines:
        row = decoder.decode(line)
        pieces = _truncate([(name, BLOCK) for name in row.hash_ids], row.input_length)
        yield Request(pieces, max(row.output_length, 1), row.timestamp / 1000)


def _azure(lines: Iterable[str]) -> Iterator[Request]:
    for name, row in enumerate(csv.DictReader(lines)):
        at = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
        yield Request(((name, int(row["ContextTokens"])),), max(int(row["GeneratedTokens"]), 1), at)


def _truncate(pieces: Iterable[Piece], length: int) -> tuple[Piece, ...]:
    """As many of the pieces as make up ``length`` tokens, the last one cut."""
    kept: list[Piece] = []
    for name, tokens in pieces:
        if length <= 0:
            break
        kept.append((name, min(tokens, length)))
        length -= tokens
    return tuple(kept)


def warmups(requests: list[Request], count: int) -> list[Request]:
    """Requests of the same lengths whose prompts no other request shares."""
    shapes = itertools.islice(itertools.cycle(requests), count)
    return [Request(((WARMUPS + i, shape.input_len),), shape.output_len) for i, shape in enumerate(shapes)]
