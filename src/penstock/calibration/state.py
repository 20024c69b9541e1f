"""State of an unfinished run, stored in a subfolder of the output. An interrupted run resumes from it.

Files are written to a temporary name and renamed. The last file of a layer is ``layer-N.json``; a run that was killed
resumes after the last layer with this file.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from penstock.core.errors import invalid

FOLDER = ".quantize"
JOB = "job.json"
REPORT = "quantization_report.json"
CONFIG = "config.json"
FIELD = "--output-dir"


class RunState:
    """The folder of an unfinished run. This process holds a lock on it.

    Args:
        output: output folder of the run, created if missing.
        job: all inputs that determine the written bytes. A run that has finished a layer only resumes with an equal
            ``job``.
        details: settings that the first run stores and resumed runs reuse.

    Raises ``PenstockError`` (``invalid``) if the output has other contents, or another process writes to it.
    """

    def __init__(self, output: Path, job: Mapping[str, Any], details: Mapping[str, Any]) -> None:
        self._output = output
        self.folder = output / FOLDER
        self._lock = self._open()
        stored = self._read(self.folder / JOB)
        if stored is None or (stored["job"] != job and self.layer(0) is None):
            for path in self.folder.iterdir():
                if path.name != "lock":
                    path.unlink()
            stored = {"job": job, "details": details}
            self._write_json(self.folder / JOB, stored)
        if stored["job"] != job:
            difference = _difference(stored["job"], job)
            raise invalid(FIELD, f"{output} contains an unfinished run with other options ({difference}): {ADVICE}")
        self.details: dict[str, Any] = stored["details"]
        """Details of the first run."""

    def _open(self) -> IO[bytes]:
        try:
            self._output.mkdir(parents=True, exist_ok=True)
            if not self.folder.exists() and (other := next(self._output.iterdir(), None)):
                raise invalid(FIELD, f"{self._output} is not empty (it contains {other.name}): {ADVICE}")
            self.folder.mkdir(exist_ok=True)
            lock = (self.folder / "lock").open("wb")
        except OSError as error:
            raise invalid(FIELD, f"cannot write to {self._output} ({error.strerror}): use another folder") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise invalid(FIELD, f"{self._output} is in use by another quantization: wait until it ends") from error
        return lock

    def layer(self, number: int) -> dict[str, Any] | None:
        """Return the result passed to ``finish_layer``; None if the layer is not finished."""
        return self._read(self._layer_path(number, ".json"))

    def finish_layer(self, number: int, result: Mapping[str, Any]) -> None:
        """Mark a layer as finished, and delete the hidden states of the preceding layer."""
        self._write_json(self._layer_path(number, ".json"), result)
        for path in self.folder.glob(f"hidden-{number - 1:05}-*"):
            path.unlink()

    def layer_tensors(self, number: int) -> Path:
        """Path of the file with a layer's tensors."""
        return self._layer_path(number, ".safetensors")

    def hidden_states(self, number: int, stream: str) -> Path:
        """Path of the file with the hidden states after a layer."""
        return self.folder / f"hidden-{number:05}-{stream}.bin"

    def write(self, path: Path, write: Callable[[Path], object]) -> None:
        """Write a file atomically: call ``write`` with a temporary path, then rename the file to ``path``."""
        temporary = self.folder / "unfinished"
        write(temporary)
        temporary.chmod(0o644)  # safetensors writes files that only the user can read
        os.replace(temporary, path)

    def close(self) -> None:
        """Delete the folder after a finished run."""
        self._lock.close()
        shutil.rmtree(self.folder)

    def _layer_path(self, number: int, suffix: str) -> Path:
        return self.folder / f"layer-{number:05}{suffix}"

    def _write_json(self, path: Path, value: Mapping[str, Any]) -> None:
        self.write(path, lambda temporary: temporary.write_text(json.dumps(value), encoding="utf-8"))

    @staticmethod
    def _read(path: Path) -> dict[str, Any] | None:
        try:
            result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return result


ADVICE = "name an empty or new folder, or delete this one"


def finished_report(output: Path, job: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the report of a finished run; None if the output has no finished checkpoint.

    Raises ``PenstockError`` (``invalid``) if the checkpoint has another ``job``, or has no report.
    """
    if not (output / CONFIG).exists():
        return None
    try:
        report: dict[str, Any] = json.loads((output / REPORT).read_text(encoding="utf-8"))
        before = report["job"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise invalid(FIELD, f"{output} contains a checkpoint without a {REPORT}: {ADVICE}") from error
    if before != job:
        raise invalid(FIELD, f"{output} was made with other options ({_difference(before, job)}): {ADVICE}")
    shutil.rmtree(output / FOLDER, ignore_errors=True)
    return report


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(f"{name} is {before.get(name)!r:.60}, not {now.get(name)!r:.60}" for name in names[:3])
