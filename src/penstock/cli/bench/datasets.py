"""Datasets with prompts: ShareGPT (JSON), custom (JSONL), sonnet (lines of text), and lengths of BurstGPT (CSV)."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from penstock.core.errors import invalid

from .dataset_options import DatasetOptions
from .workload import Request, prefix_requests, random_requests, read_trace, refusing_other_formats

DEFAULT_OUTPUT = 256
"""Tokens to generate for a row of a custom dataset without ``output_tokens``."""
MIN_LEN, MAX_PROMPT, MAX_TOTAL = 4, 1024, 2048
"""Tokens of the shortest prompt and answer, of the longest prompt, and of both, that are taken from ShareGPT, as in
vLLM."""
CHUNK = 64
"""Number of conversations that are tokenized at a time."""
TASK = "Continue this poem with some of the following lines:\n"
"""Instruction at the start of sonnet prompts."""

T = TypeVar("T")


class Tokenizer(Protocol):
    """Tokenizer of the measured server or engine."""

    async def count(self, texts: Sequence[str]) -> list[int]:
        """Number of tokens of each text, without special tokens."""


class CustomRow(msgspec.Struct):
    """Row of a custom dataset."""

    prompt: str
    output_tokens: int = DEFAULT_OUTPUT


class Turn(msgspec.Struct):
    value: str


class Conversation(msgspec.Struct):
    """Row of ShareGPT."""

    conversations: list[Turn] = []


def read_rows(options: DatasetOptions) -> list[Any]:
    """Read the rows of a dataset with prompts or lengths; empty for others. Raises ``PenstockError`` (``invalid``) if
    the file cannot be read, or has another format."""
    if options.dataset not in READERS:
        return []
    path, (reader, form) = Path(options.dataset_path), READERS[options.dataset]
    with refusing_other_formats(path, f"not {form}"):
        rows = reader(path)
    if not rows:
        raise invalid("dataset_path", f"{path} has no rows: give {form}")
    if options.shuffle and options.dataset != "sonnet":
        order = np.random.default_rng(options.seed).permutation(len(rows))
        rows = [rows[index] for index in order]
    return rows


async def create_requests(options: DatasetOptions, rows: list[Any], tokenizer: Tokenizer) -> list[Request]:
    """Create the requests of a dataset, with the arrival times of a trace. Raises ``PenstockError`` if its texts cannot
    be tokenized.

    Args:
        rows: result of ``read_rows``.
    """
    count, (num_input, num_output, num_prefix) = options.num_prompts, options.lengths
    match options.dataset:
        case "random":
            return random_requests(
                count,
                num_input,
                num_output,
                range_ratio=options.range_ratio,
                prefix_len=num_prefix,
                seed=options.seed,
            )
        case "prefix_repetition":
            return prefix_requests(count, num_input, num_output, num_prefix, options.num_prefixes, options.seed)
        case "trace":
            return read_trace(
                Path(options.dataset_path),
                count,
                speedup=options.trace_speedup,
                max_input_len=options.max_input_len,
                max_output_len=options.max_output_len,
                block_size=options.trace_block_size,
                time_unit=options.trace_time_unit,
            )
        case "burstgpt":
            lengths = [(num_input or row[0], num_output or row[1]) for row in rows]
            return _repeat([Request(((name, each[0]),), each[1]) for name, each in enumerate(lengths)], options)
        case "custom":
            length = options.output_len
            return _repeat([Request((), length or row.output_tokens, text=row.prompt) for row in rows], options)
        case "sharegpt":
            return _repeat(await _sharegpt(options, rows, tokenizer), options)
        case _:
            return await _sonnet(options, rows, tokenizer)


def _repeat(requests: list[T], options: DatasetOptions) -> list[T]:
    """The first ``num_prompts`` requests; if there are fewer, repeat them."""
    endless = itertools.cycle(requests) if options.oversample else iter(requests)
    return list(itertools.islice(endless, options.num_prompts))


async def _sharegpt(options: DatasetOptions, rows: list[list[str]], tokenizer: Tokenizer) -> list[Request]:
    result: list[Request] = []
    for start in range(0, len(rows), CHUNK):
        chunk = rows[start : start + CHUNK]
        counts = await tokenizer.count([text for row in chunk for text in row])
        for (prompt, _), num_input, num_answer in zip(chunk, counts[::2], counts[1::2], strict=True):
            num_output = options.output_len or num_answer
            shortest = min(num_input, MIN_LEN if options.output_len else num_answer)
            if shortest >= MIN_LEN and num_input <= MAX_PROMPT and num_input + num_output <= MAX_TOTAL:
                result.append(Request((), num_output, text=prompt, num_tokens=num_input))
        if len(result) >= options.num_prompts:
            break
    if not result:
        limits = f"prompts of {MIN_LEN} to {MAX_PROMPT} tokens and at most {MAX_TOTAL} tokens with the answer"
        raise invalid("dataset_path", f"{options.dataset_path} has no conversation with {limits}: give another file")
    return result


async def _sonnet(options: DatasetOptions, lines: list[str], tokenizer: Tokenizer) -> list[Request]:
    """Prompts of the first lines (``prefix_len`` tokens), then random lines, together ``input_len`` tokens at most."""
    num_input, num_output, num_prefix = options.lengths
    task, *counts = await tokenizer.count([TASK, *lines])
    if num_input < task + max(counts):
        raise invalid("input_len", f"must be at least {task + max(counts)} for this file, is {num_input}")
    rng, used = np.random.default_rng(options.seed), task
    prefix = list(itertools.takewhile(lambda index: sum(counts[: index + 1]) <= num_prefix - task, range(len(lines))))
    used += sum(counts[index] for index in prefix)
    result = []
    for _ in range(options.num_prompts):
        chosen, total = [*prefix], used
        while total + counts[line := int(rng.integers(len(lines)))] <= num_input:
            chosen.append(line)
            total += counts[line]
        text = TASK + "".join(lines[index] for index in chosen)
        result.append(Request((), num_output, text=text, num_tokens=total))
    return result


def _read_custom(path: Path) -> list[CustomRow]:
    decoder = msgspec.json.Decoder(CustomRow)
    return [decoder.decode(line) for line in path.read_text("utf-8").split("\n") if line.strip()]


def _read_sharegpt(path: Path) -> list[list[str]]:
    rows = msgspec.json.decode(path.read_bytes(), type=list[Conversation])
    return [[turn.value for turn in row.conversations[:2]] for row in rows if len(row.conversations) >= 2]


def _read_sonnet(path: Path) -> list[str]:
    return [f"{line}\n" for line in path.read_text("utf-8").split("\n") if line.strip()]


def _read_burstgpt(path: Path) -> list[tuple[int, int]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return [*_burstgpt_lengths(file)]


def _burstgpt_lengths(lines: Any) -> Iterator[tuple[int, int]]:
    for row in csv.DictReader(lines):
        lengths = int(row["Request tokens"]), int(row["Response tokens"])
        if row["Model"] == "GPT-4" and min(lengths) > 0:
            yield lengths


READERS: dict[str, tuple[Callable[[Path], list[Any]], str]] = {
    "custom": (_read_custom, "JSONL of objects with prompt"),
    "sharegpt": (_read_sharegpt, "a JSON list of objects with conversations"),
    "sonnet": (_read_sonnet, "a text file"),
    "burstgpt": (_read_burstgpt, "CSV with the columns Model, Request tokens and Response tokens"),
}
"""Reader and format of each dataset."""
