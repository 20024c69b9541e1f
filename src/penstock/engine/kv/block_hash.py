"""Hashes for prefix caching: one per full block, of the tokens from the start of the sequence to the block's end."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence

from penstock.core.multimodal import ImageInput

HASH_BYTES = 16
"""Bytes of a hash. 128 bits make a collision, which would mix the KV of different prompts or users, improbable."""


def root_hash(weights: str, adapter: str = "", salt: str = "") -> bytes:
    """Parent hash of the first block: a hash of everything but the tokens on which keys and values depend.

    Args:
        weights: version of the weights.
        adapter: LoRA adapter (``EngineRequest.adapter``).
        salt: ``EngineRequest.cache_salt``.
    """
    seed = hashlib.blake2b(digest_size=HASH_BYTES)
    for part in (weights, adapter, salt):
        encoded = part.encode()
        seed.update(len(encoded).to_bytes(8, "little") + encoded)
    return seed.digest()


def extend_block_hashes(
    block_hashes: list[bytes],
    start: bytes,
    tokens: Sequence[int],
    block_size: int,
    images: Sequence[ImageInput] = (),
) -> None:
    """Append the hashes of the full blocks of ``tokens`` that ``block_hashes`` lacks.

    Hashes of blocks with image placeholders include the contents, positions and times of the images, since all
    placeholders are the same token.

    Args:
        block_hashes: entry i is the hash of the first ``(i + 1) * block_size`` tokens.
        start: parent hash of the first block (``root_hash``); unused if ``block_hashes`` is not empty.
        images: images of the prompt, which is the beginning of ``tokens``.
    """
    for begin in range(len(block_hashes) * block_size, len(tokens) // block_size * block_size, block_size):
        block = array("I", tokens[begin : begin + block_size]).tobytes()
        for image in images:
            if image.offset < begin + block_size and begin < image.end:
                block += image.content_hash + (image.offset - begin).to_bytes(8, "little", signed=True)
                block += image.time.to_bytes(8, "little") + bytes([image.continues])
        block_hashes.append(
            hashlib.blake2b(block, key=block_hashes[-1] if block_hashes else start, digest_size=HASH_BYTES).digest()
        )


def state_hashes(block_hash: bytes, count: int, layout: bytes = b"") -> Iterator[bytes]:
    """Yield the hashes of the ``count`` slots that hold the recurrent state after a block.

    Args:
        block_hash: hash of the block, which may be partial.
        layout: distinguishes states with other bytes, for example of another number of ranks.
    """
    for number in range(count):
        yield hashlib.blake2b(b"state" + layout + number.to_bytes(4), key=block_hash, digest_size=HASH_BYTES).digest()
