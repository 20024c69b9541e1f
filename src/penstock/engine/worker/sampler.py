"""Sampling: from logits to tokens and log probabilities.

Positions with plain greedy sampling (``Position.is_plain_greedy``) are not handled here: ``ModelRunner.sample`` takes
their argmax without storing logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from penstock.core import Code, Failure, Logprob, SamplingParams
from penstock.ops import Ops, reference
from penstock.ops.sampling import truncate

from ..step import NO_TOKEN_ALLOWED, Candidates, SampledTokens
from .decoding_rules import EXCLUDED
from .host_copy import HostCopy, to_device
from .logits_processors import process_logits
from .philox import uniform
from .row import Position

NON_FINITE_LOGITS = Failure(
    Code.INTERNAL,
    "the model's logits of the next token are not finite (NaN or infinity): try dtype bfloat16, and check the weights",
)
NOTHING_ALLOWED = Failure(Code.INVALID, NO_TOKEN_ALLOWED)


class PendingSamples(NamedTuple):
    """Sampled tokens that the device may still be computing."""

    token_ids: Tensor
    """Sampled token of each position, on the device, ``[positions]`` int64. An arbitrary token of the vocabulary for a
    position of a beam, or if sampling failed."""
    result: Callable[[], list[SampledTokens]]
    """Waits for the device, and returns the result of each position."""


def sample(
    logits: Tensor, positions: Sequence[Position], grammar_bitmask: np.ndarray | None = None, ops: Ops = reference
) -> PendingSamples:
    """Sample the next token at each position.

    The result of a position depends on its logits, tokens, sampling parameters and seed, not on other positions.

    Args:
        logits: ``[positions, vocabulary]`` float32, not overwritten.
        positions: positions at which tokens are sampled.
        grammar_bitmask: ``[positions, vocabulary / 32]`` int32, with a bit set for each allowed token; None: all tokens
            are allowed.
        ops: the kernels.

    Returns:
        A token for each position, or the candidates of a beam, with logprobs and logits if the parameters request them.
        If no token is allowed or logits are not finite, the result has only the failure ``NOTHING_ALLOWED`` or
        ``NON_FINITE_LOGITS``.
    """
    device = logits.device
    adjusted = process_logits(logits, positions, grammar_bitmask, ops)
    if all([position.params.greedy for position in positions]):
        token_ids, maxima = ops.argmax_of_logits(adjusted)
    else:
        token_ids, maxima = ops.sample_random(adjusted, *to_device(random_columns(positions), device))
    largest = HostCopy(maxima)
    # The unadjusted logits are used only if ``largest`` is not finite. On a CPU, their maximum is computed only then.
    unadjusted = HostCopy(logits if device.type == "cpu" else logits.amax(-1, keepdim=True))
    beams = [i for i, position in enumerate(positions) if position.row.num_candidates]
    of_beams = {i: beam_candidates(logits, i, positions[i], grammar_bitmask, ops) for i in beams}
    listed = [i for i, position in enumerate(positions) if position.params.logprobs is not None]
    of_listed: Callable[[], list[list[Logprob]]] = list
    if listed:
        rows = to_device(listed, device)
        scaled = logprob_logits(logits[rows], [positions[i].params for i in listed])
        of_listed = logprobs(scaled, token_ids[rows], [positions[i].params.logprobs or 0 for i in listed], ops)
    raw = {i: HostCopy(logits[i]) for i, position in enumerate(positions) if position.params.return_generation_logits}
    sampled = HostCopy(token_ids)

    def finish() -> list[SampledTokens]:
        by_row = dict(zip(listed, of_listed(), strict=True))

        def result(i: int, token_id: int, largest: float) -> SampledTokens:
            if not math.isfinite(largest):
                excluded = largest == EXCLUDED and bool(unadjusted.get()[i].amax().isfinite())
                if not (excluded and i in of_beams):  # a beam without candidates is no failure: other beams continue
                    return SampledTokens([], failure=NOTHING_ALLOWED if excluded else NON_FINITE_LOGITS)
            if i in of_beams:
                return SampledTokens([], candidates=of_beams[i]())
            logits_bytes = [raw[i].get().numpy().tobytes()] if i in raw else None
            return SampledTokens([token_id], [by_row[i]] if i in by_row else None, logits_bytes)

        columns = zip(sampled.get().tolist(), largest.get().tolist(), strict=True)
        return [result(i, *each) for i, each in enumerate(columns)]

    return PendingSamples(token_ids, finish)


def beam_candidates(
    logits: Tensor, index: int, position: Position, grammar_bitmask: np.ndarray | None, ops: Ops
) -> Callable[[], Candidates]:
    """The ``num_candidates`` most likely next tokens of a beam. As in transformers, logits processors are applied to
    log probabilities, not to logits.

    Args:
        logits, grammar_bitmask, ops: see ``sample``.
        index: index of the beam's position.

    Returns:
        A function that waits for the device, and returns the candidates.
    """
    bitmask = None if grammar_bitmask is None else grammar_bitmask[index : index + 1]
    table = process_logits(ops.log_softmax(logits[index : index + 1]), [position], bitmask, ops)
    largest = ops.topk(table, min(position.row.num_candidates, table.shape[1]))
    values, ids = (HostCopy(each[0]) for each in largest)

    def finish() -> Candidates:
        possible = values.get() > EXCLUDED
        return Candidates(ids.get()[possible].numpy(), values.get()[possible].numpy())

    return finish


# --- Random sampling --------------------------------------------------------------------------------------------------


def random_columns(positions: Sequence[Position]) -> np.ndarray:
    """Arguments of ``Ops.sample_random`` other than the logits, ``[5, positions]`` float64: temperature, top-k, top-p,
    min-p and a random number."""
    params = [position.params for position in positions]
    random = uniform(
        np.array([position.row.seed & (2**64 - 1) for position in positions], np.uint64),
        np.array([position.length for position in positions], np.uint32),
        np.array([position.row.index for position in positions], np.uint32),
    )
    return np.array([*zip(*((p.temperature, p.top_k, p.top_p, p.min_p) for p in params), strict=True), random])


# --- Log probabilities ------------------------------------------------------------------------------------------------


def logprob_logits(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Prepare logits for log probabilities: divide them by the temperature with ``temp_scaled_logprobs``, and truncate
    them with ``top_p_normalized_logprobs`` (FastDeploy's options).

    Args:
        logits: ``[rows, vocabulary]`` float32, overwritten.

    Returns:
        ``logits``.
    """
    for row, p in zip(logits, params, strict=True):
        if p.temp_scaled_logprobs and not p.greedy:
            row /= p.temperature
        if p.top_p_normalized_logprobs and p.top_p < 1:
            weights = row.clone().softmax(-1)  # a clone is aligned: on a GPU, the bits of softmax depend on alignment
            mass = weights.double()
            truncate(weights, mass, p.top_p * mass.sum().item())
            row.copy_(weights.log())
    return logits


def logprobs(
    logits: Tensor, token_ids: Tensor, counts: Sequence[int], ops: Ops = reference
) -> Callable[[], list[list[Logprob]]]:
    """Log probabilities of sampled tokens and their alternatives.

    Args:
        logits: ``[rows, vocabulary]`` float32.
        token_ids: the sampled tokens, ``[rows]`` int64.
        counts: number of most likely tokens to list for each row.
        ops: the kernels.

    Returns:
        A function that waits for the device, and returns for each row the log probability of the sampled token,
        followed by those of the most likely tokens.
    """
    table = ops.log_softmax(logits)
    sampled = table.gather(-1, token_ids[:, None])
    ranks = (table > sampled).sum(-1) + 1
    values, ids = ops.topk(table, max(counts)) if max(counts, default=0) else (table[:, :0], table[:, :0])
    copies = [HostCopy(column) for column in (token_ids, sampled[:, 0], ranks, ids, values)]

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
