"""Placeholder tokens of images and videos: one per item from the chat template, expanded to one per feature."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from penstock.core.errors import invalid
from penstock.core.multimodal import ImageInput

from .prompts import Crops, TokenizedImage
from .video import Video

Media = ImageInput | TokenizedImage | Crops | Video
"""Image or video without its offset in the prompt."""


class Placeholders(msgspec.Struct, frozen=True):
    """Ids of a model's placeholder tokens of images and videos."""

    image: int
    video: int = -1
    """-1 for a model without videos."""
    start: int = -1
    end: int = -1
    """Tokens before and after a placeholder."""
    image_marker: int = -1
    """Token that chat templates write for an image, if it differs from ``image``."""

    def check(self, token_ids: Sequence[int], num_images: int, num_videos: int) -> None:
        """Raise ``PenstockError`` (``invalid``) if the number of placeholders differs from that of images or videos."""
        self._check(token_ids, self.image if self.image_marker < 0 else self.image_marker, num_images, num_videos)

    def _check(self, token_ids: Sequence[int], image: int, num_images: int, num_videos: int) -> None:
        expected = {"images": (image, num_images)}
        if self.video >= 0:
            expected["videos"] = (self.video, num_videos)
        for kind, (placeholder, count) in expected.items():
            if (found := sum(token == placeholder for token in token_ids)) != count:
                raise invalid(kind, f"the prompt has {found} placeholders for {count} {kind}", found)

    def expand_timestamps(
        self, token_ids: Sequence[int], media: Sequence[Media], encode: Callable[[str], Sequence[int]]
    ) -> list[int]:
        """Replace the placeholder of each video that has timestamps with one placeholder per frame, each after its
        timestamp and between ``start`` and ``end``.

        Args:
            encode: converts a timestamp to token ids.
        """
        tokens: list[int] = []
        videos = _videos(media)
        positions = iter(range(len(token_ids)))
        for i in positions:
            if token_ids[i] != self.video or not (video := next(videos)).timestamps:
                tokens.append(token_ids[i])
                continue
            if tokens[-1:] == [self.start] and list(token_ids[i + 1 : i + 2]) == [self.end]:
                tokens.pop()
                next(positions)
            for timestamp in video.timestamps:
                tokens += [*encode(timestamp), self.start, self.video, self.end]
        return tokens

    def expand_timestamps_in_text(self, text: str, media: Sequence[Media], names: Mapping[int, str]) -> str:
        """``expand_timestamps`` for a prompt given as text.

        Args:
            names: texts of the placeholder tokens by token id.
        """
        name, around = names[self.video], f"{names[self.start]}{names[self.video]}{names[self.end]}"
        videos = _videos(media)
        parts = text.split(name)
        result = parts[0]
        for part in parts[1:]:
            if not (video := next(videos)).timestamps:
                result += name + part
                continue
            whole = "".join(timestamp + around for timestamp in video.timestamps)
            if result.endswith(names[self.start]) and part.startswith(names[self.end]):
                result = result.removesuffix(names[self.start]) + whole + part.removeprefix(names[self.end])
            else:
                result += whole + part
        return result

    def place(self, token_ids: Sequence[int], media: Sequence[Media]) -> tuple[list[int], tuple[ImageInput, ...]]:
        """Expand each placeholder to one token per feature, after ``expand_timestamps``. Returns the prompt, and the
        images and frames with their offsets.

        Raises ``PenstockError`` (``invalid``) if the number of placeholders differs from that of images and frames.
        """
        images = [each for one in media for each in _images(one)]
        groups = [group for video in _videos(media) for group in _placed_together(video)]
        self._check(token_ids, self.image, len(images), len(groups))
        tokens: list[int] = []
        placed: list[ImageInput] = []
        next_image, next_group = iter(images), iter(groups)
        for token in token_ids:
            if token == self.image:
                image = next(next_image)
                placed.append(msgspec.structs.replace(image.image, offset=len(tokens) + image.first))
                tokens += image.token_ids or [token] * image.image.length
                continue
            elif token == self.video:
                group: Sequence[ImageInput] = next(next_group)
            else:
                tokens.append(token)
                continue
            for frame in group:
                placed.append(msgspec.structs.replace(frame, offset=len(tokens)))
                tokens += [token] * frame.length
        return tokens, tuple(placed)


def _images(media: Media) -> list[TokenizedImage]:
    """The images of a medium; none for a video."""
    if isinstance(media, Crops):
        return [TokenizedImage(image) for image in media.images]
    if isinstance(media, ImageInput):
        return [TokenizedImage(media)]
    return [media] if isinstance(media, TokenizedImage) else []


def _videos(media: Sequence[Media]) -> Iterator[Video]:
    return (each for each in media if isinstance(each, Video))


def _placed_together(video: Video) -> list[Sequence[ImageInput]]:
    """Frames per placeholder of a video: one if it has timestamps, else all."""
    return [[frame] for frame in video.frames] if video.timestamps else [video.frames]
