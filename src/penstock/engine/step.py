"""Messages between scheduler and workers: the input of a step, its output, and calls between two steps.

All messages can be sent to another process. A running sequence is a *row* of the workers' batch. A worker keeps the
tokens and the block table of each row from step to step, so that a step carries only the changes. Arrays are int32
unless another dtype is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from penstock.core import Failure, Logprob, SamplingParams
from penstock.core.audio import AudioInput
from penstock.core.multimodal import ImageInput

EMPTY = np.zeros(0, np.int32)
"""Default of array fields. Use this object for every empty array: a field with this object is not sent."""
MAX_VALUE_BYTES = 2**32 - 1
"""Maximum bytes of one array or byte string of a message: MessagePack stores their length in 32 bits."""
NO_TOKEN_ALLOWED = (
    "no token can be sampled: allowed_token_ids, bad words, min_tokens and the grammar together exclude every token; "
    "relax one of them"
)
"""Error message for a sequence whose next token cannot be sampled."""


class ImageSpan(msgspec.Struct, frozen=True, array_like=True):
    """Placeholder tokens of an image in a row."""

    content_hash: bytes
    """``ImageInput.content_hash``."""
    start: int
    """Index of the first placeholder in the row."""
    end: int
    """Index after the last placeholder."""
    bidirectional: bool
    """``ImageInput.bidirectional``."""


class NewRow(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that starts, or starts again after preemption."""

    row: int
    """Row of the workers' batch that the sequence gets."""
    token_ids: np.ndarray
    """``[tokens]``: prompt and output so far."""
    prompt_length: int
    num_computed: int
    """Number of leading tokens with KV in the sequence's blocks, from the prefix cache or swapped in."""
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    """Tokens that end the sequence, end-of-sequence tokens included."""
    seed: int
    """Seed of the request's random numbers."""
    index: int
    """Index of the sequence in its request."""
    lora_slot: int = -1
    """Slot of the sequence's LoRA adapter; -1 without an adapter."""
    num_candidates: int = 0
    """Number of most likely next tokens to return for a beam; 0 without beam search."""
    prompt_logprobs: int | None = None
    """Number of top logprobs to return per prompt token; None without prompt logprobs."""
    context_logits: bool = False
    """Return the logits after each prompt token."""
    pooling: Literal["", "last", "cls", "mean", "all"] = ""
    """Hidden states to return instead of sampling: of the last or first prompt token, or of all (``mean``, ``all``)."""
    image_spans: list[ImageSpan] = []
    """Placeholders of the prompt's images."""
    mrope_positions: np.ndarray = EMPTY
    """``[3, prompt_length]``: M-RoPE positions of the prompt's tokens in time, height and width; empty if all three
    equal the token's index."""
    head: str = ""
    """Head of the model (``Model.heads``) to apply to the pooled states; the worker returns the head's output."""
    pooling_token_ids: tuple[int, ...] = ()
    """Tokens whose logits are returned instead of hidden states."""
    second_text: int = 0
    """``EngineRequest.second_text``."""
    audio: AudioInput | None = None
    """``EngineRequest.audio``."""
    snapshot: int = -1
    """Snapshot of the recurrent state after ``num_computed`` tokens; -1: the state before the first token."""
    state_slots: list[int] = []
    """Slots of the host tier from which the snapshot is loaded first (``StoredState.slots``); empty: it is valid."""
    swapped_state: int = -1
    """Slot of the swap space with the recurrent state of a swapped sequence; -1: it starts from ``snapshot``."""


class StoredState(msgspec.Struct, array_like=True):
    """A snapshot of recurrent states that is copied to the host tier of the prefix cache."""

    snapshot: int
    slots: list[int]
    """Slots of the host tier, the same number for each rank, in the order of world ranks."""


