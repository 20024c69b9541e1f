"""The messages between scheduler and workers: what a step computes, and what came of it.

Everything here can be sent to another process: numbers, arrays and plain structs, and no ``Sequence``. A sequence that
runs is a *row* of the workers' batch. A worker keeps each row's tokens and block table from step to step, so that a
step says only what is new. Arrays are int32 unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from penstock.core import Failure, Logprob, SamplingParams

EMPTY = np.zeros(0, np.int32)


class NewRow(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that starts to run, for the first time or again after preemption."""

    row: int
    token_ids: np.ndarray
    """``[tokens]``: all that it has, prompt and output."""
    prompt_length: int
    num_computed: int
    """Leading tokens whose keys and values are in its blocks: found in the prefix cache, or swapped in."""
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    """End-of-sequence tokens among them."""
    seed: int
    index: int
    """Which of the request's sequences it is."""
    lora_slot: int = -1
    """-1 for none."""
    num_candidates: int = 0
    """For a beam: how many of the likeliest next tokens to return. 0 for a sequence that samples."""
    prompt_logprobs: int | None = None
    """Alternatives to return with each prompt token; None where none are wanted (any more)."""
    context_logits: bool = False
    """Whether to return the logits after each prompt token."""
    pooling: Literal["", "last", "mean"] = ""
    """Which hidden states to return in place of sampling: the last token's, or all."""


class RowUpdates(msgspec.Struct, array_like=True):
    """What changes in the workers' rows and blocks before a step, to be applied in the order of these fields.

    ``tokens`` and ``tables`` are segments one after the other, each ``row, first, count`` and then ``count`` values.
    """

    swap_out: np.ndarray = EMPTY
    """``[2 * n]``: device block, host block, in turns."""
    swap_in: np.ndarray = EMPTY
    """Host block, device block."""
    copies: np.ndarray = EMPTY
    """From and to, both device blocks: copy on write."""
    branches: np.ndarray = EMPTY
    """``[4 * n]``: row, parent row, position, token. Each beam becomes its parent as it was before, and the token."""
    new: list[NewRow] = []
    tokens: np.ndarray = EMPTY
    """Tokens that the scheduler has put in the place of sampled ones, or behind them."""
    tables: np.ndarray = EMPTY
    """Blocks, from place ``first`` in the row's block table on."""
    forks: np.ndarray = EMPTY
    """``[3 * n]``: row, parent row, index of the sequence. The row begins as a copy of its parent."""

    @staticmethod
    def segments(flat: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
        """Row, first place and values of each segment of ``tokens`` or ``tables``."""
        at = 0
        while at < len(flat):
            row, first, count = flat[at : at + 3].tolist()
            yield row, first, flat[at + 3 : at + 3 + count]
            at += 3 + count


class StepInput(msgspec.Struct, array_like=True):
    """One step: tokens ``starts[i]`` to ``starts[i] + lengths[i]`` of each row, and its draft after them."""

    updates: RowUpdates
    rows: np.ndarray
    """``[items]``"""
    starts: np.ndarray
    lengths: np.ndarray
    samples: np.ndarray
    """``[items]`` uint8: whether the row samples a token after its last one, as do rows that are forked from it now."""
    drafts: np.ndarray = EMPTY
    """``[items]``: how many draft tokens follow; empty where none do."""
    draft_token_ids: np.ndarray = EMPTY
    """Of all items, one after the other."""
    masked: bool = False
    """Whether grammar masks follow (``Executor.submit``)."""


class Candidates(NamedTuple):
    """The likeliest next tokens of a beam, the best first."""

    token_ids: np.ndarray
    """``[candidates]`` int64."""
    logprobs: np.ndarray
    """``[candidates]`` float32."""


class Draw(NamedTuple):
    """What one row sampled in a step."""

    token_ids: list[int]
    """One, after those of its draft that were accepted."""
    logprobs: list[list[Logprob]] | None = None
    logits: list[bytes] | None = None
    """For each token the logits it was sampled from, ``[vocabulary]`` float32, where they are wanted."""
    candidates: Candidates | None = None
    """For a beam, which samples nothing."""
    failure: Failure | None = None
    """Why there is no token, and the sequence cannot go on."""


class StepOutput(NamedTuple):
    """What came of a step."""

    draws: list[Draw]
    """One for each row that samples, in the order of the items; after an item's own those of rows forked from it."""
    prompt_logprobs: dict[int, list[list[Logprob]]] = {}  # noqa: RUF012 - a tuple's default, never written
    """By item: of the prompt tokens after each computed one, where they are wanted."""
    context_logits: dict[int, bytes] = {}  # noqa: RUF012 - likewise
    """By item: logits after each of its prompt tokens, ``[tokens, vocabulary]`` float32, where they are wanted."""
    states: dict[int, np.ndarray] = {}  # noqa: RUF012 - likewise
    """By item: hidden states to pool, ``[tokens, hidden]`` float32."""


class Propose(msgspec.Struct, array_like=True, tag=True):
    """Ask the drafter for tokens that may follow; the answer is a list of token ids for each row,
    or nothing where the drafter has failed.

    Args:
        lengths: tokens that each row has.
        counts: draft tokens wanted at most.
    """

    updates: RowUpdates
    rows: np.ndarray
    lengths: np.ndarray
    counts: np.ndarray


class LoadLoRA(msgspec.Struct, array_like=True, tag=True):
    """Read an adapter, beside the steps, and put it into a slot between two of them; answered with None."""

    slot: int
    path: str


class UnloadLoRA(msgspec.Struct, array_like=True, tag=True):
    """Empty a slot, which no row uses; answered with None."""

    slot: int


class DeviceMemory(msgspec.Struct, array_like=True, tag=True):
    """Asks for the bytes allocated on the device, 0 on CPUs."""


Op = Propose | LoadLoRA | UnloadLoRA | DeviceMemory
"""What a worker does besides steps (``Executor.call``)."""


class ModelInfo(msgspec.Struct, frozen=True):
    """The model that the workers have loaded."""

    architecture: str
    vocab_size: int
    hidden_size: int
    has_lm_head: bool
    """Whether it generates; else it makes embeddings only."""
    dtype: str
    quantization: str
    fingerprint: str
    """What decides the bits of a result besides the weights."""
    batch_invariant: bool
    weights_version: str
    """Identifies the checkpoint's contents."""
    mtp_layers: int
    """Layers for multi-token prediction that were loaded."""
    drafts: bool = False
    """Whether the workers draft tokens (``Propose``)."""


class MemoryProfile(msgspec.Struct, frozen=True):
    """What the KV cache may take, after weights and activations."""

    free: int
    """Bytes free for the cache."""
    total: int
    """Bytes of the device's memory; 0 on CPUs."""
    block_bytes: int
    """Bytes of a block in all caches of a worker: the model's and the draft model's."""
    host_block_bytes: int
    """Bytes of a block in the host tier, the model's only."""


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, np.ascontiguousarray(value).data.cast("B") if value.size else b""
    raise NotImplementedError(f"cannot encode {type(value)}")


def _decode_array(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        dtype, shape, data = value
        return np.frombuffer(data, dtype).reshape(shape)
    raise NotImplementedError(f"cannot decode {kind}")


encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """A decoder of messages with arrays. The arrays share the message's memory and are read-only."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_array)
