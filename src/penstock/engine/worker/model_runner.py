"""A model with its KV cache: a forward pass over a flat batch, and sampling from its hidden states."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.checkpoint.kv_spec import PROGRESS_BITS, bytes_per_block
from penstock.core import Logprob
from penstock.models.model import LanguageModelHead, Model
from penstock.ops import (
    AttentionMetadata,
    Batch,
    CaptureOptions,
    ForwardFn,
    KVSpec,
    LayerExport,
    Ops,
    StateBatch,
    reference,
)

from ..step import SampledTokens
from .host_copy import HostCopy, to_device
from .row import Position
from .sampler import NON_FINITE_LOGITS, NOTHING_ALLOWED, PendingSamples, logprobs, sample

TOKENS_AT_ONCE = 256
"""Number of prompt tokens for which logits are computed together. The logits of one token may take a megabyte."""


class CapturedModel(NamedTuple):
    """A model, and its forward passes captured over the KV cache of a runner; None while no cache is allocated."""

    model: Model
    forward: ForwardFn | None
    forward_lora: ForwardFn | None


class ModelRunner:
    """Runs one model over its KV cache.

    Args:
        ops: the kernels.
        specs: format of the KV cache of each layer.
        max_tokens: maximum number of tokens per step.
        max_rows: maximum number of sequences per step.
        max_len: maximum number of tokens per sequence.
        block_size: number of tokens per KV block.
        state_cache: states of the model's recurrent layers (``StateBatch.cache``), which are allocated when the forward
            pass is captured; None without such layers.
        lora: True if rows may have LoRA adapters.
        graph_sizes: numbers of sequences for which CUDA graphs are captured.
    """

    def __init__(
        self,
        model: Model,
        ops: Ops,
        device: torch.device,
        specs: list[KVSpec],
        *,
        max_tokens: int,
        max_rows: int,
        max_len: int,
        block_size: int,
        state_cache: list[dict[str, Tensor]] | None = None,
        lora: bool = False,
        graph_sizes: Sequence[int] = (),
    ) -> None:
        self._model: Model | None = model
        self.ops = ops
        self.device = device
        self._specs = specs
        self._lora = lora
        self._state_cache = state_cache
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        self._block_size = block_size
        self._max_blocks = -(-max_len // block_size)
        self._graph_sizes = graph_sizes
        self._sampled = None
        if ops.ASYNCHRONOUS:
            self._sampled = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.cache: list[Any] = []
        """KV caches of the layers with attention, by layer."""
        self._is_allocated = False
        self._export: Sequence[LayerExport] = ()
        self._host: list[Any] = []
        self._progress: Tensor | None = None
        self._forward: ForwardFn | None = None
        self._forward_lora: ForwardFn | None = None
        """Forward pass of steps with LoRA adapters."""
        self.has_expert_lora = False
        """True if an adapter targets experts, which captured forward passes do not support."""

    def init_cache(
        self,
        blocks: int,
        host_blocks: int,
        export: Sequence[LayerExport] = (),
        graph_sizes: Sequence[int] | None = None,
    ) -> None:
        """Allocate the KV cache and capture the forward pass over it.

        Args:
            blocks: number of blocks on the device.
            host_blocks: number of blocks in host memory.
            export: part of the transfer buffer for each layer of this pipeline stage, all with the same ``progress``;
                empty without KV transfers.
            graph_sizes: see ``capture``.
        """
        self.free()
        self.cache = self.ops.new_kv_cache(self._specs, blocks, self.device)
        self._host = self.ops.new_kv_cache(self._specs, host_blocks, torch.device("cpu"))
        self._is_allocated = True
        self._progress = export[0].progress if export else None
        self._export = export
        if self._model is not None:
            self.use(self.capture(self._model, graph_sizes))

    def free(self) -> None:
        """Free the KV cache and the captured forward passes."""
        self.cache, self._host, self._forward, self._forward_lora = [], [], None, None
        self._is_allocated = False

    def capture(self, model: Model, graph_sizes: Sequence[int] | None = None) -> CapturedModel:
        """Capture the forward pass of a model over the KV cache, if it is allocated.

        Args:
            model: the runner's model, or a model that differs only in its weights.
            graph_sizes: numbers of sequences for which CUDA graphs are captured; None: those of the constructor.
        """
        if not self._is_allocated:
            return CapturedModel(model, None, None)
        hidden = None
        if model.layers.start or model.vision:
            hidden = torch.zeros(self._max_tokens, model.config.stream_size, dtype=model.dtype)
        experts = model.config.experts
        not_capturable = (
            model.config.model_impl != "penstock"
            or model.config.speech
            or (experts is not None and experts.by_modality)
        )
        capture = reference.capture if not_capturable else self.ops.capture
        run = partial(model.forward, cache=self.cache, export=self._export)
        options = CaptureOptions(
            self._max_tokens,
            self._max_rows,
            self._max_blocks,
            hidden_states=None if hidden is None else hidden.to(self.device),
            device=self.device,
            graph_sizes=self._graph_sizes if graph_sizes is None else graph_sizes,
            sampled=self._sampled,
            state_cache=self._state_cache,
            key_ends=model.vision is not None and model.vision.bidirectional,
        )
        forward = capture(run, options)
        return CapturedModel(model, forward, capture(run, replace(options, use_lora=True)) if self._lora else forward)

    def use(self, captured: CapturedModel) -> None:
        """Replace the model and its captured forward passes."""
        self._model, self._forward, self._forward_lora = captured

    @property
    def captured(self) -> CapturedModel:
        """The current model with its captured forward passes."""
        return CapturedModel(self.model, self._forward, self._forward_lora)

    @property
    def model(self) -> Model:
        """The current model. Must not be read after ``drop_model``."""
        assert self._model is not None, "the weights were dropped"
        return self._model

    @property
    def has_model(self) -> bool:
        """True unless the model was dropped (``drop_model``)."""
        return self._model is not None

    def drop_model(self) -> None:
        """Free the model's weights and captured forward passes. ``use`` sets a model again."""
        self._model, self._forward, self._forward_lora = None, None, None

    @property
    def block_bytes(self) -> int:
        """Size of a KV block of all layers together, bytes."""
        return bytes_per_block(self._specs)

    def activation_bytes(self) -> int:
        """Size of the activations and logits of the largest step, bytes. On CPUs, activations are the buffers of the
        captured forward pass; on GPUs, they are measured in a forward pass."""
        tokens, rows, config, layers = self._max_tokens, self._max_rows, self.model.config, self.model.layers
        has_logits = layers.stop == config.num_layers and not config.encoder
        logits = 2 * 4 * rows * config.vocab_size if has_logits else 0  # logits and probabilities in float32
        if self.device.type == "cpu":
            self.init_cache(1, 0)
            return getattr(self._forward, "buffer_bytes", 0) + logits
        blocks = -(-tokens // self._block_size)
        torch.cuda.synchronize(self.device)
        self.init_cache(blocks, 0, graph_sizes=())
        without = torch.cuda.memory_reserved(self.device)
        self.init_cache(blocks, 0, graph_sizes=self._graph_sizes[-1:])  # smaller graphs share the largest one's memory
        graphs = max(torch.cuda.memory_reserved(self.device) - without, 0)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        batch = _one_row(tokens, blocks, min(rows, tokens))
        batch.positions.clamp_(max=self.model.max_len - 1)  # a step may have more tokens than a sequence
        if layers.start or self.model.vision:
            batch.hidden_states = torch.zeros(tokens, config.stream_size, dtype=self.model.dtype)
        if self._state_cache is not None:
            zero = batch.attention.query_start_loc[:1]
            batch.states = StateBatch(self._state_cache, zero, zero, zero, zero.repeat(2), zero[:0], zero[:0])
        hidden = self.forward(batch)
        if has_logits:
            self.model.logits(hidden)
        torch.cuda.synchronize(self.device)
        activations = torch.cuda.max_memory_allocated(self.device) - before
        del hidden
        self.free()
        return activations + graphs + logits

    def move_blocks(self, swap_out: np.ndarray, swap_in: np.ndarray, copies: np.ndarray) -> None:
        """Copy blocks from the cache to host memory, from host memory to the cache, and within the cache.

        Args:
            swap_out, swap_in, copies: see ``RowUpdates``.
        """
        for source, target, pairs in (
            (self.cache, self._host, swap_out),
            (self._host, self.cache, swap_in),
            (self.cache, self.cache, copies),
        ):
            self.ops.copy_blocks(source, target, [(a, b) for a, b in pairs.reshape(-1, 2).tolist()])

    def copy_slots(self, sources: np.ndarray, targets: np.ndarray, layers: slice = slice(None)) -> None:
        """Copy keys and values within the caches of ``layers``. ``sources`` and ``targets`` are slots, ``[copies]``
        int64 (see ``ops.copy_slots``)."""
        if not len(sources):
            return
        slots = [torch.from_numpy(each).to(self.device) for each in (sources, targets)]
        for cache in self.cache[layers]:
            self.ops.copy_slots(cache, *slots)

    def forward(self, batch: Batch) -> Tensor:
        """Run the forward pass. Returns the last hidden states of the tokens in ``batch.logits_indices``, ``[tokens,
        hidden]``. If there is a transfer buffer, each layer copies the keys and values of tokens with
        ``batch.export_places`` to it."""
        if self._progress is not None and batch.export_places is not None:
            self._progress.fill_(batch.export_step << PROGRESS_BITS)
        forward = self._forward if batch.lora_slots is None else self._forward_lora
        if batch.lora_slots is not None and self.has_expert_lora:
            forward = partial(self.model.forward, cache=self.cache, export=self._export)
        assert forward is not None, "call init_cache first"
        return forward(batch)

    def keep_sampled(self, token_ids: Tensor) -> None:
        """Store sampled tokens, ``[rows]`` int64, on the device. The batch of the next step may refer to them
        (``Batch.token_ids``)."""
        assert self._sampled is not None
        self._sampled[: len(token_ids)].copy_(token_ids)

    def sample(
        self,
        hidden: Tensor,
        positions: Sequence[Position],
        grammar_bitmask: np.ndarray | None = None,
        head: LanguageModelHead | None = None,
    ) -> PendingSamples:
        """Sample the next token at each position, independently of other positions. On a GPU this does not wait for the
        device; ``PendingSamples.result`` does.

        Args:
            hidden: last hidden state before each position, ``[positions, hidden]``.
            grammar_bitmask: see ``sampler.sample``.
            head: language model head; None: the head of the model.
        """
        head = head or self.model
        if all([position.is_plain_greedy for position in positions]):
            return self._argmax(hidden, grammar_bitmask, head)
        plain = [i for i, position in enumerate(positions) if position.is_plain_greedy]
        if not plain:
            return sample(head.logits(hidden), positions, grammar_bitmask, self.ops)
        others = [i for i, position in enumerate(positions) if not position.is_plain_greedy]
        token_ids = torch.empty(len(positions), dtype=torch.int64, device=self.device)
        parts = []
        for part in (plain, others):
            rows = to_device(part, self.device)
            bitmask = None if grammar_bitmask is None else grammar_bitmask[part]
            if part is plain:
                pending = self._argmax(hidden[rows], bitmask, head)
            else:
                pending = sample(head.logits(hidden[rows]), [positions[i] for i in part], bitmask, self.ops)
            token_ids[rows] = pending.token_ids
            parts.append(pending)

        def finish() -> list[SampledTokens]:
            by_position = dict(zip(plain + others, chain.from_iterable(part.result() for part in parts), strict=True))
            return [by_position[i] for i in range(len(positions))]

        return PendingSamples(token_ids, finish)

    def sample_and_rank(
        self, hidden: Tensor, positions: Sequence[Position], count: int, head: LanguageModelHead
    ) -> tuple[list[SampledTokens], list[list[int]]]:
        """Sample like ``sample``. Also returns the ``count`` most likely tokens at each position by the unadjusted
        logits of the head, the most likely token first."""
        logits = head.logits(hidden)
        likeliest = self.ops.topk(logits, min(count, logits.shape[1]))[1].tolist()
        return sample(logits, positions, None, self.ops).result(), likeliest

    def _argmax(self, hidden: Tensor, grammar_bitmask: np.ndarray | None, head: LanguageModelHead) -> PendingSamples:
        """Take the argmax at each position without storing logits. The grammar bitmask is applied."""
        bitmask = None if grammar_bitmask is None else to_device(grammar_bitmask, self.device)
        token_ids = head.argmax(hidden, bitmask)
        finite, sampled = HostCopy(_finite(hidden)), HostCopy(token_ids)

        def finish() -> list[SampledTokens]:
            results = [SampledTokens([token]) for token in sampled.get().tolist()]
            failed = SampledTokens([], failure=NON_FINITE_LOGITS)
            results = [result if ok else failed for result, ok in zip(results, finite.get().tolist(), strict=True)]
            if grammar_bitmask is not None:
                for i in np.flatnonzero(~grammar_bitmask.any(1)).tolist():
                    results[i] = SampledTokens([], failure=NOTHING_ALLOWED)
            return results

        return PendingSamples(token_ids, finish)

    def prompt_logprobs(self, hidden: Tensor, token_ids: np.ndarray, alternatives: int) -> list[list[Logprob]]:
        """Log probabilities of prompt tokens: a list for each token, which begins with the token.

        Args:
            hidden: last hidden state before each token, ``[tokens, hidden]``.
            token_ids: the tokens, ``[tokens]`` int32.
            alternatives: number of most likely tokens to list after each prompt token.
        """
        listed = []
        for start in range(0, len(token_ids), TOKENS_AT_ONCE):
            logits = self.model.logits(hidden[start : start + TOKENS_AT_ONCE])
            chosen = torch.from_numpy(token_ids[start : start + TOKENS_AT_ONCE].astype(np.int64)).to(logits.device)
            listed += logprobs(logits, chosen, [alternatives] * len(chosen), self.ops)()
        return listed

    def logits_bytes(self, hidden: Tensor) -> Iterator[bytes]:
        """Logits of hidden states ``[tokens, hidden]`` as bytes, in chunks of ``[up to TOKENS_AT_ONCE, vocabulary]``
        float32."""
        for start in range(0, len(hidden), TOKENS_AT_ONCE):
            yield self.model.logits(hidden[start : start + TOKENS_AT_ONCE]).numpy(force=True).tobytes()


def _finite(hidden: Tensor) -> Tensor:
    """True for each row whose values are all finite, ``[rows]`` bool."""
    # A finite sum, the usual case, proves that all values are finite.
    if hidden.device.type == "cpu" and math.isfinite(hidden.sum(dtype=torch.float32).item()):
        return torch.ones(len(hidden), dtype=torch.bool)
    return (hidden * 0).sum(-1) == 0  # this takes fewer kernel launches than isfinite


def _one_row(tokens: int, blocks: int, num_states: int) -> Batch:
    """Batch of one sequence with ``tokens`` tokens, whose last ``num_states`` hidden states are returned."""

    def tensor(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    positions = torch.arange(tokens)
    table = torch.arange(blocks, dtype=torch.int32)[None]
    return Batch(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        slot_mapping=positions.clone(),
        attention=AttentionMetadata(tensor(0, tokens), tensor(tokens), table),
        logits_indices=torch.arange(tokens - num_states, tokens),
        logits_attention=AttentionMetadata(tensor(0, num_states), tensor(tokens), table),
    )
