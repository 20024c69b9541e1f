"""Models run one sequence at a time, with a cache object of transformers filled from the paged KV cache.

For models whose attention cannot be replaced by ``attention.py``: position biases, positions derived from the length
of the cache, own attention functions, indexers, and recurrent states. A step computes each sequence alone, as
``generate`` of transformers would continue it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import (
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from penstock.checkpoint.kv_spec import ITEM_BYTES
from penstock.checkpoint.state_spec import StateSpec, StateTensor
from penstock.ops import Batch, KVSpec, Ops

from .attention import UnsupportedAttention

VECTOR = 64
"""Elements per vector in the KV cache: the keys and values of a token are cut into vectors of this size."""
TOKENS = "tokens"
"""``StateSpec.inputs``: ids of draft tokens, which are computed again once they are accepted."""
KEYS_VALUES = ("keys", "values", "indexer_keys")
"""Attributes of a cache layer with a vector per token, ``[1, heads, tokens, dim]`` or ``[1, tokens, dim]``."""
States = Sequence[Mapping[str, Tensor]]
"""States of a sequence by layer with states, by the names of ``LayerParts.states``."""
Read = Callable[[str], Tensor]
"""Function from a name in ``KEYS_VALUES`` to that tensor of the earlier tokens."""


@dataclass(frozen=True)
class LayerParts:
    """Parts of a layer of transformers' cache."""

    tokens: Mapping[str, tuple[int, ...]]
    """Shape per token of each of ``KEYS_VALUES``: ``(heads, dim)`` or ``(dim,)``."""
    states: Mapping[str, StateTensor]
    """States of a sequence: ``conv`` and ``recurrent``, followed by their index."""
    continued: tuple[bool, ...] = ()
    """``has_previous_state`` after the first step, by index."""

    @property
    def elements(self) -> int:
        """Elements per token."""
        return sum(torch.Size(shape).numel() for shape in self.tokens.values())

    @property
    def vectors(self) -> int:
        """Vectors in each of the two halves of a token in the KV cache, which it uses as keys and values."""
        return -(-self.elements // (2 * VECTOR))

    def split(self, stored: Tensor) -> dict[str, Tensor]:
        """Split tokens, ``[tokens, elements]``, into tensors in the shapes of transformers, batch size 1."""
        sizes = [torch.Size(shape).numel() for shape in self.tokens.values()]
        parts = stored[:, : self.elements].split(sizes, -1)
        return {
            name: (part.unflatten(-1, shape).transpose(0, 1) if len(shape) == 2 else part)[None]
            for (name, shape), part in zip(self.tokens.items(), parts, strict=True)
        }

    def join(self, new: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Inverse of ``split``, as keys and values of the KV cache, ``[tokens, vectors, VECTOR]``."""
        flat = [
            (new[name][0].transpose(0, 1) if len(shape) == 2 else new[name][0]).flatten(1)
            for name, shape in self.tokens.items()
        ]
        whole = pad(torch.cat(flat, -1), (0, 2 * self.vectors * VECTOR - self.elements))
        k, v = whole.unflatten(-1, (2, self.vectors, VECTOR)).unbind(1)
        return k.contiguous(), v.contiguous()


class _EarlierTokens:
    """Mixin for layers of transformers' cache: earlier tokens are read from the paged KV cache at each use, and new
    ones are kept in ``new``. Sliding windows keep all tokens; only the masks limit them."""

    is_sliding = False

    def begin(self, read: Read, past: int) -> None:
        """Begin a step after ``past`` tokens."""
        self._read, self._past = read, past
        self.new: dict[str, Tensor] = {}

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return self._append("keys", key_states, -2), self._append("values", value_states, -2)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        return self._append("indexer_keys", indexer_key_states, 1)

    def get_seq_length(self) -> int:
        return self._past

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._past + query_length, 0

    def _append(self, name: str, new: Tensor, dim: int) -> Tensor:
        self.new[name] = new
        return torch.cat([self._read(name).to(new.dtype), new], dim) if self._past else new


class GatheredLayer(_EarlierTokens, DynamicIndexedLayer):  # type: ignore[misc]
    """Layer with keys and values, and optionally those of an indexer."""


class GatheredHybridLayer(_EarlierTokens, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """Layer with keys and values beside states."""


LAYERS = {
    DummyLayer: DummyLayer,
    DynamicLayer: GatheredLayer,
    DynamicSlidingWindowLayer: GatheredLayer,
    DynamicIndexedLayer: GatheredLayer,
    LinearAttentionLayer: LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer: GatheredHybridLayer,
    LinearAttentionAndSlidingWindowAttentionLayer: GatheredHybridLayer,
}
"""Layer of transformers' cache → layer used in its place."""


class GatheredBody:
    """The body of a model, run one sequence at a time.

    Args:
        body: module that computes hidden states.
        configuration: configuration of transformers.
        offset: number of the first position.
        dtype: dtype of the computation.

    Raises ``UnsupportedAttention`` if the model keeps something other than keys, values and states of fixed size.
    """

    def __init__(
        self, ops: Ops, body: Any, configuration: Any, offset: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._ops = ops
        self._body = body
        self._dtype = dtype
        self._device = device
        self._offset = offset
        parameters = inspect.signature(body.forward).parameters
        self._takes_positions = "position_ids" in parameters
        if "cache" not in parameters:
            raise UnsupportedAttention("its modules do not take a cache of transformers")
        self._classes, self._parts = self._record(configuration)
        self.single_tokens = False
        """Continue a state by one token at a time, for modules that ignore the state in steps with more tokens."""

    @torch.inference_mode()
    def _record(self, configuration: Any) -> tuple[list[type], list[LayerParts]]:
        """Class and parts of each layer of transformers' cache, found by runs with 2 and 3 tokens."""
        found = [self._recorded(configuration, length) for length in (2, 3)]
        if found[0] != found[1]:
            raise UnsupportedAttention("the size of its states depends on the number of tokens")
        return found[0]

    def _recorded(self, configuration: Any, length: int) -> tuple[list[type], list[LayerParts]]:
        cache, ids = _library_cache(configuration), torch.zeros(1, length, dtype=torch.int64, device=self._device)
        self._call(ids, cache, 0)
        return [_class_of(layer) for layer in cache.layers], [_parts_of(layer, length) for layer in cache.layers]

    def kv_specs(self, block_size: int, quantization: str) -> list[KVSpec]:
        """See ``Model.kv_specs``."""
        dtype = str(self._dtype).removeprefix("torch.")
        return [
            KVSpec(parts.vectors, VECTOR, dtype, block_size, quantization) for parts in self._parts if parts.elements
        ]

    def state_specs(self) -> list[StateSpec]:
        """See ``Model.state_specs``."""
        specs = [StateSpec(parts.states) for parts in self._parts if parts.states]
        if specs:
            specs[0] = StateSpec(specs[0].state, {TOKENS: StateTensor((1,), "float32")})
        return specs

    def forward(self, batch: Batch, cache: Sequence[Any]) -> Tensor:
        """Hidden states of all tokens, ``[tokens, hidden]``."""
        starts, lengths = batch.attention.query_start_loc.tolist(), batch.attention.seq_lens.tolist()
        return torch.cat(
            [
                hidden
                for number, (first, end) in enumerate(pairwise(starts))
                for hidden in self._run_sequence(batch, cache, number, range(first, end), lengths[number])
            ]
        )

    def _run_sequence(self, batch: Batch, cache: Sequence[Any], number: int, rows: range, length: int) -> list[Tensor]:
        """Run the tokens ``rows`` of a sequence. Returns hidden states of consecutive tokens."""
        table, states = batch.attention.block_tables[number], batch.states
        past = length - len(rows)

        def run(first: int, end: int, held: States) -> Tensor:
            tokens = slice(rows.start + first, rows.start + end)
            return self._run(batch.token_ids[tokens], past + first, cache, table, batch.slot_mapping[tokens], held)

        if not states or not any(parts.states for parts in self._parts):
            return [run(0, len(rows), [])]
        slot, accepted, drafts = (int(each[number]) for each in (states.slots, states.accepted, states.drafts))
        held = [{name: part[slot] for name, part in layer.items() if name != TOKENS} for layer in states.cache]
        if accepted:
            ids = states.cache[0][TOKENS][slot, :accepted, 0].long()
            self._run(ids, past - accepted, cache, table, None, held)
        hidden, at = [], 0
        for save in range(int(states.save_start_loc[number]), int(states.save_start_loc[number + 1])):
            if (end := int(states.save_after[save])) > at:
                hidden.append(run(at, end, held))
                at = end
            for layer, target in zip(held, states.cache, strict=True):
                for name, part in layer.items():
                    target[name][int(states.save_slots[save])] = part
        if (kept := len(rows) - drafts) > at:
            hidden.append(run(at, kept, held))
        if drafts:
            hidden.append(run(kept, len(rows), [{name: part.clone() for name, part in each.items()} for each in held]))
            states.cache[0][TOKENS][slot, :drafts, 0] = batch.token_ids[rows.start + kept : rows.stop].float()
        return hidden

    def _run(
        self, ids: Tensor, past: int, cache: Sequence[Any], table: Tensor, slots: Tensor | None, states: States
    ) -> Tensor:
        """Run consecutive tokens of a sequence, store their keys and values, and update the states.

        Args:
            ids: ``[tokens]`` int64.
            past: number of earlier tokens.
            table: blocks of the sequence.
            slots: slots of the tokens in the KV cache; None: not stored.
            states: the sequence's states by layer.
        """
        if self.single_tokens and past and len(ids) > 1:
            each = [None] * len(ids) if slots is None else slots.split(1)
            steps = enumerate(zip(ids.split(1), each, strict=True), past)
            return torch.cat([self._run(one, at, cache, table, to, states) for at, (one, to) in steps])
        caches, held = iter(cache), iter(states)
        layers: list[tuple[Any, LayerParts, Any, Mapping[str, Tensor]]] = []
        for kind, parts in zip(self._classes, self._parts, strict=True):
            layer = kind(number_of_states=len(parts.continued)) if parts.continued else kind()
            layer_cache = next(caches) if parts.elements else None
            layer_states = next(held) if parts.states else {}
            if isinstance(layer, _EarlierTokens):
                layer.begin(self._reader(parts, layer_cache, table, past), past)
            if past and parts.states:
                _restore(layer, parts, layer_states)
            layers.append((layer, parts, layer_cache, layer_states))
        filled = DynamicCache()
        filled.layers, filled.layer_class_to_replicate = [layer for layer, *_ in layers], None
        hidden = self._call(ids[None], filled, past)
        for layer, parts, layer_cache, layer_states in layers:
            if parts.elements and slots is not None:
                k, v = parts.join(layer.new)
                self._ops.store_kv(layer_cache, k.to(self._dtype), v.to(self._dtype), slots)
            for name, value in _states_of(layer).items():
                layer_states[name].copy_(value[0])
        return hidden

    def _reader(self, parts: LayerParts, cache: Any, table: Tensor, past: int) -> Read:
        def read(name: str) -> Tensor:
            k, v = self._ops.gather_kv(cache, table, past)
            return parts.split(torch.cat([k.flatten(1), v.flatten(1)], -1))[name]

        return read

    def _call(self, ids: Tensor, cache: Any, past: int) -> Tensor:
        mask = torch.ones(1, past + ids.shape[1], dtype=torch.int64, device=self._device)
        if past and not any(parts.elements for parts in self._parts):
            mask = mask[:, past:]  # a model without attention multiplies the mask by the new tokens
        positions = {}
        if self._takes_positions:  # Bamba counts from 0 on in every step unless it gets them
            positions["position_ids"] = (
                torch.arange(past, past + ids.shape[1], device=self._device)[None] + self._offset
            )
        output = self._body(
            input_ids=ids, attention_mask=mask, cache=cache, use_cache=True, return_dict=True, **positions
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden


def _library_cache(configuration: Any) -> Any:
    """The cache of transformers for a model: of plain layers, unless its configuration names others."""
    try:
        cache = DynamicCache(config=configuration)
    except Exception:  # transformers raises for configurations that do not describe a decoder
        return DynamicCache()
    plain = all(type(each) in (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer) for each in cache.layers)
    return DynamicCache() if plain else cache


def _class_of(layer: Any) -> type:
    found: type | None = LAYERS.get(type(layer))
    if found:
        return found
    raise UnsupportedAttention(f"it keeps state of its own kind ({type(layer).__name__})")


def _parts_of(layer: Any, length: int) -> LayerParts:
    """Parts of a layer of transformers' cache after a step with ``length`` tokens."""
    if getattr(layer, "indexer_position_ids", None) is not None:
        raise UnsupportedAttention("its indexer keeps positions of tokens")
    tokens = {}
    for name in KEYS_VALUES:
        tensor = getattr(layer, name, None)
        if tensor is None or not tensor.numel():
            continue
        if tensor.shape[0] != 1 or tensor.shape[-2] != length or tensor.dim() not in (3, 4):
            raise UnsupportedAttention(f"its cache has {name} of shape {tuple(tensor.shape)} for {length} tokens")
        tokens[name] = tuple(tensor.shape[1:-2] + tensor.shape[-1:])
    states = {}
    for name, tensor in _states_of(layer).items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.shape[0] != 1 or dtype not in ITEM_BYTES:
            raise UnsupportedAttention(f"it keeps a state of shape {tuple(tensor.shape)} and dtype {dtype}")
        states[name] = StateTensor(tuple(tensor.shape[1:]), dtype)
    return LayerParts(tokens, states, tuple(getattr(layer, "has_previous_state", {}).values()))


def _states_of(layer: Any) -> dict[str, Tensor]:
    """States of a layer, ``[1, ...]``, by the names of ``LayerParts.states``."""
    kinds = {"conv": getattr(layer, "conv_states", {}), "recurrent": getattr(layer, "recurrent_states", {})}
    return {
        f"{kind}{index}": tensor
        for kind, tensors in kinds.items()
        for index, tensor in tensors.items()
        if tensor is not None
    }


def _restore(layer: Any, parts: LayerParts, states: Mapping[str, Tensor]) -> None:
    """Set the states of a new layer."""
    for name in parts.states:
        kind = name.rstrip("0123456789")
        index = int(name.removeprefix(kind))
        values = states[name][None]
        LinearAttentionLayer.lazy_initialization(layer, **{f"{kind}_states": values, "state_idx": index})
        getattr(layer, f"{kind}_states")[index].copy_(values)
    layer.has_previous_state = dict(enumerate(parts.continued))
