"""From logits to tokens: adjust, sample, and give log probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.core import Code, Failure, Logprob, SamplingParams

from ..step import Candidates, Draw
from .philox import uniform
from .row import Position

NEVER = float("-inf")
NO_SCORES = Failure(Code.INTERNAL, "the model's scores of the next token are no finite numbers")
NOTHING_ALLOWED = Failure(Code.INVALID, "no token may come next: what is asked for leaves none")
ROWS_AT_ONCE = 4
"""Rows whose distributions are held at a time: more would leave the caches, and go back to the system when freed."""
BIN_SHIFT = 20
"""Bits of a float32 that its bin leaves away: eight bins from one power of two to the next."""


def sample(scores: Tensor, positions: Sequence[Position], allowed: Tensor | None = None) -> list[Draw]:
    """Draw the next token of each sequence.

    Every row is handled as if it were alone: what it draws depends on its scores, its tokens, its parameters and its
    seed. A row whose scores are no numbers, or of which no token is allowed, has a failure in place of a token.

    Args:
        scores: ``[sequences, vocabulary]`` float32.
        allowed: ``[sequences, vocabulary / 32]`` int32, a bit for each token that may be drawn; None is all.
    """
    adjusted = adjust(scores, positions, allowed)
    chosen = adjusted.argmax(-1)  # which of numbers and what is none takes the latter
    best = adjusted.gather(-1, chosen[:, None])[:, 0].tolist()
    random = [i for i, position in enumerate(positions) if not position.params.greedy]
    for start in range(0, len(random), ROWS_AT_ONCE):
        some = random[start : start + ROWS_AT_ONCE]
        chosen[some] = choose(adjusted[some], [positions[i] for i in some])
    token_ids = chosen.tolist()
    searching = [i for i, position in enumerate(positions) if position.row.num_candidates]
    found = dict(zip(searching, candidates(scores, searching, positions, allowed), strict=True))
    listed = [i for i, position in enumerate(positions) if position.params.logprobs is not None]
    wanted = [positions[i].params.logprobs or 0 for i in listed]
    own = told_scores(scores[listed], [positions[i].params for i in listed])
    told = dict(zip(listed, logprobs(own, chosen[listed], wanted), strict=True)) if listed else {}

    def draw(i: int, position: Position) -> Draw:
        if not math.isfinite(best[i]):
            nothing = best[i] == NEVER and bool(scores[i].amax().isfinite())
            if not (nothing and i in found):  # other beams may go on
                return Draw([], failure=NOTHING_ALLOWED if nothing else NO_SCORES)
        if i in found:
            return Draw([], candidates=found[i])
        logits = [scores[i].numpy(force=True).tobytes()] if position.params.return_generation_logits else None
        return Draw([token_ids[i]], [told[i]] if i in told else None, logits)

    return [draw(i, position) for i, position in enumerate(positions)]


def candidates(
    scores: Tensor, rows: Sequence[int], positions: Sequence[Position], allowed: Tensor | None
) -> Iterator[Candidates]:
    """What beams may go on with: of each row so many of the likeliest tokens as its search looks at, with their log
    probabilities, which are adjusted as such (and not the scores before, which is how transformers does it)."""
    for row in rows:
        own = None if allowed is None else allowed[row : row + 1]
        table = adjust(scores[row : row + 1].log_softmax(-1), [positions[row]], own)[0]
        values, ids = table.topk(min(positions[row].row.num_candidates, len(table)))
        sound = values > NEVER
        yield Candidates(ids[sound].numpy(force=True), values[sound].numpy(force=True))


# --- Adjusting --------------------------------------------------------------------------------------------------------


def adjust(scores: Tensor, positions: Sequence[Position], allowed: Tensor | None = None) -> Tensor:
    """Scores with everything applied that a request asks for besides temperature and truncation."""
    changed = scores
    for i, position in enumerate(positions):
        for needed, apply in ADJUSTMENTS:
            if needed(position.params):
                if changed is scores:
                    changed = scores.clone()
                apply(changed[i], position)
        if allowed is not None and not (allowed[i] == -1).all():
            if changed is scores:
                changed = scores.clone()
            bits = np.unpackbits(allowed[i].cpu().numpy().view(np.uint8), count=scores.shape[1], bitorder="little")
            changed[i].masked_fill_(torch.from_numpy(bits == 0).to(scores.device), NEVER)
    return changed


def _only_allowed(row: Tensor, position: Position) -> None:
    allowed = list(position.params.allowed_token_ids or ())
    kept = row[allowed]
    row.fill_(NEVER)
    row[allowed] = kept


def _no_bad_words(row: Tensor, position: Position) -> None:
    """Of each bad sequence whose beginning has just come out, the last token must not."""

    def has_begun(beginning: list[int]) -> bool:
        end = position.row.tokens[position.length - len(beginning) : position.length]
        return position.generated >= len(beginning) and end.tolist() == beginning

    row[[last for *beginning, last in position.params.bad_word_ids if has_begun(beginning)]] = NEVER


def _no_stop_yet(row: Tensor, position: Position) -> None:
    if position.generated < position.params.min_tokens:
        row[[token for token in position.row.stop_token_ids if token < len(row)]] = NEVER


def _bias(row: Tensor, position: Position) -> None:
    biases = position.params.logit_bias
    row[list(biases)] += torch.tensor(list(biases.values()), device=row.device)


def _repetition(row: Tensor, position: Position) -> None:
    """Keskar et al., 2019: over prompt and output, divided where positive, multiplied where negative."""
    seen = torch.from_numpy(position.counts.token_ids).to(row.device)
    penalty, said = position.params.repetition_penalty, row[seen]
    row[seen] = torch.where(said > 0, said / penalty, said * penalty)


def _frequency_and_presence(row: Tensor, position: Position) -> None:
    """As OpenAI defines them, over the output."""
    sampling = position.params
    found = position.counts
    seen, times = torch.from_numpy(found.output_ids).to(row.device), torch.from_numpy(found.output_times).to(row.device)
    row[seen] -= sampling.frequency_penalty * times + sampling.presence_penalty


Adjustment = tuple[Callable[[SamplingParams], bool], Callable[[Tensor, Position], None]]
ADJUSTMENTS: tuple[Adjustment, ...] = (
    (lambda p: p.allowed_token_ids is not None, _only_allowed),
    (lambda p: bool(p.bad_word_ids), _no_bad_words),
    (lambda p: p.min_tokens > 0, _no_stop_yet),
    (lambda p: bool(p.logit_bias), _bias),
    (lambda p: p.repetition_penalty != 1, _repetition),
    (lambda p: p.frequency_penalty != 0 or p.presence_penalty != 0, _frequency_and_presence),
)
"""Who needs it, and what it does to a row of scores; in this order."""


# --- Choosing ---------------------------------------------------------------------------------------------------------


def choose(scores: Tensor, positions: Sequence[Position]) -> Tensor:
    """Draw from what temperature, min-p, top-k and top-p leave, ``[rows]`` int64.

    The draw inverts the cumulative distribution in the order of token ids, summed in float64.
    """
    params = [position.params for position in positions]
    column = torch.tensor([p.temperature for p in params], device=scores.device)[:, None]
    scaled = scores / column.clamp(min=1e-5)
    weights = (scaled - scaled.amax(-1, keepdim=True)).exp()
    if any(p.min_p > 0 for p in params):
        weights.masked_fill_(weights < torch.tensor([p.min_p for p in params], device=scores.device)[:, None], 0)
    sound = weights.sum(-1).isfinite().tolist()  # not where nothing is allowed, or a score is no number
    for i, p in enumerate(params):
        if not sound[i]:
            continue
        if 0 < p.top_k < scores.shape[-1]:
            _truncate(weights[i], torch.ones_like(weights[i], dtype=torch.float64), p.top_k)
        if p.top_p < 1:
            mass = weights[i].double()
            _truncate(weights[i], mass, p.top_p * mass.sum().item())
    cumulative = weights.double().cumsum(-1)
    numbers = uniform(
        np.array([row.seed & (2**64 - 1) for row, *_ in positions], np.uint64),
        np.array([length for _, length, *_ in positions], np.uint32),
        np.array([row.index for row, *_ in positions], np.uint32),
    )
    marks = torch.from_numpy(numbers).to(scores.device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, marks, right=True).squeeze(-1).clamp(max=scores.shape[-1] - 1)


def _truncate(weights: Tensor, amounts: Tensor, limit: float) -> None:
    """Keep the likeliest of ``weights``, as long as those before them amount to less than ``limit``; zero the others.

    Among equals the lower token id counts as the likelier. The vocabulary is not sorted: tokens are sorted into bins by
    the leading bits of their weights, and only the bin in which the limit is reached is looked at more closely.
    """
    bins = weights.view(torch.int32) >> BIN_SHIFT  # floats that are not negative are in the order of their bits
    held = torch.bincount(bins, amounts).cumsum(0)
    above = held[-1] - held
    edge = int((above < limit).nonzero()[0])
    members = (bins == edge).nonzero()[:, 0]
    members = members[weights[members].argsort(descending=True, stable=True)]
    own = amounts[members]
    before = above[edge] + own.cumsum(0) - own
    weights[members[before >= limit]] = 0
    weights.masked_fill_(bins < edge, 0)


# --- Telling ----------------------------------------------------------------------------------------------------------


def told_scores(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Scores by which log probabilities are told: the model's own unless a request wants those at its temperature, or
    among what its top-p leaves (FastDeploy's ``temp_scaled_logprobs`` and ``top_p_normalized_logprobs``).

    Args:
        scores: ``[rows, vocabulary]``, which are changed.
    """
    for row, p in zip(scores, params, strict=True):
        if p.temp_scaled_logprobs and not p.greedy:
            row /= p.temperature
        if p.top_p_normalized_logprobs and p.top_p < 1:
            weights = row.softmax(-1)
            mass = weights.double()
            _truncate(weights, mass, p.top_p * mass.sum().item())
            row.copy_(weights.log())
    return scores


def logprobs(scores: Tensor, chosen: Tensor, wanted: Sequence[int]) -> list[list[Logprob]]:
    """Of each row the chosen token's log probability and the ``wanted`` likeliest, under the model's own scores."""
    table = scores.log_softmax(-1)
    own = table.gather(-1, chosen[:, None])
    ranks = (table > own).sum(-1) + 1
    values, ids = table.topk(max(wanted), -1) if max(wanted, default=0) else (table[:, :0], table[:, :0])
    rows = zip(chosen.tolist(), own[:, 0].tolist(), ranks.tolist(), ids.tolist(), values.tolist(), wanted, strict=True)
    return [
        [
            Logprob(token, value, rank),
            *(Logprob(int(t), v, at + 1) for at, (t, v) in enumerate(zip(top[:n], tv[:n], strict=True))),
        ]
        for token, value, rank, top, tv, n in rows
    ]
