"""Downloads from object stores (``s3://``, ``oss://`` and ``gs://``) with fsspec."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

from penstock.config.secrets import public_url
from penstock.core.errors import Code, PenstockError, invalid

from .downloader import MAX_WORKERS
from .names import OBJECT_STORES, ModelName
from .remote import InterruptedTransferError, Listing, RemoteFile, check_paths, unavailable

MODULES = {"s3": "s3fs", "oss": "ossfs", "gs": "gcsfs"}
CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or FSSPEC_S3_ANON=true for a public bucket",
    "oss": "OSS_ACCESS_KEY_ID, OSS_ACCESS_KEY_SECRET and OSS_ENDPOINT",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or FSSPEC_GS_TOKEN=anon for a public bucket",
}
ENDPOINTS = {"s3": "endpoint_url", "oss": "endpoint", "gs": "endpoint_url"}
BLOCK_BYTES = 2**22
MAX_DEPTH = 2
MAX_FILES = 10_000
CONNECT_TIMEOUT, READ_TIMEOUT = 10, 30
"""Timeouts for S3 in seconds, for connecting and for each read of data."""
VERSIONS = ("ETag", "etag", "LastModified", "mtime", "updated")


class ObjectStore:
    """``Source``: a folder or a GGUF file in a bucket.

    Args:
        endpoint: address of the store; empty: the value of its environment variable, such as ``AWS_ENDPOINT_URL``.

    Raises ``PenstockError`` (``invalid``) if the extra for this store is not installed.
    """

    def __init__(self, name: ModelName, endpoint: str = "", max_workers: int = MAX_WORKERS) -> None:
        self.name = public_url(name.path)
        self._scheme = OBJECT_STORES[name.scheme]
        path = name.path.partition("://")[2]
        self._is_file = path.lower().endswith(".gguf")
        self._folder = path.rpartition("/")[0] if self._is_file else path
        self._path = path
        self._files = _file_system(self._scheme, endpoint, max_workers)

    def list_files(self) -> Listing:
        try:
            self._files.invalidate_cache()
            found = self._files.find(self._path, maxdepth=MAX_DEPTH, detail=True)
        except Exception as error:  # s3fs, ossfs and gcsfs raise different classes
            raise self._as_penstock_error(error) from error
        if not found:
            raise PenstockError(Code.NOT_FOUND, f"model: {self.name} does not exist: check the address", "model")
        if len(found) > MAX_FILES:
            message = f"{self.name} has {len(found)} files, more than {MAX_FILES}: give the folder of one model"
            raise invalid("model", message)
        files = [
            RemoteFile(path.removeprefix(f"{self._folder}/"), int(entry["size"] or 0), version=_version(entry))
            for path, entry in found.items()
            if entry["type"] == "file" and not path.endswith("/")
        ]
        check_paths(files, self.name)
        return Listing(files)

    def read(self, file: RemoteFile, start: int, end: int) -> Iterator[bytes]:
        for first in range(start, end, BLOCK_BYTES):
            try:
                yield self._files.cat_file(
                    f"{self._folder}/{file.path}", start=first, end=min(first + BLOCK_BYTES, end)
                )
            except FileNotFoundError as error:
                raise invalid("model", f"{self.name} has changed during the download: start again") from error
            except Exception as error:
                raise InterruptedTransferError(str(error) or type(error).__name__) from error

    def _as_penstock_error(self, error: Exception) -> PenstockError:
        if isinstance(error, FileNotFoundError):
            return PenstockError(Code.NOT_FOUND, f"model: {self.name} does not exist: check the address", "model")
        if isinstance(error, PermissionError) or "redential" in f"{type(error).__name__} {error}":
            advice = f"set {CREDENTIALS[self._scheme]}"
            return invalid("model", f"access to {self.name} is denied ({error}): {advice}")
        return unavailable(self.name, error)


def _file_system(scheme: str, endpoint: str, max_workers: int) -> Any:
    """fsspec file system of a scheme."""
    import fsspec

    module = MODULES[scheme]
    if importlib.util.find_spec(module) is None:
        raise invalid("model", f"{scheme}:// needs {module}: pip install 'penstock-llm[{scheme}]'")
    options: dict[str, Any] = {"skip_instance_cache": True}
    if endpoint:
        options[ENDPOINTS[scheme]] = endpoint
    if scheme == "s3":
        options["config_kwargs"] = {
            "connect_timeout": CONNECT_TIMEOUT,
            "read_timeout": READ_TIMEOUT,
            "retries": {"max_attempts": 1},
            "max_pool_connections": max_workers,
        }
    return fsspec.filesystem(scheme, **options)


def _version(entry: dict[str, Any]) -> str:
    """ETag or modification time of a file."""
    return next((str(entry[key]) for key in VERSIONS if entry.get(key)), "")
