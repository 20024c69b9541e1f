"""Images and videos of a model's prompts: limits, loading, and placeholders."""

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
from .prompts import Crops, expand_crops
from .video import Video
from .video_config import read_placeholders, read_video_processor


class PromptMedia:
    """Loads images and videos into a model's prompts, if the model supports them.

    Args:
        folder: folder of the checkpoint.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, options: ModelOptions) -> None:
        self._tokenizer = tokenizer
        self._options = options
        given = merge_media_kwargs(*options.media_kwargs())
        images = read_image_processor(folder, image_kwargs(given), options.max_image_pixels, tokenizer.token_to_id)
        limits = options.max_video_frames, options.max_video_pixels
        self.video_processor = read_video_processor(folder, video_kwargs(given), *limits) if images else None
        """Video processor; None: the model does not support videos."""
        self._placeholders = read_placeholders(folder, images, self.video_processor) if images else None
        self._loader = MediaLoader(images, self.video_processor, options) if images else None
        self.sees_images, self.sees_videos = images is not None, self.video_processor is not None
        """True if prompts may have images, and True if prompts may have videos."""

    def check(self, sources: Sequence[MediaSource]) -> None:
        """Raise ``PenstockError`` if the model does not support these media, or the prompt has too many of them."""
        for kind, seen in ((IMAGE, self.sees_images), (VIDEO, self.sees_videos)):
            count = sum(source.kind == kind for source in sources)
            if count and not seen:
                message = f"{kind}s: are not supported by this model{'' if self.sees_images else ', only text is'}"
                raise PenstockError(Code.UNSUPPORTED, message, f"{kind}s")
            if count > (maximum := self._options.max_media(kind)):
                message = f"the prompt has {count} {kind}s, and at most {maximum} are allowed (limit_mm_per_prompt)"
                raise invalid(f"{kind}s", message, maximum)

    def load(self, source: MediaSource, kwargs: Mapping[str, Any] | None = None, num_images: int = 1) -> Media:
        """Fetch, decode and resize an image or a video; call it in a thread. The offset in the prompt is not set.

        Args:
            kwargs: ``mm_processor_kwargs`` of the request.
            num_images: number of images in the prompt.

        Raises ``PenstockError`` if it cannot be fetched, is damaged, or exceeds a limit.
        """
        assert self._loader, "call check first"
        return self._loader.load(source, kwargs, num_images)

    def check_placeholders(self, token_ids: Sequence[int], sources: Sequence[MediaSource]) -> None:
        """Raise ``PenstockError`` (``invalid``) unless the prompt has one placeholder per image and per video."""
        assert self._placeholders
        num_videos = sum(source.kind == VIDEO for source in sources)
        self._placeholders.check(token_ids, len(sources) - num_videos, num_videos)

    def place(
        self,
        token_ids: Sequence[int],
        text: str | None,
        media: Sequence[Media],
        add_special_tokens: bool = False,
        has_breaks: bool = False,
    ) -> tuple[list[int], tuple[ImageInput, ...]]:
        """Expand the placeholders of a prompt. Returns its token ids, and its images and video frames with offsets.

        Args:
            token_ids: prompt with one placeholder per image and video.
            text: text of the prompt; None if unknown.
            add_special_tokens, has_breaks: values with which ``token_ids`` was encoded.
        """
        placeholders, tokenizer = self._placeholders, self._tokenizer
        assert placeholders
        if any(isinstance(each, Video) and each.timestamps for each in media):
            if text is None:
                token_ids = placeholders.expand_timestamps(token_ids, media, lambda text: tokenizer.encode(text, False))
            else:  # a timestamp may share a token with the text before it
                ids = placeholders.video, placeholders.start, placeholders.end
                names = {token_id: tokenizer.id_to_token(token_id) for token_id in ids}
                text = placeholders.expand_timestamps_in_text(text, media, names)
                token_ids = tokenizer.encode(text, add_special_tokens, has_breaks)
        if text is not None and any(isinstance(each, Crops) for each in media):
            marker = tokenizer.id_to_token(placeholders.image_marker)
            token_ids = tokenizer.encode(expand_crops(text, marker, media), add_special_tokens, has_breaks)
        return placeholders.place(token_ids, media)
