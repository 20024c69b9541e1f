"""Static files of the web page: content, compression, caching, and the libraries that the build has fetched."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

STATIC = Path(__file__).with_name("static")
PAGES = {"/": "index.html", "/docs": "docs.html"}
"""HTML documents by path."""
LIBRARIES = Path(__file__).parent / "libraries" / "files"
"""Folder of the fetched libraries; missing if the package was built without npm."""
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".woff2": "font/woff2",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; base-uri 'self'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy: the page never executes model output and contacts no other host."""
REVALIDATE = "no-cache"
IMMUTABLE = "public, max-age=31536000, immutable"
"""Cache-Control of libraries, whose addresses have the hash of their content."""


@dataclass(frozen=True)
class PageFile:
    """A file that the server sends to browsers.

    Args:
        path: path on the server, without the query.
    """

    path: str
    content: bytes
    suffix: str
    cache_control: str = REVALIDATE

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.content).hexdigest()[:32]

    @cached_property
    def compressed(self) -> bytes:
        """Content compressed with gzip. Computed at the first request."""
        return gzip.compress(self.content, mtime=0)

    async def answer(self, request: Request) -> Response:
        """Answer a request: 304 if the client's ETag matches, compressed if the client accepts gzip."""
        is_gzip = "gzip" in request.headers.get("accept-encoding", "")
        etag = f'"{self.digest}{"-gzip" if is_gzip else ""}"'
        headers = {
            "etag": etag,
            "cache-control": self.cache_control,
            "vary": "accept-encoding",
            "content-security-policy": POLICY,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        }
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        if is_gzip:
            headers["content-encoding"] = "gzip"
        return Response(
            self.compressed if is_gzip else self.content, media_type=MEDIA_TYPES[self.suffix], headers=headers
        )


def static_files() -> Iterator[PageFile]:
    """The page's scripts and style sheets."""
    for path in sorted(STATIC.rglob("*")):
        if path.suffix in (".css", ".js"):
            name = path.relative_to(STATIC).as_posix()
            yield PageFile(f"/web/{name}", path.read_bytes(), path.suffix)


def library_files() -> Iterator[PageFile]:
    """The libraries that the build has fetched."""
    for path in sorted(LIBRARIES.rglob("*")):
        if path.suffix in MEDIA_TYPES:
            name = path.relative_to(LIBRARIES).as_posix()
            yield PageFile(f"/web/libraries/{name}", path.read_bytes(), path.suffix, IMMUTABLE)


def page_paths() -> frozenset[str]:
    """Paths of the page's files."""
    return frozenset((*PAGES, *(file.path for file in (*static_files(), *library_files()))))


def describe_libraries() -> str:
    """Line for ``penstock doctor``."""
    if not LIBRARIES.exists():
        return "plain text only: this build was made without npm (install Node.js with npm and reinstall penstock)"
    names = sorted({path.parent.relative_to(LIBRARIES).as_posix() for path in LIBRARIES.rglob("LICENSE")})
    return f"with {', '.join(names)}"
