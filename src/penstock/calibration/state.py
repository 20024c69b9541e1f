"""The state of an unfinished run, in a folder below the output: what is done is never done again.

Each file is written under another name first. A layer is done once its ``layer-N.json`` is there, which is written
last, so that a run that was killed at any moment goes on behind the last such layer.
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
    """The folder of an unfinished run, locked while this process has it open.

    Args:
        output: of the run; made where it is not there.
        job: all that decides the bytes that are written. A run of another one that has finished a layer is refused.
        details: kept with the job by the run that begins, and given back to those that continue it.

    Raises ``PenstockError`` (``invalid``) where the output holds anything else, or another process writes it.
    """

    def __init__(self, output: Path, job: Mapping[str, Any], details: Mapping[str, Any]) -> None:
        self._output = output
        self.folder = output / FOLDER
        self._lock = self._open()
        kept = self._read(self.folder / JOB)
        if kept is None or (kept["job"] != job and self.layer(0) is None):
            for path in self.folder.iterdir():
                if path.name != "lock":
                    path.unlink()
            kept = {"job": job, "details": details}
            self._write_json(self.folder / JOB, kept)
        if kept["job"] != job:
            raise invalid(FIELD, f"{output} holds a run with other options ({_difference(kept['job'], job)}): {ADVICE}")
        self.details: dict[str, Any] = kept["details"]
        """Of the run that began."""

    def _open(self) -> IO[bytes]:
        try:
            self._output.mkdir(parents=True, exist_ok=True)
            if not self.folder.exists() and (other := next(self._output.iterdir(), None)):
                raise invalid(FIELD, f"{self._output} holds {other.name} already: {ADVICE}")
            self.folder.mkdir(exist_ok=True)
            lock = (self.folder / "lock").open("wb")
        except OSError as error:
            raise invalid(FIELD, f"{self._output} cannot be written ({error.strerror}): name another folder") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise invalid(FIELD, f"another process quantizes into {self._output}: wait for it") from error
        return lock

    def layer(self, number: int) -> dict[str, Any] | None:
        """What ``finish_layer`` was given; None where the layer is not done."""
        return self._read(self._layer_path(number, ".json"))

    def finish_layer(self, number: int, found: Mapping[str, Any]) -> None:
        """Mark a layer as done; what only the layer before needed goes away."""
        self._write_json(self._layer_path(number, ".json"), found)
        for path in self.folder.glob(f"hidden-{number - 1:05}-*"):
            path.unlink()

    def layer_tensors(self, number: int) -> Path:
        """The file of a layer's tensors."""
        return self._layer_path(number, ".safetensors")

    def hidden_states(self, number: int, stream: str) -> Path:
        """The file of hidden states behind a layer."""
        return self.folder / f"hidden-{number:05}-{stream}.bin"

    def write(self, path: Path, write: Callable[[Path], object]) -> None:
        """Write a file, which then is there as a whole or not at all.

        Args:
            write: writes it, to the path that it is given.
        """
        unfinished = self.folder / "unfinished"
        write(unfinished)
        unfinished.chmod(0o644)  # safetensors' own are for the user alone
        os.replace(unfinished, path)

    def close(self) -> None:
        """Remove the folder: the run is finished."""
        self._lock.close()
        shutil.rmtree(self.folder)

    def _layer_path(self, number: int, suffix: str) -> Path:
        return self.folder / f"layer-{number:05}{suffix}"

    def _write_json(self, path: Path, value: Mapping[str, Any]) -> None:
        self.write(path, lambda unfinished: unfinished.write_text(json.dumps(value), encoding="utf-8"))

    @staticmethod
    def _read(path: Path) -> dict[str, Any] | None:
        try:
            result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return result


ADVICE = "name a folder that is empty or new, or delete it"


def finished_report(output: Path, job: Mapping[str, Any]) -> dict[str, Any] | None:
    """The report of a run that is finished; None where there is none.

    Raises ``PenstockError`` (``invalid``) where it was of another job, or the folder holds another checkpoint.
    """
    if not (output / CONFIG).exists():
        return None
    try:
        report: dict[str, Any] = json.loads((output / REPORT).read_text(encoding="utf-8"))
        before = report["job"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise invalid(FIELD, f"{output} holds another checkpoint: {ADVICE}") from error
    if before != job:
        raise invalid(FIELD, f"{output} was made with other options ({_difference(before, job)}): {ADVICE}")
    shutil.rmtree(output / FOLDER, ignore_errors=True)
    return report


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(f"{name} {before.get(name)!r:.60} and not {now.get(name)!r:.60}" for name in names[:3])
