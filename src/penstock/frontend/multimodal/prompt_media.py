"""Images and videos of a model's prompts: limits, loading, and their places among the tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.config.options import ModelOptions
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.core.multimodal import ImageInput
from penstock.text import Tokenizer

from .kwargs import image_kwargs, merge_media_kwargs, video_kwargs
from .media import IMAGE, VIDEO, MediaLoader, MediaSource
from .placeholders import Media
from .processors import read_image_processor
from .prompts import Crops, spread_crops
from .video import Video
from .video_config import read_placeholders, read_video_processor


class PromptMedia:
    """The images and videos that a model's prompts may have; none for a text-only model.

    Args:
        folder: the checkpoint.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, options: ModelOptions) -> None:
        self._tokenizer = tokenizer
        self._options = options
        given = merge_media_kwargs(*options.media_kwargs())
        images = read_image_processor(folder, image_kwargs(given), options.max_image_pixels, tokenizer.token_to_id)
        limits = options.max_video_frames, options.max_video_pixels
        self.video_processor = read_video_processor(folder, video_kwargs(given), *limits) if images else None
        """None for a model without videos."""
        self._placeholders = read_placeholders(folder, images, self.video_processor) if images else None
        self._loader = MediaLoader(images, self.video_processor, options) if images else None
        self.sees_images, self.sees_videos = images is not None, self.video_processor is not None
        """Whether prompts may have images, and videos."""

    def check(self, sources: Sequence[MediaSource]) -> None:
        """Raise ``PenstockError`` where the model sees none, or a prompt has too many."""
        for kind, seen in ((IMAGE, self.sees_images), (VIDEO, self.sees_videos)):
            count = sum(source.kind == kind for source in sources)
            if count and not seen:
                words = "this model sees none, only text" if not self.sees_images else "this model sees none"
                raise PenstockError(Code.UNSUPPORTED, f"{kind}s: {words}", f"{kind}s")
            if count > (maximum := self._options.max_media(kind)):
                raise invalid(f"{kind}s", f"{count} are more than a prompt may have (limit_mm_per_prompt)", maximum)

    def load(self, source: MediaSource, kwargs: Mapping[str, Any] | None = None, num_images: int = 1) -> Media:
        """Fetch, decode and resize an image or a video, which takes long. Its place in the prompt is not set.

        Args:
            kwargs: ``mm_processor_kwargs`` of the request.
            num_images: of the prompt.

        Raises ``PenstockError`` with one sentence where that is not possible.
        """
        assert self._loader, "check first"
        return self._loader.load(source, kwargs, num_images)

    def check_placeholders(self, token_ids: Sequence[int], sources: Sequence[MediaSource]) -> None:
        """Raise ``PenstockError`` (``invalid``) where a prompt has not as many placeholders as images and videos."""
        assert self._placeholders
        num_videos = sum(source.kind == VIDEO for source in sources)
        self._placeholders.check(token_ids, len(sources) - num_videos, num_videos)

    def place(
        self, token_ids: Sequence[int], text: str | None, media: Sequence[Media], add_special_tokens: bool = False
    ) -> tuple[list[int], tuple[ImageInput, ...]]:
        """The tokens of a prompt with all placeholders, and its images and frames of videos with their places.

        Args:
            token_ids: with as many placeholders as images and videos.
            text: that ``token_ids`` are of; None where it is not known.
            add_special_tokens: as ``token_ids`` were encoded.
        """
        placeholders, tokenizer = self._placeholders, self._tokenizer
        assert placeholders
        if any(isinstance(each, Video) and each.timestamps for each in media):
            if text is None:
                token_ids = placeholders.spread(token_ids, media, lambda words: tokenizer.encode(words, False))
            else:  # a timestamp may share a token with the text before it
                marks = placeholders.video, placeholders.start, placeholders.end
                text = placeholders.spread_text(text, media, {mark: tokenizer.id_to_token(mark) for mark in marks})
                token_ids = tokenizer.encode(text, add_special_tokens)
        if text is not None and any(isinstance(each, Crops) for each in media):
            marker = tokenizer.id_to_token(placeholders.image_marker)
            token_ids = tokenizer.encode(spread_crops(text, marker, media), add_special_tokens)
        return placeholders.place(token_ids, media)
