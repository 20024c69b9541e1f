"""Input of a step: a flat batch of tokens, and their slots in the KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.kv_spec import TransferLayout

CPU = torch.device("cpu")
MAX_SNAPSHOTS = 3
"""Maximum number of snapshots of a sequence's state in a step."""


@dataclass(slots=True)
class AttentionMetadata:
    """Query tokens, concatenated over sequences. The queries of a sequence are its last tokens in the KV cache."""

    query_start_loc: Tensor
    """``[sequences + 1]`` int32: index of each sequence's first query; the last entry is the number of queries."""
    seq_lens: Tensor
    """``[sequences]`` int32: number of tokens of each sequence in the KV cache, including those of this step."""
    block_tables: Tensor
    """``[sequences, blocks]`` int32: KV blocks of each sequence, in order."""
    key_ends: Tensor | None = None
    """``[queries]`` int32: index after the last key to which each query attends, for models with bidirectional
    attention within an image; None: causal. Windows count from the query's position."""
    plan: Any = None
    """Data that a backend derives from these tensors in the first layer and reuses in later layers."""

    def to(self, device: torch.device) -> AttentionMetadata:
        """Copy the metadata to a device."""
        tensors = (self.query_start_loc, self.seq_lens, self.block_tables, self.key_ends)
        starts, lengths, tables, ends = (None if tensor is None else tensor.to(device) for tensor in tensors)
        assert starts is not None and lengths is not None and tables is not None
        return AttentionMetadata(starts, lengths, tables, ends)


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Attention options of a layer."""

    scale: float
    """Softmax scale: factor of the products of queries and keys."""
    window: int = 0
    """Sliding window: number of positions to which a query attends, the query's position included; 0: all."""
    softcap: float = 0.0
    """Soft cap of the scores, ``softcap * tanh(score / softcap)``; 0: off."""
    sinks: Tensor | None = None
    """``[heads]`` float32: sink logit of each head in the softmax denominator (gpt-oss); None: no sinks."""
    causal: bool = True
    """False: queries also attend to later positions: to all, or with a window to ``window - 1`` of them."""
    chunked: bool = False
    """Chunked attention (Llama 4): queries attend only within their chunk of ``window`` positions. Requires
    ``causal``."""
    alibi: Tensor | None = None
    """``[heads]`` float32: ALiBi slope of each head (Press et al., 2022): the slope times the key's position minus the
    query's is added to the scores. None: off. Requires ``causal``."""


@dataclass(frozen=True, slots=True)
class CrossAttention:
    """Cross-attention of a decoder's tokens to the output of an encoder."""

    cache: list[Any]
    """KV cache of the encoder's hidden states, by layer."""
    attention: AttentionMetadata
    """Metadata of the encoder's tokens by sequence. Queries attend to all tokens of their sequence."""
    recorded_layers: frozenset[int] = frozenset()
    """Layers that store their queries in ``queries``."""
    queries: dict[int, Tensor] = field(default_factory=dict)
    """Queries ``[tokens, heads, head_dim]`` by layer. The forward pass sets them; valid until the next forward pass."""


@dataclass(slots=True)
class StateBatch:
    """Recurrent states of the sequences of a step.

    A sequence's state has a *slot*, as wide as all layers' states. An op reads the state before the step's first token,
    after it has applied the inputs of accepted drafts to it, and writes the state after the last token that is no
    draft. Draft tokens are computed, too, and their inputs are kept for the next step.
    """

    cache: list[dict[str, Tensor]]
    """By state layer of this pipeline stage: the parts of all slots' states, ``[slots, ...]``, and the kept inputs,
    ``[slots, drafts, ...]``, by the names of ``StateSpec``."""
    slots: Tensor
    """``[sequences]`` int32: slot of each sequence. With an ``ASYNCHRONOUS`` backend, -1: padding, whose tokens are not
    applied."""
    accepted: Tensor
    """``[sequences]`` int32: number of drafts of the previous step that were accepted."""
    drafts: Tensor
    """``[sequences]`` int32: number of trailing tokens of each sequence in this step that are drafts."""
    save_start_loc: Tensor
    """``[sequences + 1]`` int32: index of the first snapshot of each sequence in ``save_after`` and ``save_slots``."""
    save_after: Tensor
    """``[snapshots]`` int32: number of the sequence's tokens in this step after which its state is copied; ascending
    for each sequence."""
    save_slots: Tensor
    """``[snapshots]`` int32: slot to which the state is copied."""


