"""Placeholder tokens of images and videos. Chat templates write one per item; it is expanded to one per feature."""

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
    """Id of the placeholder of videos; -1: the model does not support videos."""
    start: int = -1
    end: int = -1
    """Ids of the tokens before and after a video's placeholder; -1: the model does not use them."""
    image_marker: int = -1
    """Id of the token that chat templates write for an image; -1: ``image``."""

    def check(self, token_ids: Sequence[int], num_images: int, num_videos: int) -> None:
        """Raise ``PenstockError`` (``invalid``) unless the prompt has one placeholder per image and per video."""
        self._check(token_ids, self.image if self.image_marker < 0 else self.image_marker, num_images, num_videos)

    def _check(self, token_ids: Sequence[int], image: int, num_images: int, num_videos: int) -> None:
        expected = {"images": (image, num_images)}
        if self.video >= 0:
            expected["videos"] = (self.video, num_videos)
        for kind, (placeholder, count) in expected.items():
            if (found := sum(token == placeholder for token in token_ids)) != count:
                message = f"the prompt has {found} placeholders for {count} {kind}: write one for each"
                raise invalid(kind, message, found)

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

        Raises ``PenstockError`` (``invalid``) unless there is one placeholder per image and per placed group of frames.
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
    """Images of one media item; empty for a video."""
    if isinstance(media, Crops):
        return [TokenizedImage(image) for image in media.images]
    if isinstance(media, ImageInput):
        return [TokenizedImage(media)]
    return [media] if isinstance(media, TokenizedImage) else []


def _videos(media: Sequence[Media]) -> Iterator[Video]:
    return (each for each in media if isinstance(each, Video))


def _placed_together(video: Video) -> list[Sequence[ImageInput]]:
    """Frames of a video, grouped by placeholder: one frame each with timestamps, otherwise all frames together."""
    return [[frame] for frame in video.frames] if video.timestamps else [video.frames]
