"""Sampling: from logits to tokens and log probabilities.

Positions with plain greedy sampling (``Position.is_plain_greedy``) do not come here: ``ModelRunner.sample`` takes their
argmax without storing logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.core import Code, Failure, Logprob, SamplingParams

from ..step import NO_TOKEN_ALLOWED, Candidates, SampledTokens
from .host_copy import HostCopy, to_device
from .philox import uniform
from .row import Position

EXCLUDED = float("-inf")
"""The logit of a token that must not be sampled."""
NON_FINITE_LOGITS = Failure(Code.INTERNAL, "the model's logits of the next token are not finite (NaN or infinity)")
NOTHING_ALLOWED = Failure(Code.INVALID, NO_TOKEN_ALLOWED)
ROWS_AT_ONCE = 4
"""Number of rows that are sampled together. The distributions of more rows would not fit into the processor's caches,
and their memory would be returned to the system after each step."""
BIN_SHIFT = 20
"""Low bits of a float32 that its bin (``_truncate``) leaves out: eight bins for each power of two."""


class PendingSamples:
    """Tokens that were sampled at some positions, of which the host may not know the values yet.

    Args:
        token_ids: ``[positions]`` int64, on the device.
        finish: makes the result of values that were copied to the host.
    """

    def __init__(self, token_ids: Tensor, finish: Callable[[], list[SampledTokens]]) -> None:
        self.token_ids = token_ids
        """``[positions]`` int64 on the device: the sampled token of each position. Some token of the vocabulary where
        sampling failed, and for a beam."""
        self._finish = finish

    def result(self) -> list[SampledTokens]:
        """What was sampled at each position; waits for the device."""
        return self._finish()


def sample(logits: Tensor, positions: Sequence[Position], grammar_bitmask: np.ndarray | None = None) -> PendingSamples:
    """Sample the next token at each position.

    What is sampled depends on the position's logits, tokens, sampling parameters and seed, not on other positions.

    Args:
        logits: ``[positions, vocabulary]`` float32, not overwritten.
        positions: where the tokens are sampled.
        grammar_bitmask: ``[positions, vocabulary / 32]`` int32, a bit for each token that may be sampled; None allows
            all.

    Returns:
        For each position a token, or for a beam its candidates; with logprobs and logits where its parameters ask for
        them. Where no token is allowed (``NOTHING_ALLOWED``) or logits are not finite (``NON_FINITE_LOGITS``), that
        failure and nothing else.
    """
    device = logits.device
    adjusted = process_logits(logits, positions, grammar_bitmask)
    token_ids = adjusted.argmax(-1)  # a row with a NaN gets the index of the NaN
    largest = HostCopy(adjusted.gather(-1, token_ids[:, None])[:, 0])
    given = HostCopy(logits if device.type == "cpu" else logits.amax(-1, keepdim=True))  # on a CPU only where needed
    random = [i for i, position in enumerate(positions) if not position.params.greedy]
    for start in range(0, len(random), ROWS_AT_ONCE):
        some = random[start : start + ROWS_AT_ONCE]
        rows = to_device(some, device)
        token_ids[rows] = sample_random(adjusted[rows], [positions[i] for i in some])
    beams = [i for i, position in enumerate(positions) if position.row.num_candidates]
    of_beams = {i: beam_candidates(logits, i, positions[i], grammar_bitmask) for i in beams}
    listed = [i for i, position in enumerate(positions) if position.params.logprobs is not None]
    of_listed: Callable[[], list[list[Logprob]]] = list
    if listed:
        rows = to_device(listed, device)
        scaled = logprob_logits(logits[rows], [positions[i].params for i in listed])
        of_listed = logprobs(scaled, token_ids[rows], [positions[i].params.logprobs or 0 for i in listed])
    raw = {i: HostCopy(logits[i]) for i, position in enumerate(positions) if position.params.return_generation_logits}
    sampled = HostCopy(token_ids)

    def finish() -> list[SampledTokens]:
        by_row = dict(zip(listed, of_listed(), strict=True))

        def result(i: int, token_id: int, largest: float) -> SampledTokens:
            if not math.isfinite(largest):
                excluded = largest == EXCLUDED and bool(given.get()[i].amax().isfinite())
                if not (excluded and i in of_beams):  # a beam without candidates ends; the other beams go on
                    return SampledTokens([], failure=NOTHING_ALLOWED if excluded else NON_FINITE_LOGITS)
            if i in of_beams:
                return SampledTokens([], candidates=of_beams[i]())
            logits_bytes = [raw[i].get().numpy().tobytes()] if i in raw else None
            return SampledTokens([token_id], [by_row[i]] if i in by_row else None, logits_bytes)

        columns = zip(sampled.get().tolist(), largest.get().tolist(), strict=True)
        return [result(i, *each) for i, each in enumerate(columns)]

    return PendingSamples(token_ids, finish)


def beam_candidates(
    logits: Tensor, index: int, position: Position, grammar_bitmask: np.ndarray | None
) -> Callable[[], Candidates]:
    """The ``num_candidates`` likeliest next tokens of a beam. As in transformers, it is their log probabilities that
    are adjusted, and not the logits.

    Args:
        logits, grammar_bitmask: as in ``sample``.
        index: of the beam's position.

    Returns:
        A function that waits for the device, and returns them.
    """
    own = None if grammar_bitmask is None else grammar_bitmask[index : index + 1]
    table = process_logits(logits[index : index + 1].log_softmax(-1), [position], own)[0]
    values, ids = (HostCopy(each) for each in table.topk(min(position.row.num_candidates, len(table))))

    def finish() -> Candidates:
        possible = values.get() > EXCLUDED
        return Candidates(ids.get()[possible].numpy(), values.get()[possible].numpy())

    return finish


# --- Logits processors ------------------------------------------------------------------------------------------------


def process_logits(logits: Tensor, positions: Sequence[Position], grammar_bitmask: np.ndarray | None = None) -> Tensor:
    """Logits after grammar bitmask, penalties, biases and excluded tokens; temperature and truncation come later.

    Args:
        logits, positions, grammar_bitmask: as in ``sample``.

    Returns:
        ``[positions, vocabulary]``: ``logits`` itself where nothing is adjusted, else a copy.
    """
    adjusted = logits
    for i, position in enumerate(positions):
        for needed, apply in LOGITS_PROCESSORS:
            if needed(position.params):
                if adjusted is logits:
                    adjusted = logits.clone()
                apply(adjusted[i], position)
        if grammar_bitmask is not None and not (grammar_bitmask[i] == -1).all():
            if adjusted is logits:
                adjusted = logits.clone()
            packed = grammar_bitmask[i].view(np.uint8)
            is_allowed = np.unpackbits(packed, count=logits.shape[1], bitorder="little")
            adjusted[i].masked_fill_(to_device(is_allowed == 0, logits.device), EXCLUDED)
    return adjusted


def _allowed_token_ids(row: Tensor, position: Position) -> None:
    allowed = _index(position.params.allowed_token_ids or (), row)
    kept = row[allowed]
    row.fill_(EXCLUDED)
    row[allowed] = kept


def _bad_words(row: Tensor, position: Position) -> None:
    """Exclude the last token of each bad word whose other tokens were just generated."""

    def has_begun(beginning: list[int]) -> bool:
        end = position.row.tokens[position.length - len(beginning) : position.length]
        return position.num_output_tokens >= len(beginning) and end.tolist() == beginning

    last_ids = [last for *beginning, last in position.params.bad_word_ids if has_begun(beginning)]
    row.index_fill_(0, _index(last_ids, row), EXCLUDED)


def _min_tokens(row: Tensor, position: Position) -> None:
    if position.num_output_tokens < position.params.min_tokens:
        stop_token_ids = [token for token in position.row.stop_token_ids if token < len(row)]
        row.index_fill_(0, _index(stop_token_ids, row), EXCLUDED)


def _logit_bias(row: Tensor, position: Position) -> None:
    biases = position.params.logit_bias
    row[_index(biases, row)] += to_device(list(biases.values()), row.device)


def _repetition(row: Tensor, position: Position) -> None:
    """The repetition penalty of Keskar et al., 2019: logits of tokens in prompt and output are divided by it where they
    are positive, and multiplied where they are negative."""
    seen = _index(position.counts.token_ids, row)
    penalty, logits = position.params.repetition_penalty, row[seen]
    row[seen] = torch.where(logits > 0, logits / penalty, logits * penalty)


def _frequency_and_presence(row: Tensor, position: Position) -> None:
    """OpenAI's frequency and presence penalties, over the output."""
    params, counts = position.params, position.counts
    seen, times = _index(counts.output_ids, row), to_device(counts.output_counts, row.device)
    row[seen] -= params.frequency_penalty * times + params.presence_penalty


