"""Calibration texts: records read from files, rendered and encoded to samples of equal length."""

from __future__ import annotations

import gzip
import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import file_digest, sha256
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.text import Tokenizer, tokenizer_files

BUILT_IN = Path(__file__).parent / "texts.jsonl.gz"
"""English and Chinese chats, sampled from the demo model's corpus by ``examples/demo_model/calibration.py``."""
MANUAL = "pydoc_data.topics"
"""Module with Python's reference manual: English prose that most installations of Python include. Half of the built-in
texts are windows of the manual, because the vocabulary of the chats alone is too small."""
FIELDS = ("text", "messages", "prompt")
"""Fields of a record; the first field that is present is used: a text, a chat in OpenAI's format, or a prompt, followed
by a ``response`` or ``completion`` if present."""
ANSWERS = ("response", "completion")
WINDOW_CHARACTERS = 8
"""Characters per token in records cut from plain text: more than tokens have on average, so a record fills a sample."""
SUFFIXES = (".json", ".jsonl", ".parquet", ".txt")
"""Suffixes of the files that are read from a folder."""
FIELD = "--calib-dataset"


def read_samples(dataset: str | Sequence[str], tokenizer: Tokenizer, count: int, tokens: int, seed: int) -> Tensor:
    """Draw samples from a data set.

    Records are shuffled, encoded, and concatenated until a sample is full; the end of the last record is dropped.

    Args:
        dataset: a file of JSON lines (``.jsonl``), a JSON array (``.json``), Parquet (``.parquet``) or text; a folder
            of files in these formats; a sequence of texts; or empty for the built-in texts.
        count: maximum number of samples.
        tokens: number of tokens per sample.

    Returns:
        ``[samples, tokens]`` int64; a data set with fewer tokens than a sample gives one shorter sample.

    Raises ``PenstockError`` (``invalid``) for a file that cannot be read.
    """
    if isinstance(dataset, str):
        records = _read(Path(dataset), tokens) if dataset else _built_in(tokens, seed)
    else:
        records = [{"text": text} for text in dataset]
    Random(seed).shuffle(records)
    samples: list[list[int]] = []
    sample: list[int] = []
    for record in records:
        sample += tokenizer.encode(_render(record, tokenizer))
        if len(sample) >= tokens:
            samples.append(sample[:tokens])
            sample = []
        if len(samples) == count:
            break
    if not samples and len(sample) < 2:
        raise invalid(FIELD, f"{dataset or 'the data set'} has fewer than 2 tokens of text: add texts")
    return torch.tensor(samples or [sample])


def texts_digest(dataset: str, model: Path) -> str:
    """Return a digest of the files that determine the samples: the data set and the model's tokenizer.

    Raises ``PenstockError`` (``invalid``) for a file that cannot be read.
    """
    digest = sha256("".join([] if dataset else _manual()).encode())
    for path in (*_files(Path(dataset) if dataset else BUILT_IN), *tokenizer_files.paths(model)):
        try:
            with path.open("rb") as file:
                digest.update(file_digest(file, "sha256").digest())
        except OSError as error:
            raise _cannot_read(path, error) from error
    return digest.hexdigest()


