"""Compares a model over the paged KV cache with what transformers computes, when it is loaded.

A model may count positions in its own way, mix tokens in other places than its attention, or keep state beside keys
and values. The first two show in bits, so that small effects do, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.layers import BuildContext
from penstock.ops import AttentionMetadata, Batch

from ..model import Model
from .attention import NAME, UnsupportedAttention

LENGTH = 24
"""Tokens of each sequence; a block has room for them."""
CHUNK = 10
"""Tokens of the first of two steps of a sequence."""
BLOCK_SIZE = 64
SMALL_DIFFERENCE, DIFFERENCE = 1e-4, 0.15
"""Largest difference of a token's logits, relative to their spread: in float32 of any token, and of a median token
where numbers have 16 or weights and activations 8 bits, in which experts are chosen otherwise now and then."""


@torch.inference_mode()
def check(model: Model, module: Any, context: BuildContext) -> None:
    """Raise ``UnsupportedAttention`` if the model computes something else than the module.

    Args:
        module: the causal language model of transformers, which ``model`` runs.
    """
    length, vocabulary = min(LENGTH, context.max_len), model.config.vocab_size
    ids = torch.randint(0, vocabulary, (3, length), generator=torch.Generator().manual_seed(0)).to(context.device)
    pad = getattr(module.config.get_text_config(decoder=True), "pad_token_id", None)
    if isinstance(pad, int) and 0 <= pad < vocabulary:
        ids[:, length // 2] = pad  # some take it for padding
    positions = torch.arange(length, device=context.device)
    late = positions + context.max_len - length
    exact = model.dtype == torch.float32 and not context.scheme.layers.bits

    module.set_attn_implementation("eager")
    wanted = [
        module(input_ids=ids[:1], use_cache=False).logits[0],
        module(input_ids=ids[1:2], position_ids=late[None], use_cache=False).logits[0],
    ]
    moved = module(input_ids=ids[:1], position_ids=late[None], use_cache=False).logits[0]
    ignores_positions = late[0] > 0 and torch.equal(moved, wanted[0])
    numbered = module(input_ids=ids[:1], position_ids=positions[None], use_cache=False).logits[0]
    module.set_attn_implementation(NAME)
    if not torch.equal(numbered, wanted[0]):
        raise UnsupportedAttention("it does not number positions from 0 on, or takes no position_ids")

    cache = context.ops.new_kv_cache(model.kv_specs(BLOCK_SIZE), 3, context.device)

    def run(*parts: tuple[int, int, int]) -> Tensor:
        return model.forward(_batch(ids, [positions, late, positions], parts), cache)

    chunk = min(CHUNK, length - 1)
    both = run((0, 0, length), (1, 0, length))
    last, first = run((2, 0, length), (1, 0, length))[length:], run((0, 0, length), (2, 0, length))[:length]
    if not (_equal(both[length:], last, exact) and _equal(both[:length], first, exact)):
        raise UnsupportedAttention("a sequence's result depends on the sequences beside it")
    begin = run((0, 0, chunk))
    rest = run((1, 0, length), (0, chunk, length))
    for hidden, logits in zip([torch.cat([begin, rest[length:]]), rest[:length]], wanted, strict=True):
        if not (difference := _difference(model.logits(hidden), logits.float(), exact)) < _limit(exact):
            if ignores_positions:
                raise UnsupportedAttention("it takes no position_ids")
            words = f"its logits differ from those of its own forward pass by {difference:.2g} of their spread"
            raise UnsupportedAttention(f"{words}, as where it keeps more than keys and values")


def _limit(exact: bool) -> float:
    return SMALL_DIFFERENCE if exact else DIFFERENCE


def _equal(computed: Tensor, wanted: Tensor, exact: bool) -> bool:
    """Whether bits are equal, or almost: experts may compute other numbers of tokens at a time."""
    return torch.equal(computed, wanted) or _difference(computed.float(), wanted.float(), exact) < _limit(exact) / 10


def _difference(computed: Tensor, wanted: Tensor, exact: bool) -> float:
    spread = (wanted - wanted.mean(-1, keepdim=True)).norm(dim=-1).clamp_min(1e-20)
    differences = (computed - wanted).norm(dim=-1) / spread
    return float(differences.max() if exact else differences.median())


def _batch(ids: Tensor, positions: Sequence[Tensor], parts: Sequence[tuple[int, int, int]]) -> Batch:
    """A step of parts of sequences: the number of each, which is its KV block's, and its first and last token."""

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
