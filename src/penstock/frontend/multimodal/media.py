"""Loader of images and videos from data URLs, web servers, and local files (``allowed_local_media_path``)."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes, urlsplit
from urllib.request import url2pathname

from penstock.config.options import ModelOptions
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from .decoding import as_image, decode_image, require_pillow
from .guarded_http import FetchError, ForbiddenAddressError, download
from .kwargs import image_kwargs, video_kwargs
from .placeholders import Media
from .prompts import ImageProcessor
from .video import Video, VideoProcessor
from .video_decoding import decode_video
from .video_frames import process_frames

IMAGE, VIDEO = "image", "video"


class MediaSource(NamedTuple):
    """Source of an image or a video."""

    value: Any
    """URL; in the Python interface also an image or a video object."""
    field: str
    """Field of the request, for error messages."""
    kind: str = IMAGE


class MediaLoader:
    """Loads images and videos, within the limits of the options. Loading is slow: call it in a thread.

    Args:
        images, videos: the model's processors; ``videos`` is None if the model does not support videos.
    """

    def __init__(self, images: ImageProcessor, videos: VideoProcessor | None, options: ModelOptions) -> None:
        self._images = images
        self._videos = videos
        self._options = options
        self._root = Path(options.allowed_local_media_path).resolve() if options.allowed_local_media_path else None
        self._domains = frozenset(name.lower() for name in options.allowed_media_domains)

    def load(self, source: MediaSource, kwargs: Mapping[str, Any] | None = None, num_images: int = 1) -> Media:
        """Fetch, decode and resize an image or a video.

        Args:
            kwargs: ``mm_processor_kwargs`` of the request.
            num_images: number of images in the prompt.

        Raises ``PenstockError`` if it cannot be fetched, is damaged, or exceeds a limit.
        """
        require_pillow()
        given = kwargs or {}
        if source.kind == VIDEO:
            assert self._videos, "the model does not support videos"
            processor = self._videos.with_kwargs(video_kwargs(given)) if given else self._videos
            return self._video(source, processor)
        images = self._images.with_kwargs(image_kwargs(given)) if given else self._images
        limit = self._options.max_image_pixels
        if isinstance(source.value, str):
            data = self._fetch(source.value, source.field, "max_image_size")
            image = decode_image(data, limit, source.field)
        else:
            image = as_image(source.value, limit, source.field)
        with _field_in_errors(source.field):
            return images(image, num_images)

    def _video(self, source: MediaSource, processor: VideoProcessor) -> Video:
        value, options = source.value, self._options
        if isinstance(value, str):
            value = self._fetch(value, source.field, "max_video_size")
        elif isinstance(value, Path):
            value = self._read(value, source.field, "max_video_size")
        with _field_in_errors(source.field):
            if isinstance(value, bytes):
                return decode_video(value, processor, options.max_image_pixels, options.video_timeout)
            return process_frames(value, processor, options.max_image_pixels)

    def _fetch(self, url: str, field: str, limit: str) -> bytes:
        """Fetch a URL.

        Args:
            limit: name of the option with the size limit in bytes.
        """
        try:
            scheme = urlsplit(url).scheme.lower()
        except ValueError as error:
            raise invalid(field, f"is not a valid URL: {error}") from error
        if scheme == "data":
            return self._data(url, field, limit)
        if scheme in ("https", "http"):
            return self._download(url, field, limit)
        if scheme == "file":
            return self._file(url, field, limit)
        raise invalid(field, f"must be a URL that begins with data:, https: or http:; it begins with {url[:20]!r}")

    def _data(self, url: str, field: str, limit: str) -> bytes:
        head, comma, body = url[5:].partition(",")
        if not comma:
            raise invalid(field, "has a data URL without a comma before the data (data:image/png;base64,…)")
        size = self._limit(limit)
        if len(body) > 4 * size:
            raise self._too_large(field, limit)
        try:
            data = base64.b64decode(body, validate=True) if head.endswith(";base64") else unquote_to_bytes(body)
        except (binascii.Error, ValueError) as error:
            raise invalid(field, f"has a data URL that is not base64: {error}") from error
        if len(data) > size:
            raise self._too_large(field, limit)
        return data

    def _download(self, url: str, field: str, limit: str) -> bytes:
        timeout = self._options.media_timeout
        try:
            return download(url, self._limit(limit), timeout, self._domains)
        except PenstockError as error:
            if error.failure.code is Code.TOO_LARGE:
                raise self._too_large(field, limit) from error
            message = f"was not received within {timeout:g} seconds (media_timeout)"
            raise invalid(field, message, timeout) from error
        except ForbiddenAddressError as error:
            raise invalid(field, f"is not allowed: {error}") from error
        except FetchError as error:
            raise invalid(field, f"cannot be fetched: {error!s:.200}") from error

    def _file(self, url: str, field: str, limit: str) -> bytes:
        if self._root is None:
            message = "local files are disabled on this server (allowed_local_media_path)"
            raise PenstockError(Code.UNSUPPORTED, f"{field}: {message}", field)
        try:
            path = Path(url2pathname(urlsplit(url).path)).resolve()
            if not path.is_relative_to(self._root) or not path.is_file():
                raise invalid(field, "is not a file in allowed_local_media_path")
            return self._read(path, field, limit)
        except (OSError, ValueError) as error:
            raise invalid(field, "is not a file in allowed_local_media_path") from error

    def _read(self, path: Path, field: str, limit: str) -> bytes:
        try:
            with path.open("rb") as file:
                data = file.read(self._limit(limit) + 1)
        except OSError as error:
            raise invalid(field, f"cannot be read: {error.strerror}") from error
        if len(data) > self._limit(limit):
            raise self._too_large(field, limit)
        return data

    def _limit(self, name: str) -> int:
        return int(getattr(self._options, name))

    def _too_large(self, field: str, limit: str) -> PenstockError:
        return invalid(field, f"has more than {self._limit(limit)} bytes ({limit})", self._limit(limit))


@contextmanager
def _field_in_errors(field: str) -> Iterator[None]:
    """Context that replaces the field of an error, such as ``image``, with ``field``."""
    try:
        yield
    except PenstockError as error:
        failure = error.failure
        message = failure.message.removeprefix(f"{failure.field}: ")
        raise PenstockError(failure.code, f"{field}: {message}", field, failure.limit) from error
