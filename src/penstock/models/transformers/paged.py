"""Models whose attentions go through the attention interface of transformers, and thus through our kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.state_spec import StateSpec
from penstock.layers import BuildContext
from penstock.ops import Batch, KVSpec

from .attention import (
    InconsistentWindows,
    PagedAttentions,
    RankHeads,
    RecordedAttentions,
    UnsupportedAttention,
    attending,
)


class PagedBody:
    """The body of a model, run for all tokens of a step at once.

    Args:
        body: module that computes hidden states.
        windows: sliding window of each layer in transformers' KV cache.
        offset: number of the first position.

    Raises ``UnsupportedAttention`` for attention that our kernels do not compute.
    """

    def __init__(
        self,
        body: Any,
        windows: Sequence[int],
        offset: int,
        context: BuildContext,
    ) -> None:
        self._ops = context.ops
        self._body = body
        self._offset = offset
        self._dtype = context.dtype
        max_len, device = context.max_len, context.device
        recorded, ids = RecordedAttentions(max_len), torch.zeros(2, dtype=torch.int64)
        with attending(recorded), torch.inference_mode():
            self._run(ids.to(device), torch.arange(2, device=device))
        if not recorded.calls:
            raise UnsupportedAttention("its attention does not use the attention interface of transformers")
        self._calls, self._masks = recorded.calls, recorded.masks
        self._heads = [RankHeads.of(context.group, call) for call in recorded.calls]
        expected = [window if window < max_len else 0 for window in windows]
        found = [call.window for call in recorded.calls]
        if found != expected if len(found) == len(expected) else not {*found} <= {*expected}:
            raise InconsistentWindows("the sliding windows of its masks differ from those of its KV cache")

    def _run(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states of token ids at their positions, ``[tokens]`` int64 each."""
        output = self._body(
            input_ids=token_ids[None],
            attention_mask=torch.ones_like(token_ids)[None],
            position_ids=positions[None] + self._offset,
            use_cache=False,
            return_dict=True,
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def kv_specs(self, block_size: int, quantization: str) -> list[KVSpec]:
        """See ``Model.kv_specs``."""
        dtype = str(self._dtype).removeprefix("torch.")
        return [
            KVSpec(heads.keys.size, call.head_dim, dtype, block_size, quantization, call.window)
            for call, heads in zip(self._calls, self._heads, strict=True)
        ]

    def state_specs(self) -> list[StateSpec]:
        """See ``Model.state_specs``."""
        return []

    def forward(self, batch: Batch, cache: Sequence[Any]) -> Tensor:
        """Hidden states of all tokens, ``[tokens, hidden]``."""
        attentions = PagedAttentions(self._ops, self._calls, self._heads, self._masks, batch, cache)
        with attending(attentions):
            hidden = self._run(batch.token_ids, batch.positions)
        attentions.finish()
        return hidden
