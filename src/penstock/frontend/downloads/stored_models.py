"""Models in the caches: of the Hugging Face hub, and of Penstock's downloads from other sources."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .names import HUBS
from .partial_file import SUFFIX
from .remote import STATE_FOLDER
from .resolving import downloads_folder, hub_cache
from .state import LOCK, locked, missing_files, read_manifest


@dataclass(frozen=True)
class StoredModel:
    """A model in a cache."""

    name: str
    """Name for ``penstock serve``."""
    folder: Path
    size: int
    """Bytes on the disk."""
    modified: float
    """Time of the last change, seconds since the epoch."""
    complete: bool
    """False if a download can be resumed."""
    delete: Callable[[], None]
    """Delete the files. Raises ``OSError``."""


def stored_models(download_dir: Path | None = None) -> list[StoredModel]:
    """Models in the caches, by name.

    Args:
        download_dir: option ``download_dir``; None: the default caches.
    """
    found = [*_from_hub(download_dir or hub_cache()), *_from_other_sources(downloads_folder(download_dir))]
    return sorted(found, key=lambda model: (model.name, model.folder))


def _from_hub(cache: Path) -> Iterator[StoredModel]:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        scanned = scan_cache_dir(cache)
    except (CacheNotFound, ValueError):  # no folder
        return
    for repo in scanned.repos:
        if repo.repo_type != "model":
            continue
        revisions = [revision.commit_hash for revision in repo.revisions]
        complete = not any((repo.repo_path / "blobs").glob(f"*{SUFFIX}*"))
        delete = partial(_delete_revisions, cache, revisions)
        yield StoredModel(repo.repo_id, repo.repo_path, repo.size_on_disk, repo.last_modified, complete, delete)


def _delete_revisions(cache: Path, revisions: list[str]) -> None:
    from huggingface_hub import scan_cache_dir

    scan_cache_dir(cache).delete_revisions(*revisions).execute()


def _from_other_sources(downloads: Path) -> Iterator[StoredModel]:
    for state in sorted(downloads.rglob(STATE_FOLDER)):
        folder = state.parent
        if not (manifest := read_manifest(folder)):
            continue
        scheme = folder.relative_to(downloads).parts[0]
        name = f"{scheme}://{manifest.source}" if scheme in HUBS else manifest.source
        files = [path.stat() for path in folder.rglob("*") if path.is_file()]
        modified = max((file.st_mtime for file in files), default=0.0)
        delete = partial(_delete_folder, folder)
        yield StoredModel(
            name, folder, sum(file.st_size for file in files), modified, not missing_files(folder), delete
        )


def _delete_folder(folder: Path) -> None:
    with locked(folder / STATE_FOLDER / LOCK):
        shutil.rmtree(folder)
