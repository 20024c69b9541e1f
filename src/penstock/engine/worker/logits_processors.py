"""Logits processors: grammar bitmask, penalties, biases and excluded tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.core import SamplingParams
from penstock.ops import Ops, reference

from .decoding_rules import EXCLUDED, apply_rules
from .host_copy import to_device
from .row import Position


def process_logits(
    logits: Tensor, positions: Sequence[Position], grammar_bitmask: np.ndarray | None = None, ops: Ops = reference
) -> Tensor:
    """Apply penalties, biases, excluded tokens, grammar bitmask and decoding rules. Temperature and truncation (top-k,
    top-p, min-p) are applied later.

    Args:
        logits, positions, grammar_bitmask, ops: see ``sample``.

    Returns:
        The adjusted logits, ``[positions, vocabulary]``: ``logits`` itself if nothing is adjusted, otherwise a copy.
    """
    adjusted = logits
    for needed, entries, apply in LOGITS_PROCESSORS:
        if not (rows := [i for i, position in enumerate(positions) if needed(position.params)]):
            continue
        if adjusted is logits:
            adjusted = logits.clone()
        found = [entries(positions[i], logits.shape[1]) for i in rows]
        counts = [len(token_ids) for token_ids, _ in found]
        indices = np.stack((np.repeat(rows, counts), np.concatenate([token_ids for token_ids, _ in found])))
        values = np.concatenate([np.broadcast_to(np.float32(value), len(token_ids)) for token_ids, value in found])
        device = logits.device
        row, token = to_device(indices, device)
        apply(adjusted, to_device(rows, device), row, token, to_device(values, device))
    if grammar_bitmask is not None and len(rows := np.flatnonzero((grammar_bitmask != -1).any(1)).tolist()):
        if adjusted is logits:
            adjusted = logits.clone()
        for part in [slice(i, i + 1) for i in rows] if logits.device.type == "cpu" else [slice(None)]:
            ops.apply_bitmask(adjusted[part], to_device(grammar_bitmask[part], logits.device))
    for i, position in enumerate(positions):
        if rules := position.row.rules:
            if adjusted is logits:
                adjusted = logits.clone()
            apply_rules(adjusted[i], position, rules)
    return adjusted


Entries = tuple[np.ndarray, np.ndarray | float]
"""Token ids whose logits change in a row, ``[tokens]`` int64, and their values, ``[tokens]`` or one float for all."""


def _allowed_token_ids(position: Position, vocabulary: int) -> Entries:
    return _ids(position.params.allowed_token_ids or ()), 0


def _bad_words(position: Position, vocabulary: int) -> Entries:
    """Exclusion of the last token of each bad word, if the other tokens of the word are the last output tokens."""

    def has_begun(beginning: list[int]) -> bool:
        end = position.row.tokens[position.length - len(beginning) : position.length]
        return position.num_output_tokens >= len(beginning) and end.tolist() == beginning

    return _ids([last for *beginning, last in position.params.bad_word_ids if has_begun(beginning)]), EXCLUDED


def _min_tokens(position: Position, vocabulary: int) -> Entries:
    reached = position.num_output_tokens >= position.params.min_tokens
    return _ids([] if reached else [token for token in position.row.stop_token_ids if token < vocabulary]), EXCLUDED


def _logit_bias(position: Position, vocabulary: int) -> Entries:
    biases = position.params.logit_bias
    return _ids(biases), np.fromiter(biases.values(), np.float32)


def _repetition(position: Position, vocabulary: int) -> Entries:
    return position.counts.token_ids, position.params.repetition_penalty


def _frequency_and_presence(position: Position, vocabulary: int) -> Entries:
    """OpenAI's frequency and presence penalties of output tokens, as negative values to add to their logits."""
    params, counts = position.params, position.counts
    frequencies = np.float32(params.frequency_penalty) * counts.output_counts.astype(np.float32)
    return counts.output_ids, -(frequencies + np.float32(params.presence_penalty))


def _ids(token_ids: Iterable[int]) -> np.ndarray:
    return np.fromiter(token_ids, np.int64)


def _exclude_others(logits: Tensor, rows: Tensor, row: Tensor, token: Tensor, value: Tensor) -> None:
    kept = logits[row, token]
    logits.index_fill_(0, rows, EXCLUDED)
    logits[row, token] = kept


def _exclude(logits: Tensor, rows: Tensor, row: Tensor, token: Tensor, value: Tensor) -> None:
    logits[row, token] = value  # assigning a Python number instead would synchronize with the device


def _add(logits: Tensor, rows: Tensor, row: Tensor, token: Tensor, value: Tensor) -> None:
    logits[row, token] += value


def _penalize(logits: Tensor, rows: Tensor, row: Tensor, token: Tensor, value: Tensor) -> None:
    """Apply the repetition penalty of Keskar et al., 2019, to tokens of prompt and output: divide positive logits by
    the penalty, and multiply negative logits by it."""
    before = logits[row, token]
    logits[row, token] = torch.where(before > 0, before / value, before * value)


class LogitsProcessor(NamedTuple):
    """Changes the logits of positions whose sampling parameters need it."""

    needed: Callable[[SamplingParams], bool]
    """Returns True if the sampling parameters need this processor."""
    entries: Callable[[Position, int], Entries]
    """Returns the tokens of a position whose logits change. The second argument is the vocabulary size."""
    apply: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    """Changes logits in place. Arguments: logits, rows that need the processor, and row, token and value of entries."""


LOGITS_PROCESSORS = (
    LogitsProcessor(lambda p: p.allowed_token_ids is not None, _allowed_token_ids, _exclude_others),
    LogitsProcessor(lambda p: bool(p.bad_word_ids), _bad_words, _exclude),
    LogitsProcessor(lambda p: p.min_tokens > 0, _min_tokens, _exclude),
    LogitsProcessor(lambda p: bool(p.logit_bias), _logit_bias, _add),
    LogitsProcessor(lambda p: p.repetition_penalty != 1, _repetition, _penalize),
    LogitsProcessor(lambda p: p.frequency_penalty != 0 or p.presence_penalty != 0, _frequency_and_presence, _add),
)
"""All logits processors, in the order in which they are applied."""


def adjusts_logits(params: SamplingParams) -> bool:
    """True if the parameters need a logits processor: greedy sampling may then not choose the model's argmax."""
    return any(processor.needed(params) for processor in LOGITS_PROCESSORS)