class RowUpdates(msgspec.Struct, omit_defaults=True):
    """Changes to the workers' rows and blocks before a step, applied in the order of these fields.

    ``tokens`` and ``tables`` are concatenated segments: ``row, first, count``, then ``count`` values.
    """

    stores: np.ndarray = EMPTY
    """``[2 * n]``: device block and slot of each copy to the host tier of the prefix cache."""
    state_stores: list[StoredState] = []
    """Snapshots of recurrent states to copy to the host tier."""
    swap_out: np.ndarray = EMPTY
    """``[2 * n]``: device block and host block of each block swapped out."""
    state_swap_out: np.ndarray = EMPTY
    """``[2 * n]``: row, and slot of the swap space, of each recurrent state swapped out."""
    swap_in: np.ndarray = EMPTY
    """``[2 * n]``: host block and device block of each block swapped in."""
    copies: np.ndarray = EMPTY
    """``[2 * n]``: source and target device block of each copy on write."""
    loads: np.ndarray = EMPTY
    """``[2 * n]``: slot and device block of each copy from the host tier of the prefix cache."""
    beam_steps: np.ndarray = EMPTY
    """``[4 * n]``: row, parent row, position, token. The tokens of ``row`` are replaced by the tokens that the parent
    row had before this update, up to ``position``, followed by ``token``."""
    new: list[NewRow] = []
    """Rows of sequences that start."""
    tokens: np.ndarray = EMPTY
    """Segments of tokens that replace the row's tokens from position ``first`` on."""
    tables: np.ndarray = EMPTY
    """Segments of block numbers that replace the entries of the row's block table from index ``first`` on."""
    forks: np.ndarray = EMPTY
    """``[3 * n]``: row, parent row, index of the sequence in its request. The row becomes a copy of its parent."""

    @staticmethod
    def segments(flat: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
        """``row, first, values`` of each segment of ``tokens`` or ``tables``."""
        at = 0
        while at < len(flat):
            row, first, count = flat[at : at + 3].tolist()
            yield row, first, flat[at + 3 : at + 3 + count]
            at += 3 + count


class StepInput(msgspec.Struct, tag=True, omit_defaults=True):
    """Input of a step. Item ``i`` computes tokens ``starts[i]`` to ``starts[i] + lengths[i]`` of row ``rows[i]``, and
    the draft tokens that follow them."""

    updates: RowUpdates
    rows: np.ndarray
    """``[items]``: row of each item."""
    starts: np.ndarray
    """``[items]``: position of the first token to compute."""
    lengths: np.ndarray
    """``[items]``: number of tokens to compute, without draft tokens."""
    needs_sample: np.ndarray
    """``[items]`` bool: True if the row, and rows that this step forks from it, sample the next token."""
    drafts: np.ndarray = EMPTY
    """``[items]``: number of draft tokens; empty if no item has draft tokens."""
    draft_token_ids: np.ndarray = EMPTY
    """``[drafts.sum()]``: draft tokens of all items, concatenated."""
    draft_parents: np.ndarray = EMPTY
    """``[drafts.sum()]``: index of each draft token's parent among the draft tokens of its item, -1 for the item's last
    token. Draft tokens are in depth-first order. Empty if all drafts are chains, not trees."""
    has_grammar_bitmask: bool = False
    """True if a grammar bitmask is sent with the step (``Executor.submit``)."""
    snapshots: np.ndarray = EMPTY
    """``[3 * n]``: item, number of the item's tokens after which its recurrent state is copied, and snapshot to which
    it is copied. Items, and tokens of an item, are in ascending order."""
    export_places: np.ndarray = EMPTY
    """``[lengths.sum()]``: position in the transfer buffer to which each computed token's KV is exported
    (``ops.Batch.export_places``), -1 for tokens that are not exported; empty if no token is exported."""
    export_step: int = 0
    """Number of the step in the ranks' progress (``ops.LayerExport.progress``), if tokens are exported."""
    evicted_images: list[bytes] = []
    """Content hashes of images whose features the workers drop, before they encode ``encoded_images``."""
    encoded_images: list[ImageInput] = []
    """Images that the workers encode before the step. Workers keep the features."""


class Candidates(NamedTuple):
    """The most likely next tokens of a beam, the best first."""

    token_ids: np.ndarray
    """``[candidates]`` int64."""
    logprobs: np.ndarray
    """``[candidates]`` float32."""


class SampledTokens(NamedTuple):
    """Result of sampling for a row: tokens, a beam's candidates or a failure."""

    token_ids: list[int]
    """Accepted draft tokens and the token sampled after them; empty for a beam, and after a failure."""
    logprobs: list[list[Logprob]] | None = None
    """Per token: its logprob, followed by the top logprobs; None unless requested."""
    logits: list[bytes] | None = None
    """Per token: the logits from which it was sampled, ``[vocabulary]`` float32; None unless requested."""
    candidates: Candidates | None = None
    """Candidates of a beam; None without beam search."""
    failure: Failure | None = None
    """Error that ends the sequence, since no token could be sampled."""


class StepOutput(NamedTuple):
    """The output of a step. Dictionaries are keyed by the index of the item in ``StepInput``."""

    sampled: list[SampledTokens]
    """One entry per row that samples, in the order of the items; rows forked in this step follow their parent."""
    prompt_logprobs: dict[int, list[list[Logprob]]] = {}  # noqa: RUF012 - a tuple's default, never written
    """Logprobs of the prompt tokens that follow the computed tokens, if requested."""
    context_logits: dict[int, bytes] = {}  # noqa: RUF012 - a tuple's default, never written
    """Logits after each computed prompt token, ``[tokens, vocabulary]`` float32, if requested."""
    pooler_hidden_states: dict[int, np.ndarray] = {}  # noqa: RUF012 - a tuple's default, never written
    """Hidden states to pool, ``[tokens, hidden]`` float32, for embedding requests."""


class TransferMemory(msgspec.Struct, frozen=True, array_like=True):
    """Memory that the engine shares with its workers: a transfer buffer (``kv_transfer.buffer.TransferBuffer``), or the
    host tier of the prefix cache (``kv.host_tier.HostTier``)."""

    path: str
    """File to map."""
    offset: int
    """Byte offset of the first slot."""
    slots: int
    """Number of slots."""
    slot_tokens: int
    """Number of tokens per slot."""
    slot_bytes: int
    """Bytes per slot."""
    progress: int
    """Index of rank 0's progress (``ops.LayerExport.progress``) in the memory viewed as int64; ranks 1, 2, … follow."""


class LoadModel(msgspec.Struct, array_like=True, tag=True):
    """Load the model. Returns ``ModelInfo``; raises ``PenstockError`` if the options or the checkpoint are invalid."""

    weights: str = ""
    """Folder of the weights; empty for the model's folder."""


class ProfileMemory(msgspec.Struct, array_like=True, tag=True):
    """Measure the memory that weights and the activations of the largest step leave for the KV cache. Returns
    ``MemoryProfile``."""


class InitCache(msgspec.Struct, array_like=True, tag=True):
    """Allocate the KV cache. Returns None; raises ``PenstockError`` if too little memory is free."""

    blocks: int
    """Number of blocks on the device."""
    host_blocks: int
    """Number of blocks in host memory."""
    transfer: TransferMemory | None = None
    """Transfer buffer for ``ExportKV`` and ``ImportKV``; None without KV transfers."""
    snapshots: int = 0
    """Number of snapshots of recurrent states."""
    swapped_states: int = 0
    """Number of slots for recurrent states of swapped sequences in host memory."""
    offload: TransferMemory | None = None
    """Host tier of the prefix cache, for ``RowUpdates.stores`` and ``loads``; None without a host tier."""


class Propose(msgspec.Struct, array_like=True, tag=True):
    """Draft tokens for rows. Returns one entry per row: its draft token ids, at most ``counts``, or None if the drafter
    failed for the row."""

    updates: RowUpdates
    rows: np.ndarray
    """``[rows]``: rows to draft for."""
    lengths: np.ndarray
    """``[rows]``: number of tokens of each row, after which its draft begins."""
    counts: np.ndarray
    """``[rows]``: maximum number of draft tokens of each row; for a tree, its maximum depth."""
    trees: np.ndarray = EMPTY
    """``[rows]``: 1 to draft a tree of the configured shape, else 0; empty without trees. A tree is returned in full,
    with negative numbers for missing tokens."""


class LoadLoRA(msgspec.Struct, array_like=True, tag=True):
    """Read the LoRA adapter in folder ``path`` while steps continue, then copy it into ``slot`` between two steps.
    Returns ``LoRAAdapter.version``."""

    slot: int
    path: str


class UnloadLoRA(msgspec.Struct, array_like=True, tag=True):
    """Remove the adapter from ``slot``, which no row may use. Returns None."""

    slot: int


class LoadWeights(msgspec.Struct, array_like=True, tag=True):
    """Read and pack the weights in folder ``path`` while steps continue with the current weights. Returns the version
    of the new weights."""

    path: str
    """A folder of safetensors; empty for the weights that the workers started with."""


class ChangeWeights(msgspec.Struct, array_like=True, tag=True):
    """Change the weights that steps use; no row may be running. Returns None.

    ``swap`` uses the loaded weights (``LoadWeights``) and keeps the old weights; ``commit`` drops the old weights;
    ``revert`` undoes a swap and drops the loaded weights.
    """

    action: Literal["swap", "commit", "revert"]


class FreeMemory(msgspec.Struct, array_like=True, tag=True):
    """Free the KV cache, and the weights depending on ``level``; no row may be running. Returns True if the weights
    were dropped."""

    level: int
    """Level of sleep: 1 drops the weights on a GPU, 2 on any device."""


class AllocateCache(msgspec.Struct, array_like=True, tag=True):
    """Allocate the KV cache that ``FreeMemory`` freed. Returns None."""


class DeviceMemory(msgspec.Struct, array_like=True, tag=True):
    """Return the number of bytes allocated on the GPU; 0 on CPUs."""


class ReadExpertLoad(msgspec.Struct, array_like=True, tag=True):
    """Return the number of tokens routed to each expert since the start, ``{layer: [tokens per expert]}``. A pipeline
    stage returns only its layers."""

    reset: bool = False
    """Reset the counts to 0 after reading."""


class ExportKV(msgspec.Struct, array_like=True, tag=True):
    """Copy keys and values from the KV cache to the transfer buffer. Returns None."""

    first_layer: int
    """First layer to copy."""
    last_layer: int
    """Layer after the last one to copy."""
    slots: np.ndarray
    """``[tokens]`` int64: slots of the KV cache."""
    places: np.ndarray
    """``[tokens]`` int64: positions in the transfer buffer, ``slot * slot_tokens + index in the slot``."""


class ImportKV(msgspec.Struct, array_like=True, tag=True):
    """Copy keys and values from the transfer buffer to the KV cache. Returns None. The fields are those of
    ``ExportKV``."""

    first_layer: int
    last_layer: int
    slots: np.ndarray
    places: np.ndarray


class ExportState(msgspec.Struct, array_like=True, tag=True):
    """Copy a snapshot of recurrent states to slots of the transfer buffer. Returns None."""

    snapshot: int
    slots: np.ndarray
    """``[slots]``: slots of the buffer, the same number for each tensor-parallel rank, in the order of the ranks."""


class ImportState(msgspec.Struct, array_like=True, tag=True):
    """Copy a part of the recurrent states from the transfer buffer to a snapshot. Returns None."""

    snapshot: int
    index: int
    """Index of the part in ``ExportState.slots``."""
    count: int
    """Number of parts of all ranks together."""
    slot: int
    """Slot of the buffer."""


WorkerCall = (
    LoadModel
    | ProfileMemory
    | InitCache
    | Propose
    | LoadLoRA
    | UnloadLoRA
    | LoadWeights
    | ChangeWeights
    | FreeMemory
    | AllocateCache
    | DeviceMemory
    | ReadExpertLoad
    | ExportKV
    | ImportKV
    | ExportState
    | ImportState
)
"""Calls between two steps (``Executor.call``)."""
LONG_CALLS = (LoadModel, ProfileMemory, InitCache, LoadLoRA, LoadWeights, ChangeWeights, AllocateCache)
"""Calls that read files or capture CUDA graphs, and therefore take longer than a step."""


class ModelInfo(msgspec.Struct, frozen=True):
    """The model that the workers have loaded."""

    architecture: str
    vocab_size: int
    hidden_size: int
    """Dimension of the hidden states."""
    has_lm_head: bool
    """True if the model can generate; False for embedding models."""
    dtype: str
    """Name of the compute dtype, such as ``bfloat16``."""
    quantization: str
    """Name of the quantization scheme (``core.quantization.SCHEMES``)."""
    fingerprint: str
    """Engines with equal fingerprints and equal weights return bit-identical results (``worker/fingerprint.py``)."""
    batch_invariant: bool
    """True if the results of a sequence do not depend on the other sequences of the batch."""
    weights_version: str
    """Digest of the checkpoint's contents."""
    mtp_layers: int
    """Number of loaded multi-token prediction layers."""
    drafts: bool = False
    """True if the workers draft tokens (``Propose``)."""
    token_types: int = 0
    """Number of token types (``EngineRequest.second_text``); 0 without token type embeddings."""
    heads: tuple[str, ...] = ()
    """Names of the heads that can be applied after pooling."""
    embedding_size: int = 0
    """Dimension of an embedding."""
    asynchronous: bool = False
    """True if the device computes steps asynchronously, so that the next step should be submitted meanwhile."""
    has_vision: bool = False
    """True if the model accepts images."""
    feature_bytes: int = 0
    """Bytes of an image feature (one placeholder token); 0 without image input."""


class MemoryProfile(msgspec.Struct, frozen=True):
    """Memory available for the KV cache."""

    free: int
    """Bytes that weights and the activations of the largest step leave free."""
    total: int
    """Bytes of GPU memory; 0 on CPUs."""
    block_bytes: int
    """Bytes of a block, in the KV caches of the model and of the draft model together."""
    host_block_bytes: int
    """Bytes of a block in the host tier, which stores only the model's KV, not the draft model's."""
    state_bytes: int = 0
    """Bytes of a snapshot of a sequence's recurrent states; 0 without such states."""
    swapped_state_bytes: int = 0
    """Bytes of the recurrent states of a swapped sequence, with inputs of drafts."""


def sum_states(states: np.ndarray, total: np.ndarray | float = 0.0) -> np.ndarray | float:
    """Sum of ``total`` and hidden states ``[tokens, hidden]``, added token by token in float64."""
    for state in states.astype(np.float64):
        total = total + state
    return total


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
    """Decoder for msgpack messages of type ``kind``. Decoded arrays are read-only views of the message."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_array)
