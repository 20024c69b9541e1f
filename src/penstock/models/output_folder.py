"""A folder that a command fills with a model: it has a ``config.json`` only once all else is whole."""

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
"""Suffix of files that are being written."""
STALE = re.compile(r"rank_\d+|.*\.(packed|safetensors|json|jinja|txt|model|tiktoken)(\.part)?")
"""Names of files that commands write, and which another command into the same folder replaces."""


class OutputFolder:
    """Fills a folder; nobody else may meanwhile.

    A command that was killed finds what it had written: files have their names only once they are whole.

    Args:
        model: folder whose tokenizer, chat template, and other small files are copied.
        config: text of the model's ``config.json`` there.
        is_own: whether a folder with a ``config.json`` was made by the same command, and may be replaced.
    """

    def __init__(self, path: Path, model: Path, config: str, is_own: Callable[[Path], bool]) -> None:
        self.path = path
        self._model = model
        self._config = config
        self._is_own = is_own

    @contextmanager
    def filling(self, names: set[str]) -> Iterator[None]:
        """Around the work that writes files.

        Args:
            names: of the files and folders that it writes at the top.

        Raises ``PenstockError`` (``invalid``) if the folder holds something else, is written to by another process,
        or cannot be written.
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
            raise invalid(FIELD, f"{self.path} is the model's own folder; name another")
        others = [path for path in self.path.iterdir() if path.name != UNFINISHED + PART]
        ours = (self.path / UNFINISHED).exists() or self._is_own(self.path)
        if others and not ours:
            raise invalid(FIELD, f"{self.path} holds {others[0].name} already; name a folder that is empty or new")
        write_atomically(self.path / UNFINISHED, self._config.encode())
        (self.path / CONFIG).unlink(missing_ok=True)
        sync_folder(self.path)

    def _copy_model_files(self) -> set[str]:
        """Returns the names at the top."""
        names = set()
        for pattern in (*MODEL_FILES, *LICENSES):
            for source in sorted(self._model.glob(pattern)):
                if not source.is_file() or source.name in NOT_COPIED or source == self._model / CONFIG:
                    continue
                place = self.path / source.relative_to(self._model)
                place.parent.mkdir(exist_ok=True)
                write_atomically(place, source.read_bytes())
                names.add(place.relative_to(self.path).parts[0])
        for name, content in module_files(self._model).items():
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path / name, content)
            names.add(name.parts[0])
        return names

    def _remove_stale(self, names: set[str]) -> None:
        """Remove what an earlier command has left here."""
        for path in self.path.iterdir():
            if path.name in names or not STALE.fullmatch(path.name):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file that has its name only once it is whole and on the disk."""
    with new_file(path) as part, part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A path to write to, whose file gets the name ``path`` in the end. Whoever writes has it on the disk by then."""
    part = path.with_name(path.name + PART)
    part.unlink(missing_ok=True)
    yield part
    part.replace(path)


@contextmanager
def locked(folder: Path, wait: bool = True) -> Iterator[None]:
    """Hold a lock on a folder. Raises ``PenstockError`` (``invalid``) if another process does and must not be waited
    for."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise invalid(FIELD, f"another process is writing to {folder}: wait for its end") from error
        yield
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Have the names of a folder's files on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
