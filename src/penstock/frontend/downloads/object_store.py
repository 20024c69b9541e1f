"""Models in object stores, ``s3://``, ``oss://`` and ``gs://``, by fsspec."""

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
"""Seconds."""
VERSIONS = ("ETag", "etag", "LastModified", "mtime", "updated")


class ObjectStore:
    """A ``Source``: a folder in a bucket, or a GGUF file.

    Args:
        endpoint: the store's address; empty for what its own variables say, such as ``AWS_ENDPOINT_URL``.

    Raises ``PenstockError`` (``invalid``) where the extra that reads this store is not installed.
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
        except Exception as error:  # each library has its own
            raise self._as_penstock_error(error) from error
        if not found:
            raise PenstockError(Code.NOT_FOUND, f"model: there is nothing at {self.name}: check the address", "model")
        if len(found) > MAX_FILES:
            raise invalid("model", f"{self.name} has more than {MAX_FILES} files, so it is no model's folder")
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
                raise invalid("model", f"{self.name} has changed while it was fetched: start again") from error
            except Exception as error:
                raise InterruptedTransferError(str(error) or type(error).__name__) from error

    def _as_penstock_error(self, error: Exception) -> PenstockError:
        if isinstance(error, FileNotFoundError):
            return PenstockError(Code.NOT_FOUND, f"model: there is nothing at {self.name}: check the address", "model")
        if isinstance(error, PermissionError) or "redential" in f"{type(error).__name__} {error}":
            advice = f"set {CREDENTIALS[self._scheme]}"
            return invalid("model", f"{self.name} may not be read without other credentials ({error}): {advice}")
        return unavailable(self.name, error)


def _file_system(scheme: str, endpoint: str, max_workers: int) -> Any:
    """fsspec's file system of a scheme."""
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
    """What changes when a file is written again."""
    return next((str(entry[key]) for key in VERSIONS if entry.get(key)), "")
