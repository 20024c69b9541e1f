"""The input of a step: a flat batch of tokens, and where their keys and values lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.kv_spec import TransferLayout

CPU = torch.device("cpu")


@dataclass(slots=True)
class AttentionMetadata:
    """Query tokens, sequence after sequence; each sequence's queries are its last tokens in the KV cache."""

    query_start_loc: Tensor
    """``[sequences + 1]`` int32: index of each sequence's first query, and the number of queries."""
    seq_lens: Tensor
    """``[sequences]`` int32: tokens of each sequence in the KV cache, this step's included."""
    block_tables: Tensor
    """``[sequences, blocks]`` int32: KV blocks of each sequence, in order."""
    key_ends: Tensor | None = None
    """``[queries]`` int32: index after the last key that each query sees, of models that attend in both directions
    within an image; None where each sees its own and those before. Windows count from a query's own position."""
    plan: Any = None
    """What a backend has derived of the above in the first layer, for the other layers."""

    def to(self, device: torch.device) -> AttentionMetadata:
        """The metadata on a device."""
        parts = (self.query_start_loc, self.seq_lens, self.block_tables, self.key_ends)
        starts, lengths, tables, ends = (None if each is None else each.to(device) for each in parts)
        assert starts is not None and lengths is not None and tables is not None
        return AttentionMetadata(starts, lengths, tables, ends)


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How a layer's queries attend."""

    scale: float
    """Factor of the products of queries and keys."""
    window: int = 0
    """Positions that a query sees, its own included; 0 is all."""
    softcap: float = 0.0
    """Scaled products become ``softcap * tanh(product / softcap)``; 0 leaves them."""
    sinks: Tensor | None = None
    """``[heads]`` float32, a logit of each head that takes part in the softmax and has no value; or none."""
    causal: bool = True
    """False lets a query see the positions after its own, too: all, or with a window as many as before it."""
    chunked: bool = False
    """Positions are in chunks of ``window``, and a query sees its own chunk alone; with ``causal``."""


@dataclass(frozen=True, slots=True)
class CrossAttention:
    """Attention of a decoder's tokens to what an encoder has made of the input."""

    cache: list[Any]
    """A KV cache, by layer, of the encoder's hidden states."""
    attention: AttentionMetadata
    """Where those of each sequence are. Every query sees all of them."""
    recorded_layers: frozenset[int] = frozenset()
    """Layers whose queries are kept in ``queries``."""
    queries: dict[int, Tensor] = field(default_factory=dict)
    """Filled by the forward pass: ``[tokens, heads, head_dim]`` by layer, valid until the next forward pass."""


@dataclass(slots=True)
class Batch:
    """The tokens of one step, sequence after sequence, without padding."""

    token_ids: Tensor
    """``[tokens]`` int64. For a backend that is ``ASYNCHRONOUS``, ``-1 - i`` is the token that ``sampled[i]`` (of
    ``capture``) will be when the step is computed."""
    positions: Tensor
    """``[tokens]`` int64: position of each token in its sequence."""
    slot_mapping: Tensor
    """``[tokens]`` int64: where each token's key and value are stored, ``block * block_size + offset``."""
    attention: AttentionMetadata
    """Metadata for attention of all tokens."""
    logits_indices: Tensor
    """``[rows]`` int64: indices of the tokens whose hidden states are returned."""
    logits_attention: AttentionMetadata
    """Metadata for attention of the tokens in ``logits_indices`` alone."""
    lora_slots: Tensor | None = None
    """``[tokens]`` int32: LoRA slot of each token, -1 for none; None where no token has one."""
    logits_lora_slots: Tensor | None = None
    """``[rows]`` int32: ``lora_slots`` of the tokens in ``logits_indices``."""
    hidden_states: Tensor | None = None
    """``[tokens, hidden]``: the residual stream that the pipeline stage before has computed, which may be changed; None
    in the first stage."""
    export_places: Tensor | None = None
    """``[tokens]`` int64: where in the transfer buffer each token's keys and values are copied, ``slot * slot_tokens +
    index``; -1 for none. None where no token is exported."""
    export_step: int = 0
    """Number of the step in ``LayerExport.progress``, where tokens are exported."""
    slot_copies: tuple[Tensor, Tensor] | None = None
    """Sources and targets of ``ops.copy_slots``, made in each layer once its tokens' keys and values are stored: paths
    of token trees share tokens, and each has them in its own blocks. None where no sequence has a tree."""
    cross_attention: CrossAttention | None = None
    """Of models with an encoder beside the decoder."""
    aux_hidden_states: tuple[Tensor, ...] = ()
    """Filled by the forward pass: the residual stream ``[tokens, hidden]`` before each of the model's
    ``aux_hidden_state_layers``; valid until the next forward pass."""

    def to(self, device: torch.device) -> Batch:
        """The batch on a device, but for ``export_places``."""
        attention = self.attention.to(device)

        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device)

        return replace(
            self,
            token_ids=self.token_ids.to(device),
            positions=self.positions.to(device),
            slot_mapping=self.slot_mapping.to(device),
            attention=attention,
            logits_indices=self.logits_indices.to(device),
            logits_attention=attention if self.logits_attention is self.attention else self.logits_attention.to(device),
            lora_slots=moved(self.lora_slots),
            logits_lora_slots=moved(self.logits_lora_slots),
            hidden_states=moved(self.hidden_states),
            slot_copies=self.slot_copies and (self.slot_copies[0].to(device), self.slot_copies[1].to(device)),
        )


@dataclass(frozen=True, slots=True)
class QKNorms:
    """RMS norms on the queries and keys of each head."""

    q_weight: Tensor
    """``[head_dim]``."""
    k_weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class LayerExport:
    """Where the keys and values of one layer's new tokens are copied while a step runs (``Batch.export_places``)."""

    buffer: Tensor
    """``[bytes]`` uint8, the transfer buffer."""
    layout: TransferLayout
    progress: Tensor
    """``[1]`` int64, written by this rank alone: ``export_step << PROGRESS_BITS``, plus the number of layers that the
    step has exported. Who reads a number of layers may read these layers' bytes."""


ForwardFn = Callable[[Batch], Tensor]
"""A forward pass without the language model head: hidden states of ``Batch.logits_indices``, ``[rows, hidden]``."""


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """The batches of a forward pass that is captured, and how."""

    max_tokens: int
    """Largest number of tokens of a batch."""
    max_sequences: int
    """Largest number of sequences of a batch."""
    max_blocks: int
    """Largest number of KV blocks of a sequence."""
    use_lora: bool = False
    """Batches have ``lora_slots``."""
    hidden_states: Tensor | None = None
    """``[max_tokens, hidden]``, memory for ``Batch.hidden_states``; None for batches without them."""
    device: torch.device = CPU
    """Device of the forward pass."""
    graph_sizes: Sequence[int] = ()
    """Numbers of sequences to capture CUDA graphs for."""
    sampled: Tensor | None = None
    """int64 on the device: the tokens that the step before has sampled, to which token ids of a batch may refer where
    the backend is ``ASYNCHRONOUS``."""
    key_ends: bool = False
    """Batches have ``AttentionMetadata.key_ends``; on CPUs only."""
