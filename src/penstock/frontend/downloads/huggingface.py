"""Downloads from the Hugging Face hub and mirrors with the same API."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from urllib.parse import quote

import httpx2

from penstock.core.errors import Code, PenstockError, invalid

from .downloader import MAX_WORKERS, cannot_write, fetch
from .http import HTTPRanges, status_of
from .hub_cache import HubCache, commit_of
from .names import ModelName, not_a_name
from .remote import Listing, RemoteFile, check_paths, unavailable
from .selection import Selection

logger = logging.getLogger(__name__)

COMMIT = re.compile(r"[0-9a-f]{40}")
MAIN = "main"
ADVICE = "check the network and HF_ENDPOINT, or give a folder"


class HuggingFace:
    """``Source``: a model on the Hugging Face hub.

    Args:
        token: hub token for gated and private models; None: ``HF_TOKEN``, or the token stored by ``hf auth login``.
        endpoint: address of the hub; empty: ``HF_ENDPOINT``.
    """

    def __init__(
        self, name: ModelName, token: str | None = None, endpoint: str = "", max_workers: int = MAX_WORKERS
    ) -> None:
        from huggingface_hub import constants

        self.name = name.path
        self.revision = name.revision or MAIN
        self.endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
        self._token = token
        self.max_workers = max_workers
        self._commit = ""

    def list_files(self) -> Listing:
        from huggingface_hub import HfApi, constants

        try:
            info = HfApi(endpoint=self.endpoint, token=self._token).model_info(
                self.name, revision=self.revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
            )
        except Exception as error:  # HTTP, TLS and file system errors have no common base class
            raise self._as_penstock_error(error) from error
        files = [
            RemoteFile(file.rfilename, file.size or 0, file.lfs.sha256 if file.lfs else "", file.blob_id or "")
            for file in info.siblings or ()
        ]
        if not info.sha or not COMMIT.fullmatch(info.sha) or any(not _hashed(file) for file in files):
            raise unavailable(f"{self.name} at {self.endpoint}", "its files are listed without hashes", ADVICE)
        check_paths(files, self.name)
        self._commit = info.sha
        return Listing(files, info.sha)

    def read(self, file: RemoteFile, start: int, end: int) -> Iterator[bytes]:
        url = f"{self.endpoint}/{self.name}/resolve/{self._commit}/{quote(file.path)}"
        return self._ranges.read(url, start, end, file.size)

    @cached_property
    def _ranges(self) -> HTTPRanges:
        from huggingface_hub import constants, get_token

        token = self._token or (None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token())
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return HTTPRanges(headers, self.max_workers, self._refused)

    def _refused(self, response: httpx2.Response) -> PenstockError:
        if response.headers.get("X-Error-Code") == "GatedRepo":
            return self._gated()
        if response.status_code in (401, 403):
            return self._no_access()
        return unavailable(f"{self.name} at {self.endpoint}", status_of(response), ADVICE)

    def _gated(self) -> PenstockError:
        advice = f"request access at {self.endpoint}/{self.name}, then set HF_TOKEN or --hf-token"
        return invalid("model", f"{self.name} is gated: {advice}")

    def _no_access(self) -> PenstockError:
        advice = "set HF_TOKEN or --hf-token to a token that may read it"
        return invalid("model", f"{self.endpoint} denies access to {self.name}: {advice}")

    def _as_penstock_error(self, problem: Exception) -> PenstockError:
        from huggingface_hub import errors

        hub, name, code, field = self.endpoint, self.name, Code.NOT_FOUND, "model"
        match problem:
            case errors.HFValidationError():
                return not_a_name(name)
            case errors.OfflineModeIsEnabled():
                message = f"{name} is not completely cached, and HF_HUB_OFFLINE is set: unset it, or give a folder"
            case errors.RevisionNotFoundError():
                field = "revision"
                message = f"{name} at {hub} has no {self.revision!r}: give one of its branches, tags or commits"
            case errors.GatedRepoError():
                return self._gated()
            case errors.RepositoryNotFoundError():
                message = f"{hub} has no public model {name}: check the name, or set HF_TOKEN or --hf-token"
            case errors.HfHubHTTPError() if problem.response.status_code in (401, 403):
                return self._no_access()
            case _:
                return unavailable(f"{name} from {hub}", problem, ADVICE)
        return PenstockError(code, f"{field}: {message}", field)


def resolve_on_hub(
    source: HuggingFace, selection: Selection, cache: Path, progress: bool
) -> tuple[Path, list[RemoteFile]]:
    """Fetch the selected files of a model that are not cached; returns their folder in the cache, and the files.

    If the hub does not respond or denies access, cached files are used, with a warning.

    Raises ``PenstockError`` if the files can neither be fetched nor found in the cache.
    """
    from huggingface_hub import constants

    commit = source.revision if COMMIT.fullmatch(source.revision) else ""
    try:
        if commit and (found := _cached(cache, source.name, commit, selection, require_listing=True)):
            return found  # the files of a commit never change
        return fetch_into_cache(source, selection, cache, progress)
    except PenstockError as error:
        commit = commit or commit_of(cache, source.name, source.revision)
        found = _cached(cache, source.name, commit, selection) if commit else None
        if not found:
            raise
        if not constants.HF_HUB_OFFLINE:
            logger.warning("using the cached files of %s, which may be outdated. %s", source.name, error)
        return found


def fetch_into_cache(
    source: HuggingFace, selection: Selection, cache: Path, progress: bool
) -> tuple[Path, list[RemoteFile]]:
    """Fetch the hub's current version of the selected files; returns their folder in the cache, and the files.

    Raises ``PenstockError`` if the files cannot be listed, fetched or written.
    """
    listing = source.list_files()
    files = selection.select(listing.files, source.name)
    destination = HubCache(cache, source.name, listing.version)
    try:
        if not all(destination.has(file) for file in files):
            with destination.filling(listing):
                fetch(source, files, destination, source.max_workers, progress)
    except OSError as error:
        raise cannot_write(error, cache) from error
    if source.revision != listing.version:
        destination.name_revision(source.revision)
    return destination.folder, files


def _cached(
    cache: Path, repository: str, commit: str, selection: Selection, require_listing: bool = False
) -> tuple[Path, list[RemoteFile]] | None:
    """Snapshot folder and selected files of a commit; None if selected files are missing.

    Args:
        require_listing: ignore snapshots that have no stored file list (from other programs).
    """
    destination = HubCache(cache, repository, commit)
    listing = destination.listing()
    if not listing:
        return None if require_listing else _unlisted(destination, selection, repository)
    files = selection.select(listing.files, repository)
    return (destination.folder, files) if all(destination.has(file) for file in files) else None


def _unlisted(destination: HubCache, selection: Selection, repository: str) -> tuple[Path, list[RemoteFile]] | None:
    """``_cached`` for a snapshot without a listing: a checkpoint, or the selected GGUF file."""
    if not selection.quantization and (destination.folder / "config.json").is_file():
        return destination.folder, []
    with suppress(PenstockError):
        files = selection.select(destination.present(), repository)
        if all(file.path.lower().endswith(".gguf") for file in files):
            return destination.folder, files
    return None


def _hashed(file: RemoteFile) -> bool:
    """True if a file has a hash, the name of its blob in the cache."""
    return bool(re.fullmatch(r"[0-9a-f]{64}", file.sha256) or re.fullmatch(r"[0-9a-f]{40,64}", file.git_sha1))
