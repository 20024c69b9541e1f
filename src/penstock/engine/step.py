"""The messages between scheduler and workers: the input of a step, its output, and calls between two steps.

Everything here can be sent to another process: numbers, arrays and plain structs, and no ``Sequence``. A running
sequence is a *row* of the workers' batch. A worker keeps each row's tokens and block table from step to step, so that
a step carries only what has changed. Arrays are int32 unless another dtype is given.
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
"""The default of arrays. Use this object, and no other array without elements: fields that have it are not sent."""
MAX_VALUE_BYTES = 2**32 - 1
"""Maximum bytes of one array or byte string of a message: MessagePack has 32 bits for their length."""
NO_TOKEN_ALLOWED = (
    "no token can be sampled: allowed_token_ids, bad words, min_tokens and the grammar together exclude every token; "
    "relax one of them"
)
"""Message of the failure of a sequence that cannot continue."""


class ImageSpan(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of a row that stand for an image's features."""

    content_hash: bytes
    """``ImageInput.content_hash``."""
    start: int
    end: int
    bidirectional: bool
    """As ``ImageInput.bidirectional``."""


class NewRow(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that starts to run, for the first time or again after preemption."""

    row: int
    token_ids: np.ndarray
    """``[tokens]``: prompt and output so far."""
    prompt_length: int
    num_computed: int
    """Leading tokens whose keys and values are in its blocks already, from the prefix cache or swapped in."""
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    """Tokens that end the sequence, end-of-sequence tokens included."""
    seed: int
    index: int
    """Index of the sequence in its request."""
    lora_slot: int = -1
    """Slot of its LoRA adapter; -1 for none."""
    num_candidates: int = 0
    """For a beam: number of likeliest next tokens to return. 0 for a sequence that samples."""
    prompt_logprobs: int | None = None
    """Number of alternatives to return with each prompt token; None for no prompt logprobs."""
    context_logits: bool = False
    """Whether to return the logits after each prompt token."""
    pooling: Literal["", "last", "cls", "mean", "all"] = ""
    """Hidden states to return in place of sampling: the last or first prompt token's, or all (``mean``, ``all``)."""
    image_spans: list[ImageSpan] = []
    mrope_positions: np.ndarray = EMPTY
    """``[3, prompt_length]``: positions of the prompt's tokens in time, height and width, of which a model with M-RoPE
    computes rotary embeddings; empty if all three are the place in the sequence."""
    head: str = ""
    """Head of the model (``Model.heads``) whose output for the pooled states is returned in their place."""
    pooling_token_ids: tuple[int, ...] = ()
    """Tokens whose logits are returned in their place."""
    second_text: int = 0
    """As ``EngineRequest.second_text``."""
    audio: AudioInput | None = None
    """As ``EngineRequest.audio``."""


class RowUpdates(msgspec.Struct, omit_defaults=True):
    """Changes of the workers' rows and blocks before a step, applied in the order of these fields.

    ``tokens`` and ``tables`` are concatenated segments: ``row, first, count`` and then ``count`` values each.
    """

    stores: np.ndarray = EMPTY
    """``[2 * n]``: device block and slot of each copy to the host tier of the prefix cache."""
    swap_out: np.ndarray = EMPTY
    """``[2 * n]``: device block and host block of each copy to the host tier."""
    swap_in: np.ndarray = EMPTY
    """``[2 * n]``: host block and device block of each copy from the host tier."""
    copies: np.ndarray = EMPTY
    """``[2 * n]``: source and target, both device blocks, of each copy on write."""
    loads: np.ndarray = EMPTY
    """``[2 * n]``: slot and device block of each copy from the host tier of the prefix cache."""
    beam_steps: np.ndarray = EMPTY
    """``[4 * n]``: row, parent row, position, token. The beam in ``row`` becomes the parent's tokens before
    ``position``, as they were before this update, followed by ``token``."""
    new: list[NewRow] = []
    tokens: np.ndarray = EMPTY
    """Segments of tokens from position ``first`` on. They replace the row's tokens there."""
    tables: np.ndarray = EMPTY
    """Segments of block numbers, from index ``first`` of the row's block table on."""
    forks: np.ndarray = EMPTY
    """``[3 * n]``: row, parent row, index of the sequence. The row becomes a copy of its parent."""

    @staticmethod
    def segments(flat: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
        """``row, first, values`` of each segment of ``tokens`` or ``tables``."""
        at = 0
        while at < len(flat):
            row, first, count = flat[at : at + 3].tolist()
            yield row, first, flat[at + 3 : at + 3 + count]
            at += 3 + count


class StepInput(msgspec.Struct, tag=True, omit_defaults=True):
    """A step. Item ``i`` computes tokens ``starts[i]`` to ``starts[i] + lengths[i]`` of row ``rows[i]``, and the draft
    tokens that follow them."""

    updates: RowUpdates
    rows: np.ndarray
    """``[items]``"""
    starts: np.ndarray
    """``[items]``"""
    lengths: np.ndarray
    """``[items]``"""
    needs_sample: np.ndarray
    """``[items]`` bool: whether the row samples the next token; rows that this step forks from it then sample, too."""
    drafts: np.ndarray = EMPTY
    """``[items]``: number of draft tokens; empty if no item has any."""
    draft_token_ids: np.ndarray = EMPTY
    """``[drafts.sum()]``: the draft tokens of all items, concatenated."""
    draft_parents: np.ndarray = EMPTY
    """``[drafts.sum()]``: index of the draft token before each among those of its item, -1 for the item's last token.
    Draft tokens are in depth-first order; empty if each follows the one before it."""
    has_grammar_bitmask: bool = False
    """True if a grammar bitmask follows (``Executor.submit``)."""
    export_places: np.ndarray = EMPTY
    """``[lengths.sum()]``: where keys and values of each computed token are exported in the transfer buffer
    (``ops.Batch.export_places``), -1 for none; empty if no token is exported."""
    export_step: int = 0
    """Number of the step in the ranks' progress (``ops.LayerExport.progress``), if tokens are exported."""
    evicted_images: list[bytes] = []
    """Content hashes of images whose features the workers are to drop, before they encode others."""
    encoded_images: list[ImageInput] = []
    """Images to encode before the step, whose features the workers keep."""


class Candidates(NamedTuple):
    """The likeliest next tokens of a beam, the best first."""

    token_ids: np.ndarray
    """``[candidates]`` int64."""
    logprobs: np.ndarray
    """``[candidates]`` float32."""


class SampledTokens(NamedTuple):
    """What a row sampled in a step: tokens, or for a beam its candidates, or a failure."""

    token_ids: list[int]
    """The accepted draft tokens and the token sampled after them; empty for a beam, and if there is a failure."""
    logprobs: list[list[Logprob]] | None = None
    """For each token its logprob, followed by those of the alternatives; None unless requested."""
    logits: list[bytes] | None = None
    """For each token the logits it was sampled from, ``[vocabulary]`` float32; None unless requested."""
    candidates: Candidates | None = None
    """For a beam, in place of tokens."""
    failure: Failure | None = None
    """Why no token could be sampled; the sequence ends with it."""


class StepOutput(NamedTuple):
    """The output of a step. Items are those of ``StepInput``, by index."""

    sampled: list[SampledTokens]
    """One for each row that samples, in the order of the items; rows forked in this step follow their parent."""
    prompt_logprobs: dict[int, list[list[Logprob]]] = {}  # noqa: RUF012 - a tuple's default, never written
    """By item, if requested: logprobs of the prompt tokens that follow those computed."""
    context_logits: dict[int, bytes] = {}  # noqa: RUF012 - likewise
    """By item, if requested: logits after each computed prompt token, ``[tokens, vocabulary]`` float32."""
    pooler_hidden_states: dict[int, np.ndarray] = {}  # noqa: RUF012 - likewise
    """By item of an embedding request: hidden states to pool, ``[tokens, hidden]`` float32."""


class TransferMemory(msgspec.Struct, frozen=True, array_like=True):
    """Memory that the engine shares with its workers: a transfer buffer (``kv_transfer.buffer.TransferBuffer``), or the
    host tier of the prefix cache (``kv.host_tier.HostTier``)."""

    path: str
    offset: int
    """Bytes before the first slot."""
    slots: int
    slot_tokens: int
    progress: int
    """Index of rank 0's progress (``ops.LayerExport.progress``) in the memory, taken as int64; the others' follow."""


class LoadModel(msgspec.Struct, array_like=True, tag=True):
    """Load the model. Answered with ``ModelInfo``, or with a ``PenstockError`` if an option or the checkpoint does
    not allow it."""

    weights: str = ""
    """Folder of its weights; empty for the model's own."""


class ProfileMemory(msgspec.Struct, array_like=True, tag=True):
    """Measure the memory available for the KV cache, beside weights and the activations of the largest step. Answered
    with ``MemoryProfile``."""


class InitCache(msgspec.Struct, array_like=True, tag=True):
    """Allocate the KV cache. Answered with None, or with a ``PenstockError`` if that is impossible."""

    blocks: int
    """Number of blocks on the device."""
    host_blocks: int
    """Number of blocks in host memory."""
    transfer: TransferMemory | None = None
    """The transfer buffer, for ``ExportKV`` and ``ImportKV``; None without KV transfers."""
    offload: TransferMemory | None = None
    """The host tier of the prefix cache, for ``RowUpdates.stores`` and ``loads``; None without it."""


class Propose(msgspec.Struct, array_like=True, tag=True):
    """Draft tokens for rows. Answered with a list for each row: its draft token ids, which may be fewer than asked for,
    or None if the drafter has failed for the row."""

    updates: RowUpdates
    rows: np.ndarray
    """``[rows]``"""
    lengths: np.ndarray
    """``[rows]``: tokens of each row, after which its draft begins."""
    counts: np.ndarray
    """``[rows]``: maximum number of draft tokens for each row; of a tree, its depth."""
    trees: np.ndarray = EMPTY
    """``[rows]``: 1 if the draft is a tree, of the shape that was configured, else 0; empty if none is. A tree is
    answered whole, with negative numbers for tokens that there are not."""


class LoadLoRA(msgspec.Struct, array_like=True, tag=True):
    """Read the LoRA adapter in folder ``path`` while steps go on, then put it into ``slot`` between two steps. Answered
    with ``LoRAAdapter.version``."""

    slot: int
    path: str


class UnloadLoRA(msgspec.Struct, array_like=True, tag=True):
    """Remove the adapter from ``slot``, which no row may use. Answered with None."""

    slot: int


class LoadWeights(msgspec.Struct, array_like=True, tag=True):
    """Read and pack the weights of folder ``path`` while steps go on, and keep them beside those in use. Answered with
    their version."""

    path: str
    """A folder of safetensors; empty for the weights that the workers have started with."""


class ChangeWeights(msgspec.Struct, array_like=True, tag=True):
    """Change the weights that steps use; no row may be running. Answered with None.

    ``swap`` uses those of ``LoadWeights`` from now on, and keeps the ones before; ``commit`` drops these; ``revert``
    goes back to them if they were swapped, and drops what ``LoadWeights`` has read.
    """

    action: Literal["swap", "commit", "revert"]


class FreeMemory(msgspec.Struct, array_like=True, tag=True):
    """Free the KV cache, and weights as the level of sleep says; no row may be running. Answered with whether the
    weights were dropped."""

    level: int
    """1 drops them on a GPU; 2 drops them anywhere."""


class AllocateCache(msgspec.Struct, array_like=True, tag=True):
    """Allocate the KV cache that ``FreeMemory`` freed. Answered with None."""


class DeviceMemory(msgspec.Struct, array_like=True, tag=True):
    """Answered with the bytes allocated on the GPU; 0 on CPUs."""


class ReadExpertLoad(msgspec.Struct, array_like=True, tag=True):
    """Answered with the tokens that chose each expert since the start, by layer: ``{layer: [experts]}``; of a pipeline
    stage those of its layers."""

    reset: bool = False
    """True if they are counted from 0 afterwards."""


class ExportKV(msgspec.Struct, array_like=True, tag=True):
    """Copy keys and values from the KV cache to the transfer buffer. Answered with None."""

    first_layer: int
    last_layer: int
    """Not included."""
    slots: np.ndarray
    """``[tokens]`` int64: slots of the KV cache."""
    places: np.ndarray
    """``[tokens]`` int64: slot of the transfer buffer times its tokens, plus the token's index in it."""


class ImportKV(msgspec.Struct, array_like=True, tag=True):
    """Copy keys and values from the transfer buffer to the KV cache. Fields and answer are those of ``ExportKV``."""

    first_layer: int
    last_layer: int
    slots: np.ndarray
    places: np.ndarray


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
)
"""Calls between two steps (``Executor.call``)."""
LONG_CALLS = (LoadModel, ProfileMemory, InitCache, LoadLoRA, LoadWeights, ChangeWeights, AllocateCache)
"""Calls that read files or capture graphs, which takes longer than a step."""


class ModelInfo(msgspec.Struct, frozen=True):
    """The model that the workers have loaded."""

    architecture: str
    vocab_size: int
    hidden_size: int
    has_lm_head: bool
    """True if it can generate; otherwise it only makes embeddings."""
    dtype: str
    quantization: str
    fingerprint: str
    """Equal for engines whose results are equal to the bit, given equal weights (``worker/fingerprint.py``)."""
    batch_invariant: bool
    weights_version: str
    """Identifies the contents of the checkpoint."""
    mtp_layers: int
    """Number of multi-token prediction layers loaded."""
    drafts: bool = False
    """True if the workers answer ``Propose``."""
    token_types: int = 0
    """Token types that the model knows (``EngineRequest.second_text``); 0 for none."""
    heads: tuple[str, ...] = ()
    """Names of the heads after pooling."""
    embedding_size: int = 0
    """Numbers in an embedding."""
    asynchronous: bool = False
    """True if the next step should be submitted while one is computed, since the device, not the host, computes it."""
    has_vision: bool = False
    """True if prompts may have images."""
    feature_bytes: int = 0
    """Bytes of an image's feature; 0 of a model that sees no images."""


class MemoryProfile(msgspec.Struct, frozen=True):
    """Memory available for the KV cache."""

    free: int
    """Bytes left by weights and by the activations of the largest step."""
    total: int
    """Bytes of the GPU's memory; 0 on CPUs."""
    block_bytes: int
    """Bytes of a block in the caches of the model and of the draft model together."""
    host_block_bytes: int
    """Bytes of a block in the host tier, which has the model's cache only."""


def sum_states(states: np.ndarray, total: np.ndarray | float = 0.0) -> np.ndarray | float:
    """The sum of hidden states ``[tokens, hidden]`` and ``total``, token by token in float64."""
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
    """A decoder of msgpack messages of type ``kind``. Arrays in them share the message's memory and are read-only."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_array)