def split_samples(samples: Tensor, calib_size: int, eval_size: int) -> tuple[Tensor, Tensor]:
    """Split samples into calibration samples and evaluation samples (an eighth, at most ``eval_size``). A single sample
    is used for both."""
    if len(samples) == 1:
        return samples, samples
    evaluated = min(eval_size, max(1, len(samples) // 8))
    return samples[evaluated : evaluated + calib_size], samples[:evaluated]


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if file.suffix in SUFFIXES) if path.is_dir() else [path]


def _cannot_read(path: Path, error: OSError) -> PenstockError:
    return invalid(FIELD, f"cannot read {path} ({error.strerror or error})")


def _built_in(tokens: int, seed: int) -> list[Mapping[str, Any]]:
    """Built-in records: chats and Python's manual, about half each; only chats if the manual is not installed."""
    chats = _read(BUILT_IN, tokens)
    manual = [window for topic in _manual() for window in _windows(topic, WINDOW_CHARACTERS * tokens)]
    if not manual:
        return chats
    Random(seed).shuffle(chats)
    sizes = accumulate(len(json.dumps(chat, ensure_ascii=False)) for chat in chats)
    length = sum(map(len, manual))
    return [{"text": window} for window in manual] + [
        chat for chat, size in zip(chats, sizes, strict=True) if size <= length
    ]


def _manual() -> list[str]:
    """The topics of Python's manual; empty if the manual is not installed."""
    try:
        return [*importlib.import_module(MANUAL).topics.values()]
    except ImportError:
        return []


def _read(path: Path, tokens: int) -> list[Mapping[str, Any]]:
    if path.is_dir():
        return [record for file in _files(path) for record in _read(file, tokens)]
    try:
        if path.suffix == ".parquet":
            return _read_parquet(path)
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = content.decode("utf-8")
    except OSError as error:
        raise _cannot_read(path, error) from error
    except UnicodeDecodeError as error:
        message = f"{path} is not UTF-8 text ({error.reason} at byte {error.start}): convert the file to UTF-8"
        raise invalid(FIELD, message) from error
    if path.suffix == ".json" and text.lstrip().startswith("["):
        return _parse_array(text, path)
    if ".jsonl" in path.suffixes or path.suffix == ".json":  # splitlines() would also split at U+2028 in strings
        return [_parse(line, path, number) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    return [{"text": window} for window in _windows(text, WINDOW_CHARACTERS * tokens)]


def _read_parquet(path: Path) -> list[Mapping[str, Any]]:
    try:
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise PenstockError(
            Code.UNSUPPORTED, f"{FIELD}: {path} requires pyarrow: pip install 'penstock-llm[parquet]'", FIELD
        ) from error
    try:
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    except Exception as error:  # pyarrow raises exceptions of several classes
        raise invalid(FIELD, f"{path} cannot be read as Parquet ({str(error).splitlines()[0]})") from error
    return [_checked(row, path, number) for number, row in enumerate(rows, 1)]


def _parse(line: str, path: Path, number: int) -> Mapping[str, Any]:
    try:
        return _checked(json.loads(line), path, number)
    except (ValueError, RecursionError) as error:
        raise invalid(FIELD, f"line {number} of {path} is not JSON: {error}") from error


def _parse_array(text: str, path: Path) -> list[Mapping[str, Any]]:
    try:
        return [_checked(record, path, number) for number, record in enumerate(json.loads(text), 1)]
    except (ValueError, RecursionError) as error:
        raise invalid(FIELD, f"{path} is not JSON: {error}") from error


def _checked(record: Any, path: Path, number: int) -> Mapping[str, Any]:
    if isinstance(record, Mapping):
        if isinstance(record.get("text"), str) or isinstance(record.get("prompt"), str):
            return record
        messages = record.get("messages")
        if messages and isinstance(messages, Sequence) and all(isinstance(message, Mapping) for message in messages):
            return record
    message = f"record {number} of {path} has no valid field of {', '.join(FIELDS)}: add a text, messages or a prompt"
    raise invalid(FIELD, message)


def _windows(text: str, characters: int) -> Iterator[str]:
    """Cut a text into parts of at most ``characters`` characters, at line ends where possible."""
    first = 0
    while first < len(text):
        end = first + characters
        if end < len(text):
            end = text.rfind("\n", first, end) + 1 or end
        yield text[first:end]
        first = end


def _render(record: Mapping[str, Any], tokenizer: Tokenizer) -> str:
    if isinstance(text := record.get("text"), str):
        return text
    if messages := record.get("messages"):
        if tokenizer.template_source is None:
            return "".join(f"{message.get('content')}\n" for message in messages)
        messages = [{name: value for name, value in message.items() if value is not None} for message in messages]
        try:
            return tokenizer.template.render(messages, tools=record.get("tools"), add_generation_prompt=False)
        except PenstockError as error:
            raise invalid(FIELD, f"the chat template cannot render a record ({error}): remove the record") from error
    answer = next((record[name] for name in ANSWERS if isinstance(record.get(name), str)), "")
    return f"{record['prompt']}{answer}"