def _index(token_ids: Iterable[int] | np.ndarray, row: Tensor) -> Tensor:
    """An index of a row's logits, on its device."""
    ids = token_ids if isinstance(token_ids, np.ndarray) else np.fromiter(token_ids, np.int64)
    return to_device(ids, row.device)


LogitsProcessor = tuple[Callable[[SamplingParams], bool], Callable[[Tensor, Position], None]]
LOGITS_PROCESSORS: tuple[LogitsProcessor, ...] = (
    (lambda p: p.allowed_token_ids is not None, _allowed_token_ids),
    (lambda p: bool(p.bad_word_ids), _bad_words),
    (lambda p: p.min_tokens > 0, _min_tokens),
    (lambda p: bool(p.logit_bias), _logit_bias),
    (lambda p: p.repetition_penalty != 1, _repetition),
    (lambda p: p.frequency_penalty != 0 or p.presence_penalty != 0, _frequency_and_presence),
)
"""The logits processors in the order in which they are applied: each is a predicate whether the sampling parameters
need it, and a function that changes a row of logits in place."""


# --- Random sampling --------------------------------------------------------------------------------------------------


def sample_random(logits: Tensor, positions: Sequence[Position]) -> Tensor:
    """Sample with temperature, min-p, top-k and top-p.

    A random number is mapped to a token by the inverse of the cumulative distribution in the order of token ids, summed
    in float64.

    Args:
        logits: ``[positions, vocabulary]`` float32, adjusted.

    Returns:
        Token ids, ``[positions]`` int64; undefined where no token is allowed, or a logit is not finite.
    """
    params = [position.params for position in positions]
    column = torch.tensor([p.temperature for p in params], device=logits.device)[:, None]
    scaled = logits / column.clamp(min=1e-5)
    weights = (scaled - scaled.amax(-1, keepdim=True)).exp()
    if any(p.min_p > 0 for p in params):
        weights.masked_fill_(weights < torch.tensor([p.min_p for p in params], device=logits.device)[:, None], 0)
    valid = weights.sum(-1).isfinite().tolist()  # False where no token is allowed, or a logit is NaN or infinite
    for i, p in enumerate(params):
        if not valid[i]:
            continue
        if 0 < p.top_k < logits.shape[-1]:
            _truncate(weights[i], torch.ones_like(weights[i], dtype=torch.float64), p.top_k)
        if p.top_p < 1:
            mass = weights[i].double()
            _truncate(weights[i], mass, p.top_p * mass.sum().item())
    cumulative = weights.double().cumsum(-1)
    random = uniform(
        np.array([row.seed & (2**64 - 1) for row, *_ in positions], np.uint64),
        np.array([length for _, length, *_ in positions], np.uint32),
        np.array([row.index for row, *_ in positions], np.uint32),
    )
    thresholds = torch.from_numpy(random).to(logits.device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, thresholds, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)


