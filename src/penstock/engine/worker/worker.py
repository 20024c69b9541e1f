"""Runs plans: one forward pass over a flat batch, and a draw for every sequence that is due one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.core import Logprob
from penstock.models import Model
from penstock.ops import KVSpec, Ops

from ..guided import Masks
from ..scheduling.plan import Draw, Item, Outcome, Plan
from ..scheduling.sequence import Sequence
from .input_batch import Flattener, context_wanted, prompt_tokens, scores_wanted
from .sampler import NO_SCORES, NOTHING_ALLOWED, logprobs, sample, wants_likeliest

ROWS_AT_ONCE = 256
"""Rows of scores held at a time where those of a whole prompt are wanted: a large vocabulary's take megabytes each."""


class Runner:
    """A model with its KV cache.

    Args:
        specs, blocks: of the KV cache.
        host_blocks: of the host tier.
        tokens: of a step, at most.
        rows: sequences that may run at the same time.
        longest: tokens a sequence may have.
        whole: whether outcomes have the hidden states of all tokens.
        slots: of adapters, by what requests are marked with; None where there are none.
    """

    def __init__(
        self,
        model: Model,
        ops: Ops,
        device: torch.device,
        *,
        specs: list[KVSpec],
        blocks: int,
        host_blocks: int,
        tokens: int,
        rows: int,
        longest: int,
        whole: bool = False,
        slots: Mapping[str, int] | None = None,
    ) -> None:
        self._model = model
        self._ops = ops
        self._device = device
        self._cache: list[Any] = ops.new_kv_cache(specs, blocks, device)
        self._host: list[Any] = ops.new_kv_cache(specs, host_blocks, torch.device("cpu"))
        self._flatten = Flattener(rows, longest, specs[0].block_size, device, whole, slots)
        self._whole = whole
        self._masks = Masks(model.config.vocab_size)
        record = partial(
            ops.capture,
            partial(model.hidden, cache=self._cache),
            max_tokens=tokens,
            max_sequences=rows,
            max_blocks=-(-longest // specs[0].block_size),
        )
        self._hidden = record()
        self._adapted = self._hidden if slots is None else record(use_lora=True)
        """A step in which tokens have adapters; others need not know of them."""

    def submit(self, plan: Plan) -> Outcome:
        """Start a step; ``collect`` has its outcome. On a CPU it is done when this returns."""
        self._ops.copy_blocks(self._cache, self._host, plan.swap_out)
        self._ops.copy_blocks(self._host, self._cache, plan.swap_in)
        self._ops.copy_blocks(self._cache, self._cache, plan.copies)
        if not plan.items:
            return Outcome([])
        masks = self._masks.begin([(sequence.guide, item.draft) for item in plan.items for sequence in item.samples])
        batch = self._flatten(plan)
        hidden = (self._hidden if batch.lora_slots is None else self._adapted)(batch)
        return self._draw(plan, hidden, masks.result() if masks else None)

    def collect(self, handle: Outcome) -> Outcome:
        return handle

    def ahead(self, number: int, items: list[Item], states: Tensor) -> tuple[Tensor, list[Draw]]:
        """What one of the model's heads guesses.

        Args:
            number: of the head.
            items: of each the tokens that come next, at the positions of those before; who draws is to draw after them.
            states: ``[tokens, hidden]``, of the tokens before.

        Returns:
            The head's own hidden state of each item's last token, ``[items, hidden]``, and the draws.
        """
        batch = self._flatten(Plan(items=items))
        layer = self._model.config.num_layers + number
        hidden = self._model.mtp_heads[number].hidden(batch, states, self._cache[layer])
        ends = [end - 1 for end in accumulate(item.length for item in items)]
        return hidden[ends], self._sample(hidden, ends, [item.samples[0] for item in items], None)

    def _draw(self, plan: Plan, hidden: Tensor, allowed: np.ndarray | None) -> Outcome:
        """Draw what is due; ``hidden`` has the rows whose scores ``flatten.scores_wanted`` says are wanted, ``allowed``
        the tokens that those who draw may choose (``Masks.begin``), where that is not all."""
        last_rows: list[int] = []
        sequences: list[Sequence] = []
        prompts: dict[int, list[list[Logprob]]] = {}
        context: dict[int, bytes] = {}
        states: dict[int, np.ndarray] = {}
        row = 0
        for i, item in enumerate(plan.items):
            if item.sequence.pooled and (wanted := scores_wanted(item)):
                end = row + self._flatten.rows_of(item)
                states[i] = hidden[end - wanted : end].to("cpu", torch.float32, copy=True).numpy()
            told = prompt_tokens(item)
            if told:
                prompts[i] = self._prompt_logprobs(hidden[row : row + len(told)], told, item.sequence)
            if count := context_wanted(item):
                context[i] = b"".join(self._logits(hidden[row : row + count]))
            row += self._flatten.rows_of(item)
            for sequence in item.samples:
                guessed = len(item.draft)
                last_rows += range(row - 1 - guessed, row)
                if guessed and wants_likeliest(sequence):  # whose next token depends on no others
                    sequences += [sequence] * (guessed + 1)
                else:
                    sequences += [sequence.ahead(item.draft[:i]) for i in range(guessed + 1)]
        draws = iter(self._sample(hidden, last_rows, sequences, allowed) if sequences else [])
        drawn = [_agreed(draws, item.draft) for item in plan.items for _ in item.samples]
        return Outcome(drawn, prompts, context, hidden if self._whole else None, states)

    def _sample(
        self, hidden: Tensor, rows: list[int], sequences: list[Sequence], allowed: np.ndarray | None
    ) -> list[Draw]:
        """Most want no more than the likeliest token, for which scores need not be kept. Who has no scores, or whose
        form allows no token, has no draw, and the others' do not depend on it."""
        plain = [wants_likeliest(sequence) for sequence in sequences]
        draws: dict[int, Draw] = {}
        if chosen := [i for i, own in enumerate(plain) if own]:
            states = hidden[[rows[i] for i in chosen]]
            sound = [True] * len(chosen)
            if not math.isfinite(states.sum(dtype=torch.float32).item()):  # one look at all of them, then at each
                sound = states.isfinite().all(-1).tolist()
            token_ids = self._model.argmax(states, self._bits(allowed, chosen)).tolist()
            for i, token, scored in zip(chosen, token_ids, sound, strict=True):
                failure = None if scored else NO_SCORES
                if allowed is not None and not allowed[i].any():
                    failure = NOTHING_ALLOWED
                draws[i] = Draw([], failure=failure) if failure else Draw([token])
        if others := [i for i, own in enumerate(plain) if not own]:
            scores = self._model.logits(hidden[[rows[i] for i in others]])
            found = sample(scores, [sequences[i] for i in others], self._bits(allowed, others))
            draws |= zip(others, found, strict=True)
        return [draws[i] for i in range(len(sequences))]

    def _bits(self, allowed: np.ndarray | None, rows: list[int]) -> Tensor | None:
        return None if allowed is None else torch.from_numpy(allowed[rows]).to(self._device)

    def _prompt_logprobs(self, hidden: Tensor, tokens: list[int], sequence: Sequence) -> list[list[Logprob]]:
        wanted = sequence.request.sampling.prompt_logprobs or 0
        told = []
        for start in range(0, len(tokens), ROWS_AT_ONCE):
            scores = self._model.logits(hidden[start : start + ROWS_AT_ONCE])
            chosen = torch.tensor(tokens[start : start + ROWS_AT_ONCE], device=scores.device)
            told += logprobs(scores, chosen, [wanted] * len(chosen))
        return told

    def _logits(self, hidden: Tensor) -> Iterator[bytes]:
        """Of rows of hidden states the scores, float32."""
        for start in range(0, len(hidden), ROWS_AT_ONCE):
            yield self._model.logits(hidden[start : start + ROWS_AT_ONCE]).numpy(force=True).tobytes()


def _agreed(draws: Iterator[Draw], draft: list[int]) -> Draw:
    """What a sequence drew for itself: as long as that is what was guessed, the draw after it counts, too."""
    if not draft:
        return next(draws)
    first, *later = [next(draws) for _ in range(1 + len(draft))]
    if first.failure:
        return first
    token_ids, told, logits = list(first.token_ids), list(first.logprobs or []), list(first.logits or [])
    for guessed, draw in zip(draft, later, strict=True):
        if token_ids[-1] != guessed or draw.failure:  # which it comes to again in the next step
            break
        token_ids += draw.token_ids
        told += draw.logprobs or []
        logits += draw.logits or []
    return Draw(token_ids, None if first.logprobs is None else told, None if first.logits is None else logits)
