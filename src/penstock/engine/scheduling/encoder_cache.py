"""Which images' features the workers keep, and which images the next step has to encode."""

from __future__ import annotations

from collections import OrderedDict

from penstock.core import EngineRequest
from penstock.core.multimodal import ImageInput


class EncoderCache:
    """The scheduler's view of the features that the workers keep, by content of the images, the least recently used
    first. Steps are computed in order, so what a step finds there is decided when it is planned.

    Nothing is held from step to step: features that were evicted are computed again, to the same bits, as the request
    keeps its pixels.

    Args:
        capacity: features that are kept, in tokens.
        step_budget: features that a step may encode; of a single image more.
    """

    def __init__(self, capacity: int, step_budget: int) -> None:
        self._capacity = capacity
        self._step_budget = step_budget
        self.num_encoded = self.num_hits = 0
        """Number of images encoded, and of those found, since the engine started."""
        self._lengths: OrderedDict[bytes, int] = OrderedDict()
        self._used = 0
        self.is_used = False
        """True if any request had images so far."""
        self._needed: set[bytes] = set()
        """Images of the step that is being planned, which must stay."""
        self._evicted: dict[bytes, None] = {}
        self._to_encode: dict[bytes, ImageInput] = {}

    @property
    def num_entries(self) -> int:
        """Number of images whose features are kept."""
        return len(self._lengths)

    @property
    def num_tokens(self) -> int:
        """Their features."""
        return self._used

    def begin_step(self) -> None:
        """A step is about to be planned."""
        self._needed.clear()

    def fit(self, request: EngineRequest, start: int, count: int, budget: int) -> int:
        """Make room for the images among tokens ``start`` to ``start + count`` of a request, and have those encoded
        that are not there. Returns how many tokens from ``start`` on the step can compute: up to the first image for
        which there is no room; and no part of an image with attention in both directions, but all of it, for which the
        step may have more tokens, within ``budget``."""
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
        return sum(image.length for image in self._to_encode.values())

    @property
    def num_patches(self) -> int:
        """Patches of the images that the next step encodes."""
        return sum(image.num_patches for image in self._to_encode.values())

    def _evict(self, key: bytes) -> None:
        self._used -= self._lengths.pop(key)
        if self._to_encode.pop(key, None) is None:
            self._evicted[key] = None

    def clear(self) -> None:
        """Have all features dropped: they are of other weights, or a step has failed that should have made them."""
        for key in list(self._lengths):
            self._evict(key)

    def take(self) -> tuple[list[bytes], list[ImageInput]]:
        """What the next message tells the workers: ``StepInput.evicted_images`` and ``encoded_images``."""
        taken = list(self._evicted), list(self._to_encode.values())
        self._evicted, self._to_encode = {}, {}
        return taken