@dataclass(slots=True)
class Batch:
    """The tokens of one step, concatenated over sequences, without padding."""

    token_ids: Tensor
    """``[tokens]`` int64. With an ``ASYNCHRONOUS`` backend, ``-1 - i`` refers to ``CaptureOptions.sampled[i]`` at the
    time when the step is computed."""
    positions: Tensor
    """``[tokens]`` int64: position of each token in its sequence."""
    slot_mapping: Tensor
    """``[tokens]`` int64: slot of each token's key and value in the KV cache, ``block * block_size + offset``."""
    attention: AttentionMetadata
    """Attention metadata of all tokens."""
    logits_indices: Tensor
    """``[rows]`` int64: indices of the tokens whose hidden states are returned."""
    logits_attention: AttentionMetadata
    """Attention metadata of the tokens in ``logits_indices``."""
    lora_slots: Tensor | None = None
    """``[tokens]`` int32: LoRA slot of each token, -1 without an adapter; None if no token has an adapter."""
    logits_lora_slots: Tensor | None = None
    """``[rows]`` int32: ``lora_slots`` of the tokens in ``logits_indices``."""
    hidden_states: Tensor | None = None
    """``[tokens, hidden]``: residual stream from the previous pipeline stage, which may be overwritten; None in the
    first stage."""
    export_places: Tensor | None = None
    """``[tokens]`` int64: position in the transfer buffer for each token's keys and values, ``slot * slot_tokens +
    index``; -1: not exported. None: no token is exported."""
    export_step: int = 0
    """Step number for ``LayerExport.progress``, if tokens are exported."""
    slot_copies: tuple[Tensor, Tensor] | None = None
    """Sources and targets of ``ops.copy_slots``, called in each layer after its keys and values are stored: paths of a
    token tree share tokens, and each path has a copy in its blocks. None: no sequence has a tree."""
    cross_attention: CrossAttention | None = None
    """Cross-attention input of encoder-decoder models."""
    states: StateBatch | None = None
    """States of the sequences; None for models without recurrent layers. The numbers are in host memory until the
    forward pass; the cache is on the device."""
    selection: AttentionMetadata | None = None
    """Keys of sparse attention (``ops.select_keys``) of the last layer with an indexer, which later layers may reuse.
    Layers set it; valid until the next forward pass."""
    aux_hidden_states: tuple[Tensor, ...] = ()
    """Residual stream ``[tokens, hidden]`` before each of the model's ``aux_hidden_state_layers``. The forward pass
    sets them; valid until the next forward pass."""

    def to(self, device: torch.device) -> Batch:
        """Copy the batch to a device, except ``export_places``."""
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
    """Norm weight of queries, ``[head_dim]``."""
    k_weight: Tensor
    """Norm weight of keys, ``[head_dim]``."""
    eps: float
    """Value added to the mean square."""


@dataclass(frozen=True, slots=True)
class LayerExport:
    """Export of one layer's new keys and values to a transfer buffer during a step (``Batch.export_places``)."""

    buffer: Tensor
    """Transfer buffer, ``[bytes]`` uint8."""
    layout: TransferLayout
    """Layout of the layer in the buffer."""
    progress: Tensor
    """``[1]`` int64, written only by this rank: ``export_step << PROGRESS_BITS`` plus the number of layers that the
    step has exported. Other processes may read these layers once they have read this number."""


ForwardFn = Callable[[Batch], Tensor]
"""A forward pass without the language model head. Returns hidden states of ``Batch.logits_indices``,
``[rows, hidden]``."""


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """Options of ``Ops.capture``: sizes and contents of the batches of a captured forward pass."""

    max_tokens: int
    """Largest number of tokens of a batch."""
    max_sequences: int
    """Largest number of sequences of a batch."""
    max_blocks: int
    """Largest number of KV blocks of a sequence."""
    use_lora: bool = False
    """Batches have ``lora_slots``."""
    hidden_states: Tensor | None = None
    """Memory for ``Batch.hidden_states``, ``[max_tokens, hidden]``; None for batches without hidden states."""
    device: torch.device = CPU
    """Device of the forward pass."""
    graph_sizes: Sequence[int] = ()
    """Numbers of sequences for which CUDA graphs are captured."""
    sampled: Tensor | None = None
    """Tokens sampled by the previous step, int64 on the device. ``Batch.token_ids`` may refer to these tokens if the
    backend is ``ASYNCHRONOUS``."""
    state_cache: list[dict[str, Tensor]] | None = None
    """``StateBatch.cache`` of the batches; None for batches without states."""
    key_ends: bool = False
    """Batches have ``AttentionMetadata.key_ends``; only on CPUs."""
