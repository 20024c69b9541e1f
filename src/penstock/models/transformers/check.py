"""Check of a loaded model: comparison of its results with a paged KV cache and the results of transformers.

A model may number positions differently, mix tokens outside of attention, or keep state other than keys and values.
Positions and the mixing of tokens are checked by comparing bits, which also detects small effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.layers import BuildContext
from penstock.ops import AttentionMetadata, Batch, Ops, StateBatch

from ..model import Model
from .attention import NAME, UnsupportedAttention

LENGTH = 24
"""Number of tokens per sequence; at most ``BLOCK_SIZE``."""
CHUNK = 10
"""Number of tokens in the first of two steps of a sequence."""
BLOCK_SIZE = 64
EXACT_TOLERANCE, TOLERANCE = 5e-4, 0.15
"""Maximum difference of a token's logits, relative to their spread: for every token in float32; for the median token in
16-bit or 8-bit computation, because rounding routes some tokens to other experts."""


@torch.inference_mode()
def check_paged(model: Model, module: Any, context: BuildContext, offset: int) -> None:
    """Raise ``UnsupportedAttention`` if the results of a model with paged attention and of its module differ.

    Args:
        module: causal language model of transformers that ``model`` runs.
        offset: number of the first position in transformers.
    """
    length, ids, exact = _inputs(model, module, context)
    positions = torch.arange(length, device=context.device)
    late = positions + context.max_len - length

    module.set_attn_implementation("eager")
    default = module(input_ids=ids[:1], use_cache=False).logits[0]
    numbered, moved = (
        module(input_ids=ids[:1], position_ids=each[None] + offset, use_cache=False).logits[0]
        for each in (positions, late)
    )
    expected = [
        numbered,
        module(input_ids=ids[1:2], position_ids=late[None] + offset, use_cache=False).logits[0],
    ]
    ignores_positions = late[0] > 0 and torch.equal(moved, numbered)
    module.set_attn_implementation(NAME)
    before_pad = length // 2  # with an offset, later positions do not count a token that looks like padding
    if not torch.equal(numbered[:before_pad], default[:before_pad]) or not (offset or torch.equal(numbered, default)):
        raise UnsupportedAttention("its positions do not start at 0, or it ignores position_ids")

    run = Runs(model, context.ops, ids, [positions, late, positions])
    chunk = min(CHUNK, length - 1)
    both = run((0, 0, length), (1, 0, length))
    last, first = run((2, 0, length), (1, 0, length))[length:], run((0, 0, length), (2, 0, length))[:length]
    if not (_equal(both[length:], last, exact) and _equal(both[:length], first, exact)):
        raise UnsupportedAttention("the result of a sequence depends on other sequences in the batch")
    begin = run((0, 0, chunk))
    rest = run((1, 0, length), (0, chunk, length))
    try:
        _compare(model, [torch.cat([begin, rest[length:]]), rest[:length]], expected, exact)
    except UnsupportedAttention as error:
        if ignores_positions:
            raise UnsupportedAttention("it ignores position_ids") from error
        raise


@torch.inference_mode()
def check_gathered(model: Model, module: Any, context: BuildContext) -> None:
    """Raise ``UnsupportedAttention`` if the results of a model run one sequence at a time differ from those of its
    module without a cache. One sequence is computed in three steps, the last of which has one token.

    Args:
        module: causal language model of transformers that ``model`` runs.
    """
    length, ids, exact = _inputs(model, module, context)
    expected = [module(input_ids=ids[row : row + 1], use_cache=False).logits[0] for row in range(2)]
    run = Runs(model, context.ops, ids, [torch.arange(length, device=context.device)] * len(ids))
    chunk, last = max(min(CHUNK, length - 2), 1), length - 1
    begin = run((0, 0, chunk))
    middle = run((1, 0, length), (0, chunk, last))
    end = run((0, last, length))
    _compare(model, [torch.cat([begin, middle[length:], end]), middle[:length]], expected, exact)


@torch.inference_mode()
def is_batch_invariant(model: Model, module: Any, context: BuildContext) -> bool:
    """Whether three sequences have logits with the same bits alone, in one step, in chunks among others, and token by
    token.

    Args:
        module: causal language model of transformers that ``model`` runs.
    """
    length, ids, _ = _inputs(model, module, context)
    positions = [torch.arange(length, device=context.device)] * len(ids)
    first, half, last = length // 4, length // 2, length - 1
    everything = [(row, 0, length) for row in range(len(ids))]
    alone = [model.logits(Runs(model, context.ops, ids, positions)(part)) for part in everything]
    schedules = [
        [everything],
        [[(1, 0, first)], [(0, 0, half), (1, first, last)], [(2, 0, first), (0, half, length), (1, last, length)]],
        [[(0, 0, half)], *([(0, at, at + 1), (2, at - half, at - half + 1)] for at in range(half, half + 4))],
        [[everything[2]], [everything[1], everything[0]]],
    ]
    for steps in schedules:
        run = Runs(model, context.ops, ids, positions)
        for step in steps:
            parts = [part for part in step if part[1] < part[2] <= length]
            expected = torch.cat([alone[row][begin:end] for row, begin, end in parts])
            if not torch.equal(model.logits(run(*parts)), expected):
                return False
    return True


def _inputs(model: Model, module: Any, context: BuildContext) -> tuple[int, Tensor, bool]:
    """Number of tokens per sequence, three sequences ``[3, tokens]``, and whether all tokens are compared closely."""
    length, vocabulary = min(LENGTH, context.max_len), model.config.vocab_size
    ids = torch.randint(0, vocabulary, (3, length), generator=torch.Generator().manual_seed(0)).to(context.device)
    pad = getattr(module.config.get_text_config(decoder=True), "pad_token_id", None)
    if isinstance(pad, int) and 0 <= pad < vocabulary:
        ids[:, length // 2] = pad  # detects models that treat this token as padding
    return length, ids, model.dtype == torch.float32 and not context.scheme.layers.bits


def _compare(model: Model, hidden: Sequence[Tensor], expected: Sequence[Tensor], exact: bool) -> None:
    """Raise ``UnsupportedAttention`` if logits of hidden states differ from those of transformers."""
    for computed, logits in zip(hidden, expected, strict=True):
        if not (difference := _difference(model.logits(computed), logits.float(), exact)) < _tolerance(exact):
            message = f"its logits differ from those of transformers by {difference:.2g} of their spread"
            raise UnsupportedAttention(f"{message}; it may keep state other than keys and values")


def _tolerance(exact: bool) -> float:
    return EXACT_TOLERANCE if exact else TOLERANCE


def _equal(computed: Tensor, expected: Tensor, exact: bool) -> bool:
    """Whether results are (nearly) equal: rounding may depend on the number of tokens that an expert computes."""
    if torch.equal(computed, expected):
        return True
    return _difference(computed.float(), expected.float(), exact) < _tolerance(exact) / 10


def _difference(computed: Tensor, expected: Tensor, exact: bool) -> float:
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1).clamp_min(1e-20)
    differences = (computed - expected).norm(dim=-1) / spread
    return float(differences.max() if exact else differences.median())


class Runs:
    """Steps of a few sequences with an empty KV cache.

    Args:
        ids: token ids of each sequence, ``[sequences, length]``. A sequence has at most ``BLOCK_SIZE`` tokens.
        positions: position of each token, by sequence.
    """

    def __init__(self, model: Model, ops: Ops, ids: Tensor, positions: Sequence[Tensor]) -> None:
        self._model, self._ids, self._positions = model, ids, positions
        self._cache = ops.new_kv_cache(model.kv_specs(BLOCK_SIZE), len(ids), ids.device)
        self._states = [
            {
                name: torch.zeros((len(ids), *part.shape), dtype=getattr(torch, part.dtype), device=ids.device)
                for name, part in spec.state.items()
            }
            for spec in model.state_specs()
        ]

    def __call__(self, *parts: tuple[int, int, int]) -> Tensor:
        """Hidden states of a step. ``parts``: for each sequence of the step, its index, and first and end of the tokens
        to compute."""
        batch = self._batch(parts)
        none = torch.zeros(len(parts), dtype=torch.int32)
        slots, starts = torch.tensor([row for row, *_ in parts]).int(), torch.zeros(len(parts) + 1, dtype=torch.int32)
        batch.states = StateBatch(self._states, slots, none, none, starts, none[:0], none[:0])
        return self._model.forward(batch, self._cache)

    def _batch(self, parts: Sequence[tuple[int, int, int]]) -> Batch:
        ids = self._ids

        def tensor(values: Sequence[Any]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=ids.device)

        starts = [0]
        for _, first, end in parts:
            starts.append(starts[-1] + end - first)
        slots = [torch.arange(first, end) + row * BLOCK_SIZE for row, first, end in parts]
        ends, tables = tensor([end for *_, end in parts]), tensor([[row] for row, *_ in parts])
        metadata = AttentionMetadata(tensor(starts), ends, tables)
        return Batch(
            token_ids=torch.cat([ids[row, first:end] for row, first, end in parts]),
            positions=torch.cat([self._positions[row][first:end] for row, first, end in parts]),
            slot_mapping=torch.cat(slots).to(ids.device),
            attention=metadata,
            logits_indices=torch.arange(starts[-1], device=ids.device),
            logits_attention=metadata,
        )
