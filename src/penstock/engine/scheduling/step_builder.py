"""The step builder: converts a plan to the workers' message (``StepInput``)."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import numpy as np

from penstock.core import SamplingParams

from ..sequence.mrope import mrope_positions
from ..sequence.plan import Plan
from ..sequence.sequence import Sequence
from ..step import EMPTY, ImageSpan, NewRow, RowUpdates, StepInput, StoredState
from .encoder_cache import EncoderCache


class StepBuilder:
    """Builds the workers' messages from plans. A message contains only what the workers do not know yet, as recorded in
    ``Sequence.sent_blocks`` and ``Sequence.resend_from``.

    Args:
        send_sampled: send each sampled token with the step that computes it, for pipeline stages before the last one,
            which do not sample.
        encoder_cache: source of the images to encode and to drop.
    """

    def __init__(self, send_sampled: bool, encoder_cache: EncoderCache) -> None:
        self._encoder_cache = encoder_cache
        self.lora_slots = {"": -1}
        """LoRA slots by adapter (``EngineRequest.adapter``); -1 for the base model. Updated by ``LoRAManager``."""
        self._send_sampled = send_sampled
        self._beam_steps: dict[str, list[int]] = {}
        """``RowUpdates.beam_steps`` to send, by request id."""

    def add_beam_steps(self, request_id: str, beam_steps: list[int]) -> None:
        """Send ``beam_steps`` (``RowUpdates.beam_steps``) with the next step that computes a beam of this request. If
        that step fails, the request fails, so the workers never compute beams without these updates."""
        self._beam_steps[request_id] = beam_steps

    def drop_beam_steps(self, request_id: str) -> None:
        """Drop the beam steps of a request, whose beams have ended or restart in other rows."""
        self._beam_steps.pop(request_id, None)

    def build(self, plan: Plan) -> StepInput:
        """Build the message of a plan, without drafts (``add_drafts``), and record its contents as sent. Call this once
        per plan, and send the messages in the order of the calls."""
        if not plan.scheduled:
            return StepInput(self._updates(plan, (), ()), EMPTY, EMPTY, EMPTY, EMPTY.astype(bool))
        sequences, starts, lengths, sampling, *_ = zip(*plan.scheduled, strict=True)
        snapshots = [
            (number, at - item.start, snapshot)
            for number, item in enumerate(plan.scheduled)
            for at, snapshot in item.snapshots
        ]
        evicted, encoded = self._encoder_cache.take() if self._encoder_cache.is_used else ([], [])
        if self._send_sampled:
            for sequence, start, length in zip(sequences, starts, lengths, strict=True):
                if start + length > sequence.prompt_length:
                    sequence.resend_from = start if sequence.resend_from is None else min(start, sequence.resend_from)
        return StepInput(
            self._updates(plan, sequences, sampling),
            _array([sequence.row for sequence in sequences]),
            _array(starts),
            _array(lengths),
            np.frombuffer(struct.pack(f"{len(sampling)}?", *sampling), bool),
            snapshots=_array([value for each in snapshots for value in each]),
            evicted_images=evicted,
            encoded_images=encoded,
        )

    def _updates(
        self, plan: Plan, sequences: tuple[Sequence, ...], sampling: tuple[tuple[Sequence, ...], ...]
    ) -> RowUpdates:
        new: list[NewRow] = []
        tokens: list[int] = []
        tables: list[int] = []
        forks: list[int] = []
        for parent, *siblings in [group for group in sampling if len(group) > 1]:
            for sibling in siblings:
                forks += (sibling.row, parent.row, sibling.index)
                sibling.sent_blocks = len(sibling.blocks)
        for sequence in [s for s in sequences if s.sent_blocks != len(s.blocks) or s.resend_from is not None]:
            if sequence.sent_blocks < 0:
                new.append(self._new_row(sequence))
                sequence.sent_blocks, sequence.resend_from = 0, None
            if sequence.sent_blocks != len(sequence.blocks):
                _segment(tables, sequence.row, sequence.sent_blocks, sequence.blocks)
                sequence.sent_blocks = len(sequence.blocks)
            if sequence.resend_from is not None:
                _segment(tokens, sequence.row, sequence.resend_from, sequence.tokens)
                sequence.resend_from = None
        beam_steps: list[int] = []
        if self._beam_steps:
            for request_id in dict.fromkeys(sequence.request.request_id for sequence in sequences):
                beam_steps += self._beam_steps.pop(request_id, ())
        return RowUpdates(
            _pairs([(one.block, one.slot) for one in plan.stores]),
            [StoredState(one.snapshot, one.slots) for one in plan.state_stores],
            _pairs(plan.swap_out),
            _pairs(plan.state_swap_out),
            _pairs(plan.swap_in),
            _pairs(plan.copies),
            _pairs([(one.slot, one.block) for one in plan.loads]),
            _array(beam_steps),
            new,
            _array(tokens),
            _array(tables),
            _array(forks),
        )

    def _new_row(self, sequence: Sequence) -> NewRow:
        request, pooling = sequence.request, sequence.pooling_state
        sampling, images = request.sampling, request.images
        if sampling.guided_decoding or sampling.tool_calls:  # constraints reach the workers as bitmasks
            sampling = sampling.replace(guided_decoding=None, tool_calls=None)
        return NewRow(
            row=sequence.row,
            token_ids=np.array(sequence.tokens, np.int32),
            prompt_length=sequence.prompt_length,
            num_computed=sequence.num_computed,
            sampling=sampling,
            stop_token_ids=tuple(sequence.stop_token_ids),
            seed=sequence.seed,
            index=sequence.index,
            lora_slot=self.lora_slots.get(request.adapter, -1),
            num_candidates=sequence.num_candidates,
            prompt_logprobs=None if sequence.prompt_logprobs is None else sampling.prompt_logprobs or 0,
            context_logits=sequence.context_logits is not None,
            pooling="" if pooling is None else pooling.pooling_type,
            image_spans=[ImageSpan(one.content_hash, one.offset, one.end, one.bidirectional) for one in images],
            mrope_positions=mrope_positions(sequence.prompt_length, images) if images and images[0].rows else EMPTY,
            head=(request.pooling.head or "") if request.pooling else "",
            pooling_token_ids=(request.pooling.token_ids or ()) if request.pooling else (),
            second_text=request.second_text,
            audio=request.audio,
            snapshot=sequence.snapshot if sequence.num_computed else -1,
            state_slots=sequence.state_slots,
            swapped_state=sequence.swapped_state,
        )


def add_drafts(step: StepInput, plan: Plan) -> None:
    """Add the draft tokens of a plan to its message. This is separate from ``StepBuilder.build``, since the workers may
    draft the tokens after it."""
    drafts = [item.draft for item in plan.scheduled]
    if any(drafts):
        step.drafts = _array([len(draft) for draft in drafts])
        step.draft_token_ids = _array([token for draft in drafts for token in draft])
    if any([item.parents for item in plan.scheduled]):
        parents = [item.parents or range(-1, len(item.draft) - 1) for item in plan.scheduled]
        step.draft_parents = _array([parent for each in parents for parent in each])


def _segment(segments: list[int], row: int, first: int, values: list[int]) -> None:
    """Append ``values[first:]`` of a row to ``segments`` (``RowUpdates``)."""
    segments += (row, first, len(values) - first)
    segments += values[first:]


def _pairs(pairs: Iterable[tuple[int, int]]) -> np.ndarray:
    return _array([block for pair in pairs for block in pair])


def _array(values: list[int] | tuple[int, ...]) -> np.ndarray:
    """Convert ``values`` to int32; ``struct`` takes half the time of ``np.array``."""
    return np.frombuffer(struct.pack(f"{len(values)}i", *values), np.int32) if values else EMPTY


def probe_step(row: int, block: int, needs_sample: bool) -> StepInput:
    """Step of one token in an unused row, to test whether the workers can still compute.

    Args:
        row: an unused row.
        block: an unused KV block.
        needs_sample: sample a token in the step.
    """
    sampling = SamplingParams(max_tokens=1, temperature=0)
    new = NewRow(row, np.zeros(1, np.int32), 1, 0, sampling, (), 0, 0)
    updates = RowUpdates(new=[new], tables=_array([row, 0, 1, block]))
    return StepInput(updates, _array([row]), np.zeros(1, np.int32), _array([1]), np.array([needs_sample]))
