"""Paged attention for the attention interface of transformers.

transformers calls a registered attention function for each attention, with queries, keys and values, and a registered
mask function for each mask. The functions here store keys and values in the KV cache, and compute attention from it.
Masks are not materialized; only their sliding window is determined.
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

from penstock.checkpoint.model_config import padded_head_dim
from penstock.core import PenstockError
from penstock.ops import AttentionOptions, Batch, Ops
from penstock.parallel import SINGLE_RANK, Group, Shard, shard_heads

from .ranks import gather

NAME = "penstock"
"""Name of the attention implementation in transformers."""
IGNORED_ARGUMENTS = frozenset(("cache_position", "dropout", "is_causal", "position_ids", "training", "use_cache"))
"""Arguments of attention functions that have no effect on the result of paged attention."""
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Function of the indices of batch, head, query and key. True: the query attends to the key."""


class UnsupportedAttention(Exception):
    """Raised if a model needs a feature that paged attention does not support. The message names the feature."""


class InconsistentWindows(UnsupportedAttention):
    """Raised if transformers computes other results with its KV cache than without: neither can be the reference."""


@dataclass(frozen=True)
class CausalMask:
    """Placeholder for a causal mask. Arithmetic with it fails, so models that add a bias to the mask are detected."""

    window: int | None
    """Sliding window: number of positions that a query sees, including its own; 0: all. None: another kind of mask."""


@dataclass(frozen=True)
class AttentionCall:
    """Parameters of one attention in a forward pass."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int
    softcap: float
    """Soft cap of the attention scores, ``cap * tanh(score / cap)``; 0: off."""

    @property
    def head_dim(self) -> int:
        """Elements per vector in the KV cache."""
        return padded_head_dim(max(self.key_dim, self.value_dim))


@dataclass(frozen=True)
class RankHeads:
    """Heads of an attention that this rank computes."""

    group: Group
    """The ranks that share the heads; a single rank if every rank has all heads."""
    queries: Shard
    keys: Shard
    """Key and value heads, which this rank stores."""

    @classmethod
    def of(cls, group: Group, call: AttentionCall) -> RankHeads:
        """Split the heads of an attention among ranks. Every rank has all heads if they cannot be divided."""
        if call.num_heads % call.num_kv_heads == 0:
            try:
                return cls(group, *shard_heads(group, call.num_heads, call.num_kv_heads))
            except PenstockError:  # heads do not divide evenly
                pass
        return cls(SINGLE_RANK, *(Shard(0, heads, heads) for heads in (call.num_heads, call.num_kv_heads)))


class Attentions(Protocol):
    """Implementation of the attentions in one forward pass, called in order."""

    def mask(self, visible: MaskFunction) -> CausalMask: ...
    def attend(
        self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """Compute attention. Returns ``[tokens, heads, value_dim]``.

        Args:
            q, k, v: ``[tokens, heads, key_dim]``, ``[tokens, kv_heads, key_dim]``, ``[tokens, kv_heads, value_dim]``.
            scale, sinks: see ``AttentionOptions``.
        """
        ...


class RecordedAttentions:
    """``Attentions`` that record the calls and masks of a forward pass. The result of the pass must not be used.

    Args:
        max_len: number of positions for which masks are checked.
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
    """``Attentions`` of a step, computed with the KV cache.

    Args:
        calls, masks: recorded by ``RecordedAttentions``. Every forward pass must make the same calls and masks.
        heads: heads of this rank in each call.
        cache: KV cache of each call.
    """

    def __init__(
        self,
        ops: Ops,
        calls: Sequence[AttentionCall],
        heads: Sequence[RankHeads],
        masks: Sequence[CausalMask],
        batch: Batch,
        cache: Sequence[Any],
    ) -> None:
        self._ops = ops
        self._calls = iter(zip(calls, heads, cache, strict=True))
        self._masks = iter(masks)
        self._batch = batch

    def mask(self, visible: MaskFunction) -> CausalMask:
        if mask := next(self._masks, None):
            return mask
        raise UnsupportedAttention("the number of its masks differs between steps")

    def attend(
        self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, scale: float, sinks: Tensor | None
    ) -> Tensor:
        recorded, heads, cache = next(self._calls, (None, None, None))
        if recorded != call or heads is None:
            raise UnsupportedAttention(f"its attentions differ between steps ({call} instead of {recorded})")
        queries, keys = heads.queries, heads.keys
        q = _padded(q[:, queries.first : queries.end], call.head_dim)
        k, v = (_padded(x[:, keys.first : keys.end], call.head_dim) for x in (k, v))
        self._ops.store_kv(cache, k, v, self._batch.slot_mapping)
        sinks = None if sinks is None else sinks[queries.first : queries.end].contiguous()
        options = AttentionOptions(scale, call.window, call.softcap, sinks)

        def attend(out: Tensor | None) -> Tensor:
            return self._ops.attention(q, cache, self._batch.attention, options, out)

        attended = gather(heads.group, attend, q.shape[0], queries * call.head_dim, q.dtype)
        return attended.view(q.shape[0], call.num_heads, call.head_dim)[..., : call.value_dim]

    def finish(self) -> None:
        """Raise ``UnsupportedAttention`` if the pass skipped attentions: their keys and values are missing."""
        if next(self._calls, None) is not None:
            raise UnsupportedAttention("the number of its attentions differs between steps")


