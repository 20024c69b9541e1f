"""Checkpoint folder of a GGUF file: configuration and tokenizer files, and links to the file's parts.

The folder is written once, to the cache (``~/.cache/penstock/gguf``). Its name depends on the file's path, size and
times, so later starts find it without reading the file. The folder is about as large as the tokenizer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Any

from penstock.checkpoint.checkpoint_digest import weight_files
from penstock.checkpoint.config_json import CONFIG
from penstock.checkpoint.gguf_config import config_of
from penstock.checkpoint.gguf_file import GGUFFile, parts_in, parts_of
from penstock.checkpoint.sentence_transformers import MODULES
from penstock.config.user_folders import cache_home
from penstock.core.errors import invalid
from penstock.version import __version__

SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Keys of ``generation_config.json`` by GGUF key (``general.sampling.temp``)."""
POOLING_MODES = {1: "mean", 2: "cls", 3: "lasttoken"}
"""``pooling_mode`` of sentence-transformers by ``pooling_type`` of GGUF."""
POOLING_MODULES = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
"""Folders of an embedding model's sentence-transformers modules."""
FORMAT = 2
"""Version of the folder's content; increase it with every change."""


def gguf_in(path: Path) -> Path | None:
    """Find the GGUF file at a path: the file itself, or (the first part of) the only model in a folder; None for any
    other path, including folders of other checkpoints.

    Raises ``PenstockError`` (``invalid``) for a folder with several models.
    """
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    return None if _is_checkpoint(path) else next(iter(parts_in(path)), None)


def _is_checkpoint(folder: Path) -> bool:
    """True if a folder has weights in another format, or a configuration and a tokenizer."""
    if weight_files(folder):
        return True
    return (folder / CONFIG).exists() and any((folder / f"tokenizer.{end}").exists() for end in ("json", "model"))


def checkpoint_folder(path: Path) -> Path:
    """Folder with ``config.json``, tokenizer and chat template of a GGUF file, and links to its parts; written once.

    Args:
        path: the file, or one of its parts.

    Raises ``PenstockError``: ``invalid`` if the file is damaged or the cache cannot be written; ``unsupported`` for an
    unsupported model or tokenizer.
    """
    parts = parts_of(path.absolute())
    cache = cache_home() / "penstock" / "gguf"
    try:
        folder = cache / f"{parts[0].stem[:80]}-{_identity(parts)}"
        with contextlib.suppress(FileNotFoundError):
            status = folder.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid in (os.geteuid(), 0):
                return folder
            raise invalid("model", f"{folder} is owned by another user: remove it, or set XDG_CACHE_HOME")
        files = _files([GGUFFile(part) for part in parts])
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_dangling(cache)
        _write(folder, parts, files)
    except OSError as error:
        message = f"{error.filename or cache} cannot be used ({error.strerror}): free space, or set XDG_CACHE_HOME"
        raise invalid("model", message) from error
    return folder


def _identity(parts: list[Path]) -> str:
    """Hash of the parts' paths, sizes and times, the version of Penstock, and ``FORMAT``."""
    digest = hashlib.sha256(f"{__version__} {FORMAT} ".encode())
    for part in parts:
        status = part.stat()
        digest.update(f"{part} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} ".encode())
    return digest.hexdigest()[:32]


def _files(parts: list[GGUFFile]) -> dict[str, bytes]:
    """Contents of the folder's files by name."""
    from penstock.text.from_gguf import GGUFTokenizer  # deferred: imports the tokenizers library

    config, tokenizer = config_of(parts), GGUFTokenizer(parts[0])
    ends = tokenizer.end_token_ids()
    generation: dict[str, Any] = {"eos_token_id": ends} if ends else {}
    for gguf_name, name in SAMPLING.items():
        if (value := parts[0].get(f"general.sampling.{gguf_name}", float)) is not None:
            generation[name] = value
    return {
        CONFIG: _json(config),
        "generation_config.json": _json(generation),
        **tokenizer.files(),
        **_pooling_files(parts[0]),
    }


def _pooling_files(file: GGUFFile) -> dict[str, bytes]:
    """sentence-transformers files of an embedding model; empty for other models. As in llama.cpp, embeddings are
    normalized."""
    architecture = file.require("general.architecture", str)
    if (mode := POOLING_MODES.get(file.get(f"{architecture}.pooling_type", int, 0))) is None:
        return {}
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in POOLING_MODULES.items()]
    return {MODULES: _json(modules), f"{POOLING_MODULES['Pooling']}/{CONFIG}": _json({"pooling_mode": mode})}


def _json(content: Any) -> bytes:
    return json.dumps(content, indent=2).encode()


def _write(folder: Path, parts: list[Path], files: dict[str, bytes]) -> None:
    """Write the folder atomically: to a temporary folder, which is then renamed."""
    new = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".new-"))
    try:
        for name, content in files.items():
            (new / name).parent.mkdir(exist_ok=True)
            with (new / name).open("wb") as file:
                file.write(content)
                os.fsync(file.fileno())  # before the rename, so that a crash leaves no truncated file
        for number, part in enumerate(parts, 1):
            suffix = f"-{number:05}-of-{len(parts):05}" if len(parts) > 1 else ""
            (new / f"model{suffix}.gguf").symlink_to(part)
        try:
            new.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process may have created the folder
                raise
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _remove_dangling(cache: Path) -> None:
    """Remove folders whose GGUF files no longer exist."""
    for folder in cache.iterdir():
        links = list(folder.glob("*.gguf"))
        if links and not all(link.exists() for link in links):
            shutil.rmtree(folder, ignore_errors=True)
