"""Images from URLs: data in the URL itself, web servers, and, where they are allowed, local files."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes, urlsplit
from urllib.request import url2pathname

from penstock.config.options import ModelOptions
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.core.multimodal import ImageInput

from .decoding import as_image, decode_image, require_pillow
from .guarded_http import FetchError, ForbiddenAddressError, download
from .processor import ImageProcessor


class ImageSource(NamedTuple):
    """Where an image comes from."""

    value: Any
    """A URL; or an image itself, of Python code."""
    field: str
    """What errors name."""


class MediaLoader:
    """Makes images of sources, within the limits of the options. All of it takes long: call it in a thread.

    Args:
        processor: of the model.
    """

    def __init__(self, processor: ImageProcessor, options: ModelOptions) -> None:
        self._processor = processor
        self._options = options
        self._root = Path(options.allowed_local_media_path).resolve() if options.allowed_local_media_path else None
        self._domains = frozenset(name.lower() for name in options.allowed_media_domains)

    def load(self, source: ImageSource, kwargs: dict[str, Any] | None = None) -> ImageInput:
        """Fetch, decode and resize an image.

        Args:
            kwargs: ``mm_processor_kwargs`` of the request.

        Raises ``PenstockError`` with one sentence where it cannot be had, is broken, or exceeds a limit.
        """
        require_pillow()
        processor = self._processor.with_kwargs(kwargs) if kwargs else self._processor
        limit = self._options.max_image_pixels
        if isinstance(source.value, str):
            image = decode_image(self._fetch(source.value, source.field), limit, source.field)
        else:
            image = as_image(source.value, limit, source.field)
        try:
            return processor(image)
        except PenstockError as error:
            failure = error.failure
            raise PenstockError(
                failure.code, f"{source.field}: {failure.message}", source.field, failure.limit
            ) from error

    def _fetch(self, url: str, field: str) -> bytes:
        """The bytes that a URL names."""
        try:
            scheme = urlsplit(url).scheme.lower()
        except ValueError as error:
            raise invalid(field, f"is no URL: {error}") from error
        if scheme == "data":
            return self._data(url, field)
        if scheme in ("https", "http"):
            return self._download(url, field)
        if scheme == "file":
            return self._file(url, field)
        raise invalid(field, "must be a URL that begins with data:, https: or http:")

    def _data(self, url: str, field: str) -> bytes:
        head, comma, body = url[5:].partition(",")
        if not comma:
            raise invalid(field, "has a data URL without a comma before the data")
        limit = self._options.max_image_size
        if len(body) > 4 * limit:
            raise self._too_large(field)
        try:
            data = base64.b64decode(body, validate=True) if head.endswith(";base64") else unquote_to_bytes(body)
        except (binascii.Error, ValueError) as error:
            raise invalid(field, f"has a data URL that is not base64: {error}") from error
        if len(data) > limit:
            raise self._too_large(field)
        return data

    def _download(self, url: str, field: str) -> bytes:
        timeout = self._options.media_timeout
        try:
            return download(url, self._options.max_image_size, timeout, self._domains)
        except PenstockError as error:
            if error.failure.code is Code.TOO_LARGE:
                raise self._too_large(field) from error
            raise invalid(field, f"did not come within {timeout:g} seconds (media_timeout)", timeout) from error
        except ForbiddenAddressError as error:
            raise invalid(field, f"is not fetched: {error}") from error
        except FetchError as error:
            raise invalid(field, f"cannot be fetched: {error!s:.200}") from error

    def _file(self, url: str, field: str) -> bytes:
        if self._root is None:
            words = "this server reads no local files (allowed_local_media_path)"
            raise PenstockError(Code.UNSUPPORTED, f"{field}: {words}", field)
        try:
            path = Path(url2pathname(urlsplit(url).path)).resolve()
            if not path.is_relative_to(self._root) or not path.is_file():
                raise invalid(field, "names no file in allowed_local_media_path")
            with path.open("rb") as file:
                data = file.read(self._options.max_image_size + 1)
        except (OSError, ValueError) as error:
            raise invalid(field, "names no file in allowed_local_media_path") from error
        if len(data) > self._options.max_image_size:
            raise self._too_large(field)
        return data

    def _too_large(self, field: str) -> PenstockError:
        limit = self._options.max_image_size
        return invalid(field, f"has more than {limit} bytes (max_image_size)", limit)
