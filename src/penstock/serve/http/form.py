"""Reading of forms (``multipart/form-data``) with a file, with limits on size and time."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from importlib.util import find_spec
from typing import NamedTuple

from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from .body import body_parts

OVERHEAD = 2**16
"""Maximum size in bytes of a form without its file, and of each field."""
MAX_FIELDS = 32
"""Maximum number of fields other than the file."""
CHARSET = re.compile(r";\s*charset=[^;]*", re.IGNORECASE)


class Form(NamedTuple):
    """A form and its field ``file``."""

    fields: FormData
    file: UploadFile
    size: int
    """Size of the file in bytes."""


@asynccontextmanager
async def read_form(request: Request, max_size: int, timeout: float) -> AsyncIterator[Form]:
    """Context manager with the form of a request. A large file is stored on disk until the context is left.

    Args:
        max_size: maximum size of the file in bytes.
        timeout: maximum time between two parts of the body in seconds.

    Raises ``PenstockError``: ``invalid`` if the body is no form, cannot be read, or has no file; ``too_large``;
    ``unsupported`` if python-multipart is not installed; and as ``body_parts``.
    """
    content_type = request.headers.get("content-type", "")
    if not content_type.lower().startswith("multipart/form-data"):
        raise invalid("file", "is missing: send it as multipart/form-data")
    if find_spec("python_multipart") is None:
        message = "file: forms require python-multipart, which is not installed: pip install python-multipart"
        raise PenstockError(Code.UNSUPPORTED, message, "file")
    headers = Headers({"content-type": CHARSET.sub("", content_type)})  # UTF-8, as other charsets may yield surrogates
    try:
        async with aclosing(body_parts(request, max_size + OVERHEAD, timeout)) as parts:
            parser = MultiPartParser(headers, parts, max_files=1, max_fields=MAX_FIELDS, max_part_size=OVERHEAD)
            fields = await parser.parse()
    except MultiPartException as error:
        raise invalid("file", f"the form cannot be read: {error.message}") from error
    except PenstockError as error:
        if error.failure.code is Code.TOO_LARGE:
            raise PenstockError(
                Code.TOO_LARGE, f"file: must have at most {max_size} bytes", "file", max_size
            ) from error
        raise
    try:
        file = fields.get("file")
        if not isinstance(file, UploadFile):
            raise invalid("file", "is missing: send the form field file")
        yield Form(fields, file, file.size or 0)
    finally:
        await fields.close()
