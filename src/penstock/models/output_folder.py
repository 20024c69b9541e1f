"""Output folder of a command that writes a model. ``config.json`` is written when all other files are complete."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.checkpoint.config_json import CONFIG
from penstock.checkpoint.engine_config import UNFINISHED
from penstock.checkpoint.sentence_transformers import module_files
from penstock.core.errors import invalid

FIELD = "output_dir"
MODEL_FILES = (
    *("*.json", "*.jinja", "*.txt", "tokenizer.model", "tiktoken.model", "*.tiktoken"),
    "additional_chat_templates/*.jinja",
)
LICENSES = ("LICENSE*", "NOTICE*", "USE_POLICY*")
NOT_COPIED = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
PART = ".part"
"""Suffix of incomplete files."""
STALE = re.compile(r"rank_\d+|.*\.(packed|safetensors|json|jinja|txt|model|tiktoken)(\.part)?")
"""Pattern of the names of files that commands write. The next command with the same output folder may delete them."""


class OutputFolder:
    """An output folder, locked against other processes while it is written.

    An interrupted command can continue: files get their names only when they are complete.

    Args:
        model: folder whose tokenizer, chat template, and other small files are copied.
        config: text of the ``config.json`` to write.
        is_own: whether a folder with a ``config.json`` was written by the same command, and may be replaced.
    """

    def __init__(self, path: Path, model: Path, config: str, is_own: Callable[[Path], bool]) -> None:
        self.path = path
        self._model = model
        self._config = config
        self._is_own = is_own

    @contextmanager
    def filling(self, names: set[str]) -> Iterator[None]:
        """Context manager around the code that writes the files.

        Args:
            names: names of the top-level files and folders that the code writes.

        Raises ``PenstockError`` (``invalid``) if the folder has other contents, is being written by another process, or
        cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with locked(self.path, wait=False):
                self._begin()
                yield
                copied = self._copy_model_files()
                self._remove_stale({*names, *copied, UNFINISHED})
                (self.path / UNFINISHED).replace(self.path / CONFIG)
                sync_folder(self.path)
        except OSError as error:
            raise invalid(FIELD, f"{self.path} cannot be written: {error.strerror or error}") from error

    def _begin(self) -> None:
        if self.path.resolve() == self._model.resolve():
            raise invalid(FIELD, f"{self.path} is the folder of the model: name another folder")
        found = [path for path in self.path.iterdir() if path.name != UNFINISHED + PART]
        is_own = (self.path / UNFINISHED).exists() or self._is_own(self.path)
        if found and not is_own:
            raise invalid(FIELD, f"{self.path} already has {found[0].name}: name an empty or new folder")
        write_atomically(self.path / UNFINISHED, self._config.encode())
        (self.path / CONFIG).unlink(missing_ok=True)
        sync_folder(self.path)

    def _copy_model_files(self) -> set[str]:
        """Copy the model's small files. Returns the top-level names."""
        names = set()
        for pattern in (*MODEL_FILES, *LICENSES):
            for source in sorted(self._model.glob(pattern)):
                if not source.is_file() or source.name in NOT_COPIED or source == self._model / CONFIG:
                    continue
                target = self.path / source.relative_to(self._model)
                target.parent.mkdir(exist_ok=True)
                write_atomically(target, source.read_bytes())
                names.add(target.relative_to(self.path).parts[0])
        for name, content in module_files(self._model).items():
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path / name, content)
            names.add(name.parts[0])
        return names

    def _remove_stale(self, names: set[str]) -> None:
        """Delete files of earlier commands."""
        for path in self.path.iterdir():
            if path.name in names or not STALE.fullmatch(path.name):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file under a temporary name, and rename it when its contents are on disk."""
    with new_file(path) as part, part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Context manager with a temporary path, renamed to ``path`` on exit. The caller flushes the file to disk."""
    part = path.with_name(path.name + PART)
    part.unlink(missing_ok=True)
    yield part
    part.replace(path)


@contextmanager
def locked(folder: Path, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a folder. Without ``wait``, a lock held by another process raises ``PenstockError``."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise invalid(FIELD, f"another process is writing to {folder}: wait until it has finished") from error
        yield
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
