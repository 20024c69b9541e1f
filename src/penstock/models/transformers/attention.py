"""Paged attention behind the attention interface of transformers.

Transformers calls a registered function for each attention, with queries, keys and values, and another for each mask.
Ours store keys and values in the KV cache and attend over it; masks are described by what they let a query see, and
never made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from penstock.ops import AttentionOptions, Batch, Ops

NAME = "penstock"
"""Of the attention implementation."""
HARMLESS = frozenset(("cache_position", "dropout", "is_causal", "position_ids", "training", "use_cache"))
"""Arguments of attention functions that do not change what ours computes."""
HEAD_MULTIPLE = 16
"""Heads are padded with zeros to a multiple of this, as the CPU kernels want them."""
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Takes indices of batch, head, query and key, and says which pairs are visible."""


class UnsupportedAttention(Exception):
    """A model does what our attention does not compute; the message says what."""


@dataclass(frozen=True)
class CausalMask:
    """In place of a mask: a query sees its own sequence up to itself. Arithmetic with it fails, so that a model that
    adds a bias of its own to a mask is found out."""

    window: int | None
    """Positions that a query sees, its own included; 0 is all. None if it sees others, too, or not all of these."""


@dataclass(frozen=True)
class AttentionCall:
    """One attention of a forward pass."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int
    softcap: float
    """Scaled products become ``softcap * tanh(product / softcap)``; 0 leaves them."""

    @property
    def head_dim(self) -> int:
        """Size of a vector in the KV cache."""
        return -(-max(self.key_dim, self.value_dim) // HEAD_MULTIPLE) * HEAD_MULTIPLE


class Attentions(Protocol):
    """The attentions of one forward pass, called in their order."""

    def mask(self, visible: MaskFunction) -> CausalMask: ...
    def attend(
        self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """``[tokens, heads, key_dim]``, ``[tokens, kv_heads, key_dim]``, ``[tokens, kv_heads, value_dim]`` to
        ``[tokens, heads, value_dim]``. Scale and sinks as of ``ops.attention``."""
        ...


class RecordedAttentions:
    """Notes the attentions and masks of a forward pass, whose result is meaningless.

    Args:
        max_len: positions over which masks are looked at.
    """

    def __init__(self, max_len: int) -> None:
        self._positions = torch.arange(max_len)
        self.calls: list[AttentionCall] = []
        self.masks: list[CausalMask] = []

    def mask(self, visible: MaskFunction) -> CausalMask:
        self.masks.append(CausalMask(window_of(visible, len(self._positions))))
        return self.masks[-1]

    def attend(
        self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, scale: float, sinks: Tensor | None
    ) -> Tensor:
        self.calls.append(call)
        return q.new_zeros(q.shape[0], call.num_heads, call.value_dim)


class PagedAttentions:
    """The attentions of a step over the KV cache.

    Args:
        calls, masks: of ``RecordedAttentions``, which this pass has to make again.
        cache: one entry for each of the calls.
    """

    def __init__(
        self, ops: Ops, calls: Sequence[AttentionCall], masks: Sequence[CausalMask], batch: Batch, cache: Sequence[Any]
    ) -> None:
        self._ops = ops
        self._calls = iter(zip(calls, cache, strict=True))
        self._masks = iter(masks)
        self._batch = batch

    def mask(self, visible: MaskFunction) -> CausalMask:
        if mask := next(self._masks, None):
            return mask
        raise UnsupportedAttention("it makes other masks in some steps than in others")

    def attend(
        self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, scale: float, sinks: Tensor | None
    ) -> Tensor:
        recorded, cache = next(self._calls, (None, None))
        if recorded != call:
            raise UnsupportedAttention("it has other attentions in some steps than in others")
        q, k, v = (_padded(x, call.head_dim) for x in (q, k, v))
        self._ops.store_kv(cache, k, v, self._batch.slot_mapping)
        metadata = self._batch.attention
        out = self._ops.attention(q, cache, metadata, AttentionOptions(scale, call.window, call.softcap, sinks))
        return out.view(*q.shape)[..., : call.value_dim]

    def finish(self) -> None:
        """Raise ``UnsupportedAttention`` if the pass left out attentions, whose keys and values are now missing."""
        if next(self._calls, None) is not None:
            raise UnsupportedAttention("it has fewer attentions in some steps than in others")


def _padded(x: Tensor, head_dim: int) -> Tensor:
    return pad(x, (0, head_dim - x.shape[-1])).contiguous()


_current: ContextVar[Attentions] = ContextVar("attentions")


@contextmanager
def attending(attentions: Attentions) -> Iterator[None]:
    """Have the attentions of models in this context, whose implementation is ``NAME``, computed by these."""
    token = _current.set(attentions)
    try:
        yield
    finally:
        _current.reset(token)


def register() -> None:
    """Make ``NAME`` known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, mask_function)


def mask_function(*, mask_function: MaskFunction, **rest: Any) -> CausalMask:
    """A mask function of transformers. Padding (``attention_mask``) does not occur."""
    return _current.get().mask(mask_function)


def attention_function(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: ``[1, heads, tokens, head_dim]`` to ``[1, tokens, heads, head_dim]``.

    Raises ``UnsupportedAttention`` for what the kernels do not compute.
    """
    if key.shape[-2] != query.shape[-2] or value.shape[-2] != query.shape[-2]:
        raise UnsupportedAttention("its attention is not over the tokens of the sequence alone (cross attention)")
    if isinstance(attention_mask, Tensor):
        raise UnsupportedAttention("its attention adds a mask or position bias of its own")
    if not isinstance(attention_mask, CausalMask):
        raise UnsupportedAttention("its attention has no causal mask")
    if (window := attention_mask.window) is None:
        raise UnsupportedAttention("its attention is neither causal nor causal with a sliding window")
    _check_options(options, window)
    if query.dim() != 4 or query.shape[0] != 1 or query.shape[1] % key.shape[1]:
        raise UnsupportedAttention(f"its attention has queries of the shape {tuple(query.shape)}")
    call = AttentionCall(query.shape[1], key.shape[1], query.shape[-1], value.shape[-1], window, softcap or 0.0)
    scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if (sinks := s_aux if sinks is None else sinks) is not None:
        sinks = sinks.detach().float().flatten()
        if len(sinks) != query.shape[1]:
            raise UnsupportedAttention("its attention has other sinks than one a head")
    return _current.get().attend(call, q, k, v, scale, sinks)[None], None


def _check_options(options: Mapping[str, Any], window: int) -> None:
    """Raise ``UnsupportedAttention`` for arguments that attention would have to heed."""
    for name, value in options.items():
        if name == "sliding_window":
            if (value or 0) not in (0, window):
                raise UnsupportedAttention(
                    f"its attention has a sliding window of {value}, and a mask with one of {window}"
                )
        elif value is not None and value is not False and name not in HARMLESS:
            raise UnsupportedAttention(f"its attention has the argument {name}")


def window_of(visible: MaskFunction, max_len: int) -> int | None:
    """``CausalMask.window`` of a mask over ``max_len`` positions."""
    keys = torch.arange(max_len)
    first = torch.zeros(1, dtype=torch.int64)
    queries = {*range(min(64, max_len)), *torch.linspace(0, max_len - 1, 100).long().tolist()}

    def seen(query: int) -> Tensor:
        at = torch.tensor([query])
        return visible(first, first, at, keys).expand(max_len)

    count = int(seen(max_len - 1).sum())
    window = count if count < max_len else 0
    for query in queries:
        wanted = keys <= query
        if window:
            wanted &= keys > query - window
        if not torch.equal(seen(query), wanted):
            return None
    return window
