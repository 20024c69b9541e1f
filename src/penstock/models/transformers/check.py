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
from penstock.ops import AttentionMetadata, Batch, StateBatch

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

    cache = context.ops.new_kv_cache(model.kv_specs(BLOCK_SIZE), 3, context.device)

    def run(*parts: tuple[int, int, int]) -> Tensor:
        return model.forward(_batch(ids, [positions, late, positions], parts), cache)

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
    cache = context.ops.new_kv_cache(model.kv_specs(BLOCK_SIZE), 3, context.device)
    states = [
        {
            name: torch.zeros((3, *part.shape), dtype=getattr(torch, part.dtype), device=context.device)
            for name, part in spec.state.items()
        }
        for spec in model.state_specs()
    ]
    positions = torch.arange(length, device=context.device)

    def run(*parts: tuple[int, int, int]) -> Tensor:
        batch = _batch(ids, [positions] * 3, parts)
        none = torch.zeros(len(parts), dtype=torch.int32)
        slots, starts = torch.tensor([row for row, *_ in parts]).int(), torch.zeros(len(parts) + 1, dtype=torch.int32)
        batch.states = StateBatch(states, slots, none, none, starts, none[:0], none[:0])
        return model.forward(batch, cache)

    chunk, last = max(min(CHUNK, length - 2), 1), length - 1
    begin = run((0, 0, chunk))
    middle = run((1, 0, length), (0, chunk, last))
    end = run((0, last, length))
    _compare(model, [torch.cat([begin, middle[length:], end]), middle[:length]], expected, exact)


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


def _batch(ids: Tensor, positions: Sequence[Tensor], parts: Sequence[tuple[int, int, int]]) -> Batch:
    """The batch of a step.

    Args:
        parts: for each sequence: index (also of its KV block), and first and end of the tokens to compute.
    """

    def tensor(values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=ids.device)

    starts = [0]
    for _, first, end in parts:
        starts.append(starts[-1] + end - first)
    slots = [torch.arange(first, end) + row * BLOCK_SIZE for row, first, end in parts]
    metadata = AttentionMetadata(tensor(starts), tensor([end for *_, end in parts]), tensor([[r] for r, *_ in parts]))
    return Batch(
        token_ids=torch.cat([ids[row, first:end] for row, first, end in parts]),
        positions=torch.cat([positions[row][first:end] for row, first, end in parts]),
        slot_mapping=torch.cat(slots).to(ids.device),
        attention=metadata,
        logits_indices=torch.arange(starts[-1], device=ids.device),
        logits_attention=metadata,
    )
