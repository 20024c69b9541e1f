"""Downloads from the ModelScope hub, through the HTTP API that the ``modelscope`` client uses."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from urllib.parse import quote, urlencode

import httpx2
import msgspec

from penstock.core.errors import Code, PenstockError, invalid

from .downloader import MAX_WORKERS
from .http import HTTPRanges, get_json, status_of
from .names import ModelName, not_a_name
from .remote import InterruptedTransferError, Listing, RemoteFile, check_paths, unavailable

ENDPOINT = "https://www.modelscope.cn"
MAIN = "master"
NAME = re.compile(r"[\w.-]+/[\w.-]+")
SHA256 = re.compile(r"[0-9a-f]{64}")
MAX_LISTING_BYTES = 2**24
MAX_FILES = 3000
"""Number of files at which the API silently truncates a listing."""
ADVICE = "check the network and MODELSCOPE_ENDPOINT, or give a folder"


class _File(msgspec.Struct):
    """File in a listing."""

    Path: str
    Type: str = "blob"
    Size: int = 0
    Sha256: str | None = ""
    Revision: str | None = ""


class ModelScope:
    """``Source``: a model on ModelScope.

    Args:
        token: token for private models; None: ``MODELSCOPE_API_TOKEN``.
        endpoint: address of the hub; empty: ``MODELSCOPE_ENDPOINT``.
    """

    def __init__(
        self, name: ModelName, token: str | None = None, endpoint: str = "", max_workers: int = MAX_WORKERS
    ) -> None:
        if not NAME.fullmatch(name.path):
            raise not_a_name(name.path)
        self.name = name.path
        self.revision = name.revision or MAIN
        self.endpoint = (endpoint or os.environ.get("MODELSCOPE_ENDPOINT") or ENDPOINT).rstrip("/")
        token = token or os.environ.get("MODELSCOPE_API_TOKEN")
        headers = {"Authorization": f"Bearer {token}", "Cookie": f"m_session_id={token}"} if token else {}
        self._ranges = HTTPRanges(headers, max_workers, self._refused)

    def list_files(self) -> Listing:
        url = self._url("repo/files", Revision=self.revision, Recursive="True")
        try:
            status, answer = get_json(self._ranges, url, MAX_LISTING_BYTES)
        except InterruptedTransferError as error:
            raise self._unavailable(error) from error
        if status in (401, 403):
            raise self._no_access()
        if status == 404:
            problem = f"{self.endpoint} has no public model {self.name} with the revision {self.revision}"
            message = f"model: {problem}: check both, or set MODELSCOPE_API_TOKEN"
            raise PenstockError(Code.NOT_FOUND, message, "model")
        try:
            listed = msgspec.convert(answer["Data"]["Files"], type=list[_File])
        except (msgspec.ValidationError, KeyError, TypeError) as error:
            raise self._unavailable(f"status {status} without a valid file list") from error
        if len(listed) >= MAX_FILES:
            message = f"{self.name} has {MAX_FILES} files or more, and ModelScope does not list them all: give a folder"
            raise invalid("model", message)
        files = [
            RemoteFile(file.Path, file.Size, file.Sha256 or "", version=file.Revision or "")
            for file in listed
            if file.Type != "tree"
        ]
        if any(file.sha256 and not SHA256.fullmatch(file.sha256) for file in files):
            raise self._unavailable("its files are listed with malformed SHA-256 hashes")
        check_paths(files, self.name)
        return Listing(files)

    def read(self, file: RemoteFile, start: int, end: int) -> Iterator[bytes]:
        url = self._url("repo", Revision=self.revision, FilePath=file.path)
        return self._ranges.read(url, start, end, file.size)

    def _url(self, path: str, **query: str) -> str:
        return f"{self.endpoint}/api/v1/models/{quote(self.name)}/{path}?{urlencode(query)}"

    def _refused(self, response: httpx2.Response) -> PenstockError:
        if response.status_code in (401, 403):
            return self._no_access()
        return self._unavailable(status_of(response))

    def _no_access(self) -> PenstockError:
        advice = "set MODELSCOPE_API_TOKEN to a token that may read it"
        return invalid("model", f"{self.endpoint} denies access to {self.name}: {advice}")

    def _unavailable(self, problem: object) -> PenstockError:
        return unavailable(f"{self.name} from {self.endpoint}", problem, ADVICE)