def _truncate(weights: Tensor, amounts: Tensor, limit: float) -> None:
    """Truncate a distribution in place: keep the likeliest tokens until their ``amounts`` reach ``limit``, and set the
    weights of the others to 0. Of equal weights, that of the lower token id comes first.

    Only a part is sorted: tokens are counted into bins by the leading bits of their weights, and those of the bin in
    which the limit is reached are sorted.

    Args:
        weights: ``[vocabulary]`` float32, none negative.
        amounts: ``[vocabulary]`` float64: ones for top-k, the weights for top-p.
    """
    bins = weights.view(torch.int32) >> BIN_SHIFT  # floats that are not negative sort as their bits do
    held = torch.bincount(bins, amounts).cumsum(0)
    above = held[-1] - held
    edge = int((above < limit).nonzero()[0])
    members = (bins == edge).nonzero()[:, 0]
    members = members[weights[members].argsort(descending=True, stable=True)]
    own = amounts[members]
    before = above[edge] + own.cumsum(0) - own
    weights[members[before >= limit]] = 0
    weights.masked_fill_(bins < edge, 0)


# --- Log probabilities ------------------------------------------------------------------------------------------------


def logprob_logits(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Logits whose log probabilities are returned: the model's own, divided by the temperature with
    ``temp_scaled_logprobs``, truncated with ``top_p_normalized_logprobs`` (FastDeploy's options).

    Args:
        logits: ``[rows, vocabulary]`` float32, overwritten.

    Returns:
        ``logits``.
    """
    for row, p in zip(logits, params, strict=True):
        if p.temp_scaled_logprobs and not p.greedy:
            row /= p.temperature
        if p.top_p_normalized_logprobs and p.top_p < 1:
            weights = row.softmax(-1)
            mass = weights.double()
            _truncate(weights, mass, p.top_p * mass.sum().item())
            row.copy_(weights.log())
    return logits


def logprobs(logits: Tensor, token_ids: Tensor, counts: Sequence[int]) -> Callable[[], list[list[Logprob]]]:
    """Log probabilities of sampled tokens and their alternatives.

    Args:
        logits: ``[rows, vocabulary]`` float32.
        token_ids: ``[rows]`` int64, the sampled tokens.
        counts: number of likeliest tokens to list for each row.

    Returns:
        A function that waits for the device, and returns for each row the sampled token, followed by the ``counts``
        likeliest.
    """
    table = logits.log_softmax(-1)
    own = table.gather(-1, token_ids[:, None])
    ranks = (table > own).sum(-1) + 1
    values, ids = table.topk(max(counts), -1) if max(counts, default=0) else (table[:, :0], table[:, :0])
    copies = [HostCopy(column) for column in (token_ids, own[:, 0], ranks, ids, values)]

    def finish() -> list[list[Logprob]]:
        rows = zip(*(copy.get().tolist() for copy in copies), counts, strict=True)
        return [
            [
                Logprob(token, value, rank),
                *(Logprob(int(t), v, at + 1) for at, (t, v) in enumerate(zip(top[:n], tv[:n], strict=True))),
            ]
            for token, value, rank, top, tv, n in rows
        ]

    return finish
