"""Workloads: requests and their arrival times. Lengths are in tokens, times in seconds since the start of the load."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import msgspec
import numpy as np

from penstock.core.errors import invalid

from .prompts import Part

BLOCK = 512  # tokens per hash id in Mooncake's traces
UNKNOWN = 32
"""Tokens of a warm-up prompt if those of the measured prompts are unknown."""
WARMUPS = (
    1 << 40
)  # name of the first warm-up prompt's part; measured prompts have smaller names, so they share no prefix


class Request(msgspec.Struct, frozen=True):
    """A request: its prompt, the number of tokens to generate, and its arrival time."""

    parts: tuple[Part, ...]
    """Parts of a generated prompt."""
    output_len: int
    at: float = 0.0
    text: str = ""
    """Text of the prompt instead of parts."""
    token_ids: tuple[int, ...] = ()
    """Token ids of ``text``, to be sent instead of it."""
    num_tokens: int = 0
    """Number of tokens of ``text``; 0: unknown."""
    model: str = ""
    """Adapter to be used instead of the model."""

    @property
    def input_len(self) -> int:
        """Number of prompt tokens; 0: unknown."""
        return self.num_tokens or len(self.token_ids) or sum(length for _, length in self.parts)


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Arrival times of requests at ``rate`` per second with gamma-distributed gaps.

    Burstiness is the shape of the gamma distribution: 1 is a Poisson process, less is burstier, inf is even. As in
    vLLM, times are scaled so that the last request arrives at ``count / rate`` for any seed.
    """
    if math.isinf(rate):
        return [0.0] * count
    even = math.isinf(burstiness)
    gaps = np.ones(count) if even else np.random.default_rng(seed).gamma(burstiness, size=count)
    times = np.cumsum(gaps)
    seconds: list[float] = (times * (count / rate / times[-1])).tolist()
    return seconds


def ramp(count: int, start: float, end: float, exponential: bool, burstiness: float, seed: int) -> list[float]:
    """Arrival times of requests whose rate changes from ``start`` to ``end`` per second, linearly or exponentially with
    the number of the request. Gaps are gamma-distributed, as in ``arrivals``."""
    progress = np.linspace(0.0, 1.0, count) if count > 1 else np.zeros(1)
    rates = start * (end / start) ** progress if exponential else start + (end - start) * progress
    even = math.isinf(burstiness)
    gaps = np.ones(count) if even else np.random.default_rng(seed).gamma(burstiness, size=count) / burstiness
    seconds: list[float] = np.cumsum(gaps / rates).tolist()
    return seconds


def random_requests(
    count: int, input_len: int, output_len: int, *, range_ratio: float = 0.0, prefix_len: int = 0, seed: int = 0
) -> list[Request]:
    """Requests with random prompts, and lengths uniform in ``1 ± range_ratio`` times the given ones.

    All prompts begin with the same ``prefix_len`` tokens, in addition to ``input_len``.
    """
    rng = np.random.default_rng(seed)
    inputs, outputs = (_random_lengths(rng, length, range_ratio, count) for length in (input_len, output_len))
    prefix: tuple[Part, ...] = ((0, prefix_len),) if prefix_len else ()
    return [
        Request((*prefix, (name, num_input)), num_output)
        for name, (num_input, num_output) in enumerate(zip(inputs, outputs, strict=True), start=1)
    ]


def prefix_requests(
    count: int, input_len: int, output_len: int, prefix_len: int, num_prefixes: int, seed: int = 0
) -> list[Request]:
    """Requests with random prompts in random order, which share ``num_prefixes`` prefixes evenly.

    Prompts have ``prefix_len + input_len`` tokens.
    """
    order = np.random.default_rng(seed).permutation(count).tolist()
    return [
        Request(((number % num_prefixes, prefix_len), (num_prefixes + number, input_len)), output_len)
        for number in order
    ]


def _random_lengths(rng: np.random.Generator, length: int, ratio: float, count: int) -> list[int]:
    low, high = math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio))
    lengths: list[int] = rng.integers(max(low, 1), high, count, endpoint=True).tolist()
    return lengths


@contextmanager
def refusing_other_formats(path: Path, about: str) -> Iterator[None]:
    """Context in which a dataset is read. Raises ``PenstockError`` (``invalid``) if the file cannot be read, or is
    ``about``."""
    try:
        yield
    except OSError as error:
        raise invalid("dataset_path", f"{path} cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise invalid("dataset_path", f"{path} is {about}: {error}") from error


def read_trace(
    path: Path,
    count: int,
    *,
    speedup: float = 1.0,
    max_input_len: int = 0,
    max_output_len: int = 0,
    block_size: int = BLOCK,
    time_unit: float = 0.001,
) -> list[Request]:
    """Read the first ``count`` requests of a Mooncake JSONL or Azure CSV trace.

    Equal ``hash_ids`` become equal text, which reproduces the prefix cache hits of the trace.

    Args:
        speedup: factor that divides arrival times.
        max_input_len, max_output_len: maximum lengths to which requests are clipped; 0: not clipped.
        block_size: tokens per hash id of a Mooncake trace.
        time_unit: unit of the times in a Mooncake trace, in seconds.

    Raises ``PenstockError`` if the file cannot be read, or has another format.
    """
    about = "neither a Mooncake JSONL nor an Azure CSV trace"
    with refusing_other_formats(path, about), path.open(encoding="utf-8-sig", newline="") as file:
        lines = itertools.chain([first := file.readline()], file)
        mooncake = first.startswith("{")
        parsed = _mooncake(lines, block_size, time_unit) if mooncake else _azure(lines)
        rows = list(itertools.islice(parsed, count))
    if not rows:
        raise invalid("dataset_path", f"{path} has no rows: give a trace with at least one request")
    started = rows[0].at
    return [
        Request(
            _truncate(row.parts, max_input_len or row.input_len),
            min(row.output_len, max_output_len or row.output_len),
            (row.at - started) / speedup,
        )
        for row in rows
    ]


class _MooncakeRow(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def _mooncake(lines: Iterable[str], block_size: int, time_unit: float) -> Iterator[Request]:
    decoder = msgspec.json.Decoder(_MooncakeRow)
    for line in lines:
        row = decoder.decode(line)
        parts = _truncate([(name, block_size) for name in row.hash_ids], row.input_length)
        yield Request(parts, max(row.output_length, 1), row.timestamp * time_unit)


def _azure(lines: Iterable[str]) -> Iterator[Request]:
    for name, row in enumerate(csv.DictReader(lines)):
        at = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
        yield Request(((name, int(row["ContextTokens"])),), max(int(row["GeneratedTokens"]), 1), at)


def _truncate(parts: Iterable[Part], length: int) -> tuple[Part, ...]:
    """Truncate parts to ``length`` tokens in total."""
    kept: list[Part] = []
    for name, tokens in parts:
        if length <= 0:
            break
        kept.append((name, min(tokens, length)))
        length -= tokens
    return tuple(kept)


def warmups(requests: list[Request], count: int) -> list[Request]:
    """Warm-up requests with the lengths of ``requests``. Their prompts share no prefix with any other prompt."""
    shapes = itertools.islice(itertools.cycle(requests), count)
    return [
        Request(((WARMUPS + i, shape.input_len or UNKNOWN),), shape.output_len, model=shape.model)
        for i, shape in enumerate(shapes)
    ]
