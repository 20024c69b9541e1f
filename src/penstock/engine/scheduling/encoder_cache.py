"""The encoder cache: image features that the workers keep, and images that the next step has to encode."""

from __future__ import annotations

from collections import OrderedDict

from penstock.core import EngineRequest
from penstock.core.multimodal import ImageInput


class EncoderCache:
    """The scheduler's view of the workers' cache of image features: an LRU cache by content of the image. Steps are
    computed in order, so the contents of the cache at a step are known when the step is planned.

    No features are pinned between steps: evicted features are encoded again, bit-identical, from the request's pixels.

    Args:
        capacity: maximum size of the cached features, in tokens.
        step_budget: maximum size of the features encoded in a step, in tokens; a single image may exceed it.
    """

    def __init__(self, capacity: int, step_budget: int) -> None:
        self._capacity = capacity
        self._step_budget = step_budget
        self.num_encoded = self.num_hits = 0
        """Number of encoded images, and number of cache hits, since the engine started."""
        self._lengths: OrderedDict[bytes, int] = OrderedDict()
        """Number of tokens of each cached image, by content hash, least recently used first."""
        self._used = 0
        self.is_used = False
        """True once a request had images."""
        self._needed: set[bytes] = set()
        """Images of the step being planned, which must not be evicted."""
        self._evicted: dict[bytes, None] = {}
        """Ordered set of evicted images that the workers have not dropped yet."""
        self._to_encode: dict[bytes, ImageInput] = {}
        """Images that the next message asks the workers to encode."""

    @property
    def num_entries(self) -> int:
        """Number of images whose features are cached."""
        return len(self._lengths)

    @property
    def num_tokens(self) -> int:
        """Size of the cached features, in tokens."""
        return self._used

    def begin_step(self) -> None:
        """Start planning a step."""
        self._needed.clear()

    def fit(self, request: EngineRequest, start: int, count: int, budget: int) -> int:
        """Cache the images among tokens ``start`` to ``start + count`` of a request, and plan to encode missing ones.

        Returns the number of tokens that the step can compute from ``start`` on: up to the first image that does not
        fit. An image with bidirectional attention is not split: to include its end, the number may grow to ``budget``.
        """
        self.is_used = True
        for image in request.images:
            if image.offset >= start + count:
                break
            if image.end <= start:
                continue
            if image.bidirectional and image.end > start + count:
                if image.end > start + budget:
                    return max(image.offset - start, 0)
                count = image.end - start
            if not self._add(image):
                return max(image.offset - start, 0)
        return count

    def _add(self, image: ImageInput) -> bool:
        """Cache an image for the step being planned. Returns False if it does not fit."""
        key = image.content_hash
        if key in self._lengths:
            self._lengths.move_to_end(key)
            self.num_hits += key not in self._needed
            self._needed.add(key)
            return True
        if self._to_encode and self._num_to_encode + image.length > self._step_budget:
            return False
        unneeded = (key for key in list(self._lengths) if key not in self._needed)
        while self._used + image.length > self._capacity:
            if (victim := next(unneeded, None)) is None:
                return False
            self._evict(victim)
        self._lengths[key] = image.length
        self._used += image.length
        self._to_encode[key] = image
        self._needed.add(key)
        self.num_encoded += 1
        return True

    @property
    def _num_to_encode(self) -> int:
        """Size of the images to encode, in tokens."""
        return sum(image.length for image in self._to_encode.values())

    @property
    def num_patches(self) -> int:
        """Number of patches of the images that the next step encodes."""
        return sum(image.num_patches for image in self._to_encode.values())

    def _evict(self, key: bytes) -> None:
        self._used -= self._lengths.pop(key)
        if self._to_encode.pop(key, None) is None:
            self._evicted[key] = None

    def clear(self) -> None:
        """Evict all features: after a weight update, or after a failed step, whose features are missing."""
        for key in list(self._lengths):
            self._evict(key)

    def take(self) -> tuple[list[bytes], list[ImageInput]]:
        """Take ``StepInput.evicted_images`` and ``StepInput.encoded_images`` for the next message to the workers."""
        taken = list(self._evicted), list(self._to_encode.values())
        self._evicted, self._to_encode = {}, {}
        return taken
