"""Compressed attention (DeepSeek-AI, 2026, "DeepSeek-V4").

The KV cache is a latent cache (``KVSpec.latent``): a token's vector begins with its key, which is also its value. In
layers with compressed entries, the vector of the last token of an entry goes on with the entry, and its index key, if
any.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..batch import AttentionMetadata, AttentionOptions, Batch
from ..compressed import Compression
from .attention import attention
from .elementwise import rms_norm, rope
from .states import scan_sequences


def compress(
    x: Tensor,
    sizes: Compression,
    bias: Tensor,
    norm: Tensor,
    table: Tensor,
    cache: Tensor,
    states: Mapping[str, Tensor],
    batch: Batch,
) -> None:
    """Compute and store the entries that end with tokens of this step.

    An entry is a weighted sum of the values of ``rate`` consecutive tokens, in each channel by the softmax of the gates
    plus ``bias``; with ``overlap``, also of the tokens of the entry before, by other values and gates. It is
    normalized, and its last elements are rotated to the position of its first token.

    Args:
        x: values and gates, ``[tokens, 2 * channels]`` (``Compression.channels``). With ``overlap``, the first half of
            the values, and of the gates, is for the next entry. Tokens may be strided.
        bias: ``[rate, channels]`` float32.
        norm: weights of an RMS norm, ``[dim]`` float32.
        table: rotary table (see ``rope``).
        states: ``Compression.state``, ``[slots, span, 2 * channels]``: the last tokens, by position modulo ``span``;
            and ``Compression.inputs``, those of drafts.
    """
    dim, rate, span, channels = sizes.dim, sizes.rate, sizes.span, sizes.channels
    entries = torch.zeros(len(x), dim, device=x.device)

    def apply(state: dict[str, Tensor], inputs: dict[str, Tensor]) -> Tensor:
        ring, out = state["ring"], torch.zeros(len(inputs["x"]), dim)
        for i, (token, position) in enumerate(zip(inputs["x"], inputs["position"].tolist(), strict=True)):
            ring[position % span] = token
            if (position + 1) % rate:
                continue
            at = torch.arange(max(position + 1 - span, 0), position + 1)
            values, gates = ring[at % span].float().split(channels, -1)
            gates = gates + bias[at % rate]
            if sizes.overlap:
                previous = (at <= position - rate)[:, None]
                values, gates = (torch.where(previous, part[:, :dim], part[:, dim:]) for part in (values, gates))
            out[i] = (values * gates.softmax(0)).sum(0)
        return out

    whole = {"ring": states[sizes.state], "x": states[sizes.inputs], "position": _kept_positions(states, sizes, batch)}
    entries = scan_sequences(apply, whole, {"x": x, "position": batch.positions}, batch)
    ends = (batch.positions + 1) % rate == 0
    first = batch.positions[ends] + 1 - rate
    normed = rms_norm(entries[ends], norm, sizes.eps).to(x.dtype)[:, None]
    tail = rope(normed[..., dim - table.shape[1] :], first, table, interleaved=True)
    stored = torch.cat((normed[..., : dim - table.shape[1]], tail), -1)[:, 0]
    cache[0].flatten(0, 1)[batch.slot_mapping[ends], 0, sizes.offset : sizes.offset + dim] = stored.to(cache.dtype)


def _kept_positions(states: Mapping[str, Tensor], sizes: Compression, batch: Batch) -> Tensor:
    """Positions of the drafts in ``states``, ``[slots, drafts]``, of the accepted ones."""
    assert batch.states
    kept = states[sizes.inputs]
    positions = torch.zeros(kept.shape[:2], dtype=torch.int64)
    starts = batch.attention.query_start_loc.tolist()
    for number, (slot, accepted) in enumerate(
        zip(batch.states.slots.tolist(), batch.states.accepted.tolist(), strict=True)
    ):
        positions[slot, :accepted] = batch.positions[starts[number]] - accepted + torch.arange(accepted)
    return positions


def select_entries(
    cache: Tensor,
    metadata: AttentionMetadata,
    tokens: int,
    window: int,
    rate: int,
    top_k: int,
    q: Tensor | None = None,
    weights: Tensor | None = None,
    scale: float = 1.0,
) -> AttentionMetadata:
    """Select what queries attend to: their last ``window`` positions, then entries that end at or before the query.

    Args:
        tokens: number of queries.
        rate: number of tokens per entry; 0: no entries.
        top_k: number of entries, at most. Without ``q``, there are no more.
        q, weights, scale: arguments of ``select_keys``, which score entries; the index key of an entry is at the end of
            its vector. None: all entries are selected.

    Returns:
        Metadata of a batch with one sequence per query (see ``select_keys``). ``block_tables``, ``[tokens, window +
        top_k]``, hold slots; in layers with entries twice the slot, plus one for an entry.
    """
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    block_size, parts = cache.shape[2], 2 if rate else 1
    counts, slots = torch.zeros(tokens, dtype=torch.int32), torch.zeros((tokens, window + top_k), dtype=torch.int32)
    vectors = cache[0].flatten(0, 1)[:, 0]
    for i, length in enumerate(lengths):
        at = torch.arange(length)
        slots_of_sequence = metadata.block_tables[i].long()[at // block_size] * block_size + at % block_size
        for token in range(starts[i], starts[i + 1]):
            end = length - (starts[i + 1] - token) + 1
            chosen = slots_of_sequence[max(end - window, 0) : end] * parts
            if rate and end >= rate:
                entries = slots_of_sequence[rate - 1 : end : rate]
                if q is not None and weights is not None and len(entries) > top_k:
                    keys = vectors[entries, -q.shape[2] :].float()
                    scores = ((q[token].float() @ keys.T).relu() * (weights[token, :, None] * scale)).sum(0)
                    entries = entries[scores.sort(descending=True, stable=True).indices[:top_k].sort().values]
                chosen = torch.cat((chosen, entries * parts + 1))
            counts[token] = len(chosen)
            slots[token, : len(chosen)] = chosen
    return AttentionMetadata(torch.arange(tokens + 1, dtype=torch.int32), counts, slots)


def compressed_attention(q: Tensor, cache: Tensor, selection: AttentionMetadata, scale: float, sinks: Tensor) -> Tensor:
    """Attention of queries ``[tokens, heads, dim]`` to a result of ``select_entries``, with attention sinks (see
    ``AttentionOptions``). Keys are also the values. Returns ``[tokens, heads, dim]``."""
    dim, parts = q.shape[2], 2 if cache.shape[-1] > q.shape[2] else 1
    vectors = cache[..., : parts * dim].flatten(1, 2).unflatten(-1, (parts, dim)).squeeze(2).flatten(1, 2)
    vectors = vectors[:, :, None, None]  # blocks of one vector
    whole = attention(q, vectors.expand(2, *vectors.shape[1:]), selection, AttentionOptions(scale, sinks=sinks))
    return whole.view(q.shape)


def rotate_tail(x: Tensor, positions: Tensor, table: Tensor, inverse: bool = False) -> None:
    """Rotate the last elements of heads, ``[tokens, heads, dim]``, in place, adjacent elements against each other (see
    ``rope``).

    Args:
        inverse: rotate by the negative angle.
    """
    tail = x[..., x.shape[2] - table.shape[1] :]
    if inverse:
        cos, sin = table.chunk(2, -1)
        table = torch.cat((cos, -sin), -1)
    tail.copy_(rope(tail, positions, table, interleaved=True))
