"""A model with its KV cache: a forward pass over a flat batch, and sampling from its hidden states."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.core import Logprob
from penstock.models import Model
from penstock.ops import AttentionMetadata, Batch, KVSpec, Ops
from penstock.planning.kv_spec import bytes_per_block

from ..step import Draw
from .row import Position
from .sampler import NO_SCORES, NOTHING_ALLOWED, logprobs, sample

ROWS_AT_ONCE = 256
"""Rows of logits held at a time where those of a whole prompt are wanted: a large vocabulary's take megabytes each."""


class ModelRunner:
    """Runs one model.

    Args:
        max_tokens: of a step.
        max_rows: sequences that may run at the same time.
        max_len: tokens a sequence may have.
        lora: whether rows may have adapters.
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
        lora: bool = False,
    ) -> None:
        self.model = model
        self._ops = ops
        self._device = device
        self._specs = specs
        self._lora = lora
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        self._max_blocks = -(-max_len // specs[0].block_size)
        self.cache: list[Any] = []
        self._host: list[Any] = []

    def init_cache(self, blocks: int, host_blocks: int) -> None:
        """Allocate the KV cache, and capture a step over it."""
        self.cache = self._ops.new_kv_cache(self._specs, blocks, self._device)
        self._host = self._ops.new_kv_cache(self._specs, host_blocks, torch.device("cpu"))
        capture = partial(
            self._ops.capture,
            partial(self.model.hidden, cache=self.cache),
            self._max_tokens,
            self._max_rows,
            self._max_blocks,
        )
        self._forward = capture()
        self._forward_lora = capture(use_lora=True) if self._lora else self._forward
        """For steps with adapters; others need not know of them."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of its cache."""
        return bytes_per_block(self._specs)

    def activation_bytes(self) -> int:
        """What the largest step takes beside weights and KV cache: the buffers of a captured step over a cache of one
        block where steps are captured, else the peak of one that is run."""
        tokens, rows = self._max_tokens, self._max_rows
        logits = 2 * 4 * rows * self.model.config.vocab_size  # float32, and their probabilities
        if self._device.type == "cpu":
            self.init_cache(1, 0)
            return getattr(self._forward, "buffer_bytes", 0) + logits
        blocks = -(-tokens // self._specs[0].block_size)
        self.init_cache(blocks, 0)
        torch.cuda.synchronize(self._device)
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        hidden = self.forward(_one_row(tokens, blocks, self._specs[0].block_size, min(rows, tokens), self._device))
        self.model.logits(hidden)
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before + logits

    def move_blocks(self, swap_out: np.ndarray, swap_in: np.ndarray, copies: np.ndarray) -> None:
        """Copy blocks to and from the host tier, and within the cache (``RowUpdates``)."""
        for source, target, pairs in (
            (self.cache, self._host, swap_out),
            (self._host, self.cache, swap_in),
            (self.cache, self.cache, copies),
        ):
            self._ops.copy_blocks(source, target, [(a, b) for a, b in pairs.reshape(-1, 2).tolist()])

    def forward(self, batch: Batch) -> Tensor:
        """The last hidden states of the tokens that the batch wants them of, ``[rows, hidden]``."""
        return (self._forward if batch.lora_slots is None else self._forward_lora)(batch)

    def sample(self, hidden: Tensor, positions: Sequence[Position], allowed: np.ndarray | None = None) -> list[Draw]:
        """The next token at each position. What one draws does not depend on the others.

        Args:
            hidden: ``[positions, hidden]``.
            allowed: ``[positions, vocabulary / 32]`` int32, a bit for each token that may come; None is all.
        """
        if all([position.argmax for position in positions]):
            return self._argmax(hidden, allowed)
        draws: list[Draw | None] = [None] * len(positions)
        plain = [i for i, position in enumerate(positions) if position.argmax]
        others = [i for i, position in enumerate(positions) if not position.argmax]
        if plain:
            for i, draw in zip(plain, self._argmax(hidden[plain], _rows(allowed, plain)), strict=True):
                draws[i] = draw
        logits = self.model.logits(hidden[others] if plain else hidden)
        found = sample(logits, [positions[i] for i in others], self._bits(_rows(allowed, others)))
        for i, draw in zip(others, found, strict=True):
            draws[i] = draw
        return [draw for draw in draws if draw is not None]

    def _argmax(self, hidden: Tensor, allowed: np.ndarray | None) -> list[Draw]:
        """The likeliest token of each row: most requests want no more, for which logits need not be kept."""
        sound = [True] * len(hidden)
        if not math.isfinite(hidden.sum(dtype=torch.float32).item()):  # one look at all of them, then at each
            sound = hidden.isfinite().all(-1).tolist()
        draws = [Draw([token]) for token in self.model.argmax(hidden, self._bits(allowed)).tolist()]
        if not all(sound):
            draws = [draw if own else Draw([], failure=NO_SCORES) for draw, own in zip(draws, sound, strict=True)]
        if allowed is not None:
            for i in np.flatnonzero(~allowed.any(1)).tolist():
                draws[i] = Draw([], failure=NOTHING_ALLOWED)
        return draws

    def prompt_logprobs(self, hidden: Tensor, token_ids: np.ndarray, alternatives: int) -> list[list[Logprob]]:
        """Log probabilities of tokens, each after the hidden state at the same place."""
        found = []
        for start in range(0, len(token_ids), ROWS_AT_ONCE):
            logits = self.model.logits(hidden[start : start + ROWS_AT_ONCE])
            chosen = torch.from_numpy(token_ids[start : start + ROWS_AT_ONCE].astype(np.int64)).to(logits.device)
            found += logprobs(logits, chosen, [alternatives] * len(chosen))
        return found

    def logits(self, hidden: Tensor) -> Iterator[bytes]:
        """Of hidden states, float32."""
        for start in range(0, len(hidden), ROWS_AT_ONCE):
            yield self.model.logits(hidden[start : start + ROWS_AT_ONCE]).numpy(force=True).tobytes()

    def _bits(self, allowed: np.ndarray | None) -> Tensor | None:
        return None if allowed is None else torch.from_numpy(allowed).to(self._device)


def _rows(allowed: np.ndarray | None, rows: list[int]) -> np.ndarray | None:
    return None if allowed is None else allowed[rows]


def _one_row(tokens: int, blocks: int, block_size: int, wanted: int, device: torch.device) -> Batch:
    """A batch of one sequence, of whose last tokens the hidden states are wanted."""

    def tensor(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    positions = torch.arange(tokens, device=device)
    table = torch.arange(blocks, dtype=torch.int32, device=device)[None]
    return Batch(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        slot_mapping=positions,
        attention=AttentionMetadata(tensor(0, tokens), tensor(tokens), table),
        logits_indices=positions[-wanted:],
        logits_attention=AttentionMetadata(tensor(0, wanted), tensor(tokens), table),
    )
