"""The disk tier of the prefix cache: a folder with a file for each block, which threads read and write.

Whatever is wrong with the disk or a file is a miss: files are verified by a checksum that is seeded with the block's
hash, and appear under their names only once they are complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from queue import SimpleQueue

from xxhash import xxh3_64_intdigest

from penstock.config.cache_folder import RESERVED_SHARE, locked_folder, open_cached
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from .host_tier import HostTier

logger = logging.getLogger(__name__)

READERS = 2
"""Threads that read."""
READ_TIMEOUT = 5.0
"""Seconds without any block from the disk after which requests do not wait for theirs any more, and compute what has
not come."""
RETRY_AFTER = 30.0
"""Seconds after an error of the disk before something is written again."""
CLOSE_TIMEOUT = 5.0
"""Seconds to write what is left at the end."""
MAX_QUEUED = 65536
"""Blocks that wait to be written."""
SCANS = 16
"""The folder is looked through each time that one of so many parts of its size was written."""
STALE = 3600.0
"""Seconds after which a file that is not complete belongs to a dead process."""
NAME = re.compile(r"[0-9a-f]{32}\.kv")
UNFINISHED = re.compile(r"[0-9a-f]{32}\.kv\.[0-9a-f]{16}\.part")
CHECKSUM_BYTES = 8


class DiskTier:
    """Several engines may share the folder. Its limit is kept by each: files of all engines count, also those of other
    models and weights, which nobody uses any more.

    Args:
        limit: bytes of all files.
        identity: of all that keys and values depend on beside their hash: engines with the same one share files.

    Raises ``PenstockError`` if the folder cannot be used, or is open to other users.
    """

    def __init__(self, folder: Path, limit: int, identity: bytes, host: HostTier) -> None:
        self._folder = folder
        self._limit = limit
        self._identity = hashlib.blake2b(identity, digest_size=32).digest()
        self._host = host
        self._file_bytes = CHECKSUM_BYTES + host.slot_bytes
        if limit < self._file_bytes:
            message = f"must be at least {self._file_bytes} bytes, the file of one block"
            raise invalid("kv_offloading_disk_size", message, self._file_bytes)
        _check_folder(folder)
        self.num_hits = 0
        """Blocks read since the start."""
        self.num_written = 0
        """Blocks written since the start."""
        self.num_evictions = 0
        """Files that this engine has deleted to make room."""
        self.num_read_failures = 0
        """Files that were damaged, and reads that came too late."""
        self.num_write_failures = 0
        """Blocks that could not be written."""
        self._writer_id = os.urandom(8).hex()
        self._paused_until = 0.0
        self._room = 0
        """Bytes that may be written before the folder is looked through again."""
        self._queue: dict[bytes, None] = {}
        """Hashes of blocks to keep, in this order."""
        self._wrong: dict[bytes, None] = {}
        """Hashes of blocks to delete before any is kept."""
        self._changed = threading.Condition()
        self._closing = False
        self._reads: SimpleQueue[tuple[Sequence[bytes], Future[None]] | None] = SimpleQueue()
        self._progress = 0.0
        """When a block was last read, or found missing."""
        self._overdue = 0
        """Reads that requests do not wait for any more, and that have not ended."""
        self._waiting: list[tuple[float, Future[None]]] = []
        """When each read was asked for, and its future."""
        threads = [threading.Thread(target=self._read_all, daemon=True) for _ in range(READERS)]
        self._writer = threading.Thread(target=self._write_all, daemon=True)
        for thread in (*threads, self._writer):
            thread.start()

    # --- In the thread that runs the steps ----------------------------------------------------------------------------

    def read(self, block_hashes: Sequence[bytes]) -> Future[None] | None:
        """Begin to read blocks into the host tier, up to the first that is not here.

        Returns:
            Done when they are there, or nothing has come for ``READ_TIMEOUT``; ``poll`` has to be called meanwhile.
            None if the disk does not answer.
        """
        if self._overdue > 0:
            return None
        done: Future[None] = Future()
        self._waiting.append((time.monotonic(), done))
        self._reads.put((block_hashes, done))
        return done

    def poll(self) -> None:
        """Complete the futures of reads that take too long."""
        if not self._waiting:
            return
        now, left = time.monotonic(), []
        for asked, done in self._waiting:
            if now > max(asked, self._progress) + READ_TIMEOUT and _complete(done):
                with self._changed:
                    self._overdue += 1
                self.num_read_failures += 1
                message = "%s: nothing could be read for %g seconds; prompts are computed"
                logger.warning(message, self._folder, READ_TIMEOUT)
            elif not done.done():
                left.append((asked, done))
        self._waiting = left

    def keep(self, block_hashes: Sequence[bytes]) -> None:
        """Write blocks of the host tier that are not here; mark the others as used now."""
        with self._changed:
            for one in block_hashes:
                self._queue.pop(one, None)
                self._queue[one] = None
            while len(self._queue) > MAX_QUEUED:
                del self._queue[next(iter(self._queue))]
            self._changed.notify()

    def forget(self, block_hashes: Sequence[bytes]) -> None:
        """Delete blocks, which are wrong. Where ``keep`` follows, they are kept if the host tier has them anew."""
        with self._changed:
            self._wrong |= dict.fromkeys(block_hashes)
            self._changed.notify()

    def close(self) -> None:
        """Write what is left, as far as ``CLOSE_TIMEOUT`` allows."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        for _ in range(READERS):
            self._reads.put(None)
        self._writer.join(CLOSE_TIMEOUT)

    # --- In the threads that read -------------------------------------------------------------------------------------

    def _read_all(self) -> None:
        while job := self._reads.get():
            block_hashes, done = job
            try:
                self._read(block_hashes, done)
            except Exception:
                logger.exception("%s could not be read", self._folder)
            if not _complete(done) and not done.cancelled():
                with self._changed:
                    self._overdue -= 1

    def _read(self, block_hashes: Sequence[bytes], done: Future[None]) -> None:
        held: list[int] = []
        try:
            for one in block_hashes:
                if done.done():  # nobody waits any more
                    return
                slots = self._host.hold([one]) or self._read_block(one)
                self._progress = time.monotonic()
                if not slots:
                    return
                held += slots
        finally:
            self._host.release(held)

    def _read_block(self, block_hash: bytes) -> list[int]:
        """Read a block into a slot of the host tier, which is held then. Empty if that is impossible."""
        path = self._path(block_hash)
        try:
            file = open_cached(path)
        except OSError:
            return []
        with file:
            slots = self._host.allocate(1)
            if not slots:
                return []
            data = memoryview(self._host.data[slots[0]])
            try:
                checksum = file.read(CHECKSUM_BYTES)
                whole = file.readinto(data) == len(data) and not file.read(1)  # type: ignore[attr-defined]
            except OSError:
                whole, checksum = False, b""
            if whole and checksum == self._checksum(block_hash, data):
                self._host.cache(slots[0], block_hash)
                self.num_hits += 1
                return slots
        self._host.release(slots)
        self.num_read_failures += 1
        logger.warning("%s is damaged and is deleted", path)
        with contextlib.suppress(OSError):
            path.unlink()
        return []

    # --- In the thread that writes ------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        while True:
            with self._changed:
                while not (queue := self._wrong or self._queue):
                    if self._closing:
                        return
                    self._changed.wait()
                block_hash = next(iter(queue))
                del queue[block_hash]
            try:
                if queue is self._wrong:
                    self._path(block_hash).unlink(missing_ok=True)
                elif not self._touch(block_hash) and time.monotonic() >= self._paused_until:
                    self._write(block_hash)
            except Exception as error:
                self.num_write_failures += 1
                self._paused_until = time.monotonic() + RETRY_AFTER
                logger.warning("%s: blocks are not kept for %g seconds: %s", self._folder, RETRY_AFTER, error)

    def _touch(self, block_hash: bytes) -> bool:
        """Mark a block as used now; returns whether its file is here, as far as can be told without reading it."""
        path = self._path(block_hash)
        try:
            status = path.lstat()
            whole = stat.S_ISREG(status.st_mode) and status.st_size == self._file_bytes
            if not whole or status.st_mode & 0o077 or status.st_uid != os.geteuid():
                return False
            os.utime(path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def _write(self, block_hash: bytes) -> None:
        """Write a block, if the host tier has it still. Raises ``OSError``."""
        slots = self._host.hold([block_hash])
        if not slots:
            return
        path = self._path(block_hash)
        part = path.with_name(f"{path.name}.{self._writer_id}.part")
        try:
            if self._room < self._file_bytes:
                self._make_room()
            self._room -= self._file_bytes
            data = memoryview(self._host.data[slots[0]])
            part.unlink(missing_ok=True)
            with open(part, "xb", buffering=0, opener=_private) as file:
                _write_whole(file.fileno(), self._checksum(block_hash, data))
                _write_whole(file.fileno(), data)
            part.replace(path)
            self.num_written += 1
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
        finally:
            self._host.release(slots)

    def _make_room(self) -> None:
        """Delete the least recently used files until there is room for some more. Raises ``OSError`` if there is
        none."""
        wanted = max(self._limit // SCANS, self._file_bytes)
        with locked_folder(self._folder):
            files = sorted(self._files())
            disk = shutil.disk_usage(self._folder)
            used = sum(size for _, size, _ in files)
            room = min(self._limit - used, int(disk.free - RESERVED_SHARE * disk.total))
            for _, size, path in files:
                if room >= wanted:
                    break
                path.unlink(missing_ok=True)
                room += size
                self.num_evictions += 1
        if room < self._file_bytes:
            raise OSError(f"{RESERVED_SHARE:.0%} of the disk are kept free")
        self._room = min(room, wanted)

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """Time of the last use, bytes and path of each file, without those of others than this module. Deletes what
        dead writers have left."""
        with os.scandir(self._folder) as entries:
            for entry in entries:
                unfinished = UNFINISHED.fullmatch(entry.name)
                if not unfinished and not NAME.fullmatch(entry.name):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if not stat.S_ISREG(status.st_mode):
                        continue
                    if not unfinished:
                        yield status.st_atime_ns, status.st_size, Path(entry.path)
                    elif time.time() - status.st_mtime > STALE:
                        os.unlink(entry.path)

    def _path(self, block_hash: bytes) -> Path:
        name = hashlib.blake2b(block_hash, key=self._identity, digest_size=16).hexdigest()
        return self._folder / f"{name}.kv"

    def _checksum(self, block_hash: bytes, data: memoryview) -> bytes:
        """XXH3 of a block, seeded with what it is."""
        seed = xxh3_64_intdigest(self._identity + block_hash)
        return xxh3_64_intdigest(data, seed).to_bytes(CHECKSUM_BYTES, "little")


def _complete(done: Future[None]) -> bool:
    """Complete a future; returns whether it was not done yet."""
    try:
        done.set_result(None)
    except InvalidStateError:
        return False
    return True


def _check_folder(folder: Path) -> None:
    """Make the folder, if there is none. Raises ``PenstockError`` if it cannot be used."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        usable = os.access(folder, os.R_OK | os.W_OK | os.X_OK)
    except OSError as error:
        message = f"{folder} cannot be used ({error.strerror}); name a folder that this user may write to"
        raise PenstockError(Code.INVALID, message, "kv_offloading_disk_path") from error
    if not usable or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        message = f"{folder} has to be this user's alone, as its files tell prompts: chmod 700, or name another one"
        raise PenstockError(Code.INVALID, message, "kv_offloading_disk_path")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _write_whole(descriptor: int, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