def _padded(x: Tensor, head_dim: int) -> Tensor:
    return pad(x, (0, head_dim - x.shape[-1])).contiguous()


_current: ContextVar[Attentions] = ContextVar("attentions")


@contextmanager
def attending(attentions: Attentions) -> Iterator[None]:
    """Context manager in which models with the attention implementation ``NAME`` use ``attentions``."""
    token = _current.set(attentions)
    try:
        yield
    finally:
        _current.reset(token)


def register() -> None:
    """Register the attention implementation ``NAME`` with transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, mask_function)


def mask_function(*, mask_function: MaskFunction, **rest: Any) -> CausalMask:
    """Mask function for transformers. ``attention_mask`` is ignored, because inputs have no padding."""
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
    """Attention function for transformers: ``[1, heads, tokens, head_dim]`` to ``[1, tokens, heads, head_dim]``.

    Raises ``UnsupportedAttention`` for features that the kernels do not support.
    """
    if key.shape[-2] != query.shape[-2] or value.shape[-2] != query.shape[-2]:
        message = f"{query.shape[-2]} queries and {key.shape[-2]} keys"
        raise UnsupportedAttention(f"its attention also reads keys of other inputs ({message}: cross-attention)")
    if isinstance(attention_mask, Tensor):
        raise UnsupportedAttention("its attention adds a custom mask or a position bias")
    if not isinstance(attention_mask, CausalMask):
        raise UnsupportedAttention("its attention has no causal mask")
    if (window := attention_mask.window) is None:
        raise UnsupportedAttention("its attention is neither causal nor causal with a sliding window")
    _check_options(options, window)
    if query.dim() != 4 or query.shape[0] != 1 or query.shape[1] % key.shape[1]:
        message = f"{tuple(query.shape)} for keys of shape {tuple(key.shape)}"
        raise UnsupportedAttention(f"its attention has queries of shape {message}")
    call = AttentionCall(query.shape[1], key.shape[1], query.shape[-1], value.shape[-1], window, softcap or 0.0)
    scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if (sinks := s_aux if sinks is None else sinks) is not None:
        sinks = sinks.detach().float().flatten()
        if len(sinks) != query.shape[1]:
            raise UnsupportedAttention(f"its attention has {len(sinks)} sinks for {query.shape[1]} heads")
    return _current.get().attend(call, q, k, v, scale, sinks)[None], None


def _check_options(options: Mapping[str, Any], window: int) -> None:
    """Raise ``UnsupportedAttention`` for unsupported arguments."""
    for name, value in options.items():
        if name == "sliding_window":
            if (value or 0) not in (0, window):
                raise UnsupportedAttention(
                    f"its attention has a sliding window of {value}, but its mask has a window of {window}"
                )
        elif value is not None and value is not False and name not in IGNORED_ARGUMENTS:
            raise UnsupportedAttention(f"its attention has the argument {name}")


def window_of(visible: MaskFunction, max_len: int) -> int | None:
    """``CausalMask.window`` of a mask, checked for a sample of queries among ``max_len`` positions."""
    keys = torch.arange(max_len)
    first = torch.zeros(1, dtype=torch.int64)
    queries = {*range(min(64, max_len)), *torch.linspace(0, max_len - 1, 100).long().tolist()}

    def seen_by(query: int) -> Tensor:
        return visible(first, first, torch.tensor([query]), keys).expand(max_len)

    count = int(seen_by(max_len - 1).sum())
    window = count if count < max_len else 0
    for query in queries:
        expected = keys <= query
        if window:
            expected &= keys > query - window
        if not torch.equal(seen_by(query), expected):
            return None
    return window
