"""The disk tier of the prefix cache: a folder with one file per block, which threads read and write.

Any error of the disk or a file is a cache miss. Files are verified by a checksum that is seeded with the block's hash.
A file is renamed to its final name once it is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from penstock.config.cache_folder import RESERVED, available_bytes, locked_folder, open_cached
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from .host_tier import HostTier

logger = logging.getLogger(__name__)

NUM_READERS = 2
"""Number of reader threads."""
READ_TIMEOUT = 5.0
"""Seconds without a block from the disk after which waiting requests compute the missing part of their prefix."""
RETRY_AFTER = 30.0
"""Seconds to pause writing after a disk error."""
CLOSE_TIMEOUT = 5.0
"""Maximum seconds to write queued blocks in ``close``."""
MAX_QUEUED = 65536
"""Maximum number of blocks queued for writing."""
SCANS_PER_LIMIT = 16
"""The folder is scanned each time that ``1 / SCANS_PER_LIMIT`` of its size limit was written."""
STALE_AFTER = 3600.0
"""Age in seconds at which an incomplete file is deleted: the process that wrote it must have died."""
BLOCK_FILE = re.compile(r"[0-9a-f]{32}\.kv")
"""Name of a complete file."""
PART_FILE = re.compile(r"[0-9a-f]{32}\.kv\.[0-9a-f]{16}\.part")
"""Name of an incomplete file."""
CHECKSUM_BYTES = 8


class PrefixOnDisk(NamedTuple):
    """Blocks of a prefix to read, and states within it (``KVOffloading.read``)."""

    block_hashes: Sequence[bytes]
    num_known: int
    num_usable: int
    state_hashes: Callable[[bytes], Iterable[bytes]] | None = None
    """Hashes of the slots that hold the recurrent state after a block; None for models without such states."""


class DiskTier:
    """Stores blocks as files in a folder, which several engines may share.

    Each engine enforces the size limit for the whole folder, including files of other engines, models and weights.

    Args:
        limit: maximum bytes of all files.
        identity: everything except the block hash on which KV depends. Engines with equal identities share files.

    Raises ``PenstockError`` (``invalid``) if the folder cannot be used, or is accessible to other users.
    """

    def __init__(self, folder: Path, limit: int, identity: bytes, host: HostTier) -> None:
        self._folder = folder
        self._limit = limit
        self._identity = hashlib.blake2b(identity, digest_size=32).digest()
        self._host = host
        self._file_bytes = CHECKSUM_BYTES + host.slot_bytes
        if limit < self._file_bytes:
            message = f"must be at least {self._file_bytes} bytes, the size of a block's file, is {limit} bytes"
            raise invalid("kv_offloading_disk_size", message, self._file_bytes)
        _check_folder(folder)
        self.num_hits = 0
        """Number of blocks read since the start."""
        self.num_state_slots = 0
        """Number of slots of recurrent states read since the start."""
        self.num_written = 0
        """Number of blocks written since the start."""
        self.num_evictions = 0
        """Number of files that this engine has deleted to make room."""
        self.num_read_failures = 0
        """Number of damaged files and timed-out reads."""
        self.num_write_failures = 0
        """Number of blocks that could not be written."""
        self._writer_id = os.urandom(8).hex()
        """Random part of the names of incomplete files."""
        self._paused_until = 0.0
        """Time until which no blocks are written after an error, seconds on the monotonic clock."""
        self._writable_bytes = 0
        """Number of bytes that may be written before the folder is scanned again."""
        self._to_store: dict[bytes, None] = {}
        """Ordered set of the hashes of blocks to store."""
        self._to_delete: dict[bytes, None] = {}
        """Ordered set of the hashes of blocks to delete, before the next block is stored."""
        self._changed = threading.Condition()
        """Guards the two sets; the writer thread waits for it."""
        self._closing = False
        self._reads: SimpleQueue[tuple[PrefixOnDisk, Future[None]] | None] = SimpleQueue()
        """Reads for the reader threads; None ends a thread."""
        self._last_read = 0.0
        """Time at which a block was last read, or found missing, seconds on the monotonic clock."""
        self._overdue = 0
        """Number of timed-out reads that have not ended yet."""
        self._pending_reads: list[tuple[float, Future[None]]] = []
        """Start time and future of each pending read."""
        threads = [threading.Thread(target=self._run_reader, daemon=True) for _ in range(NUM_READERS)]
        self._writer = threading.Thread(target=self._run_writer, daemon=True)
        for thread in (*threads, self._writer):
            thread.start()

    # --- In the thread that runs the steps ----------------------------------------------------------------------------

    def read(self, prefix: PrefixOnDisk) -> Future[None] | None:
        """Start to read a prefix into the host tier: its blocks, up to the first that is not on the disk, and the last
        recurrent state within them.

        Returns:
            A future that is done when the blocks are read, or if no block was read for ``READ_TIMEOUT``; call ``poll``
            until then. None while a timed-out read is still in progress.
        """
        if self._overdue > 0:
            return None
        done: Future[None] = Future()
        self._pending_reads.append((time.monotonic(), done))
        self._reads.put((prefix, done))
        return done

    def poll(self) -> None:
        """Complete the futures of timed-out reads."""
        if not self._pending_reads:
            return
        now, pending = time.monotonic(), []
        for started, done in self._pending_reads:
            if now > max(started, self._last_read) + READ_TIMEOUT and _complete(done):
                with self._changed:
                    self._overdue += 1
                self.num_read_failures += 1
                message = "%s: no block could be read for %g seconds; prefixes are computed instead"
                logger.warning(message, self._folder, READ_TIMEOUT)
            elif not done.done():
                pending.append((started, done))
        self._pending_reads = pending

    def keep(self, block_hashes: Sequence[bytes]) -> None:
        """Queue blocks of the host tier for writing; blocks that are already on the disk are marked as just used."""
        with self._changed:
            for one in block_hashes:
                self._to_store.pop(one, None)
                self._to_store[one] = None
            while len(self._to_store) > MAX_QUEUED:
                del self._to_store[next(iter(self._to_store))]
            self._changed.notify()

    def forget(self, block_hashes: Sequence[bytes]) -> None:
        """Delete blocks with invalid contents. A later ``keep`` writes them again if the host tier has them."""
        with self._changed:
            self._to_delete |= dict.fromkeys(block_hashes)
            self._changed.notify()

    def close(self) -> None:
        """Write queued blocks for at most ``CLOSE_TIMEOUT`` seconds, and end the threads."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        for _ in range(NUM_READERS):
            self._reads.put(None)
        self._writer.join(CLOSE_TIMEOUT)

    # --- In the threads that read -------------------------------------------------------------------------------------

    def _run_reader(self) -> None:
        while job := self._reads.get():
            prefix, done = job
            try:
                self._read(prefix, done)
            except Exception:
                logger.exception("cannot read KV blocks from %s", self._folder)
            if not _complete(done) and not done.cancelled():
                with self._changed:
                    self._overdue -= 1

    def _read(self, prefix: PrefixOnDisk, done: Future[None]) -> None:
        """Read a prefix (``read``), or a part of it until ``done`` is completed by a timeout."""
        held: list[int] = []
        hashes, count = prefix.block_hashes, prefix.num_known
        try:
            num_read = self._read_slots(hashes[count:], held, done)
            self.num_hits += num_read
            if not prefix.state_hashes:
                return
            held_blocks = len(held)
            for end in range(count + held_blocks, prefix.num_usable, -1):
                state = list(prefix.state_hashes(hashes[end - 1]))
                self.num_state_slots += self._read_slots(state, held, done)
                if len(held) == held_blocks + len(state) or done.done():
                    return
                self._host.release(held[held_blocks:])
                del held[held_blocks:]
        finally:
            self._host.release(held)

    def _read_slots(self, hashes: Sequence[bytes], held: list[int], done: Future[None]) -> int:
        """Read slots of the host tier up to the first that is missing, or until ``done`` is completed. Adds the slots,
        with a reference each, to ``held``. Returns the number of slots that were not in the host tier."""
        num_read = 0
        for one in hashes:
            if done.done():  # timed out or cancelled
                break
            slots = self._host.hold([one])
            if not slots:
                slots = self._read_block(one)
                num_read += len(slots)
            self._last_read = time.monotonic()
            if not slots:
                break
            held += slots
        return num_read

    def _read_block(self, block_hash: bytes) -> list[int]:
        """Read a block into a slot of the host tier. Returns the slot, with a reference; empty if the block cannot be
        read."""
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
                is_complete = file.readinto(data) == len(data) and not file.read(1)  # type: ignore[attr-defined]
            except OSError:
                is_complete, checksum = False, b""
            if is_complete and checksum == self._checksum(block_hash, data):
                self._host.cache(slots[0], block_hash)
                return slots
        self._host.release(slots)
        self.num_read_failures += 1
        logger.warning("deleting the damaged file %s; its block will be computed", path)
        with contextlib.suppress(OSError):
            path.unlink()
        return []

    # --- In the thread that writes ------------------------------------------------------------------------------------

    def _run_writer(self) -> None:
        while True:
            with self._changed:
                while not (queue := self._to_delete or self._to_store):
                    if self._closing:
                        return
                    self._changed.wait()
                block_hash = next(iter(queue))
                del queue[block_hash]
            try:
                if queue is self._to_delete:
                    self._path(block_hash).unlink(missing_ok=True)
                elif not self._touch(block_hash) and time.monotonic() >= self._paused_until:
                    self._write(block_hash)
            except Exception as error:
                self.num_write_failures += 1
                self._paused_until = time.monotonic() + RETRY_AFTER
                logger.warning("%s: no blocks are written for %g seconds: %s", self._folder, RETRY_AFTER, error)

    def _touch(self, block_hash: bytes) -> bool:
        """Mark a block's file as just used. Returns False if no file with the right size and permissions exists; its
        contents are not read."""
        path = self._path(block_hash)
        try:
            status = path.lstat()
            is_complete = stat.S_ISREG(status.st_mode) and status.st_size == self._file_bytes
            if not is_complete or status.st_mode & 0o077 or status.st_uid != os.geteuid():
                return False
            os.utime(path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def _write(self, block_hash: bytes) -> None:
        """Write a block if the host tier still has it. Raises ``OSError``."""
        slots = self._host.hold([block_hash])
        if not slots:
            return
        path = self._path(block_hash)
        part = path.with_name(f"{path.name}.{self._writer_id}.part")
        try:
            if self._writable_bytes < self._file_bytes:
                self._make_room()
            self._writable_bytes -= self._file_bytes
            data = memoryview(self._host.data[slots[0]])
            part.unlink(missing_ok=True)
            with open(part, "xb", buffering=0, opener=_private) as file:
                _write_all_bytes(file.fileno(), self._checksum(block_hash, data))
                _write_all_bytes(file.fileno(), data)
            part.replace(path)
            self.num_written += 1
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
        finally:
            self._host.release(slots)

    def _make_room(self) -> None:
        """Delete the least recently used files until there is room for ``limit / SCANS_PER_LIMIT`` bytes. Raises
        ``OSError`` if there is no room for a single block."""
        wanted = max(self._limit // SCANS_PER_LIMIT, self._file_bytes)
        with locked_folder(self._folder):
            files = sorted(self._files())
            used = sum(size for _, size, _ in files)
            room = min(self._limit - used, available_bytes(self._folder))
            for _, size, path in files:
                if room >= wanted:
                    break
                path.unlink(missing_ok=True)
                room += size
                self.num_evictions += 1
        if room < self._file_bytes:
            raise OSError(f"the disk is full ({RESERVED})")
        self._writable_bytes = min(room, wanted)

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """Yield time of last use, size in bytes and path of each block file. Deletes incomplete files of dead
        processes."""
        with os.scandir(self._folder) as entries:
            for entry in entries:
                is_part = PART_FILE.fullmatch(entry.name)
                if not is_part and not BLOCK_FILE.fullmatch(entry.name):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if not stat.S_ISREG(status.st_mode):
                        continue
                    if not is_part:
                        yield status.st_atime_ns, status.st_size, Path(entry.path)
                    elif time.time() - status.st_mtime > STALE_AFTER:
                        os.unlink(entry.path)

    def _path(self, block_hash: bytes) -> Path:
        """Path of a block's file."""
        name = hashlib.blake2b(block_hash, key=self._identity, digest_size=16).hexdigest()
        return self._folder / f"{name}.kv"

    def _checksum(self, block_hash: bytes, data: memoryview) -> bytes:
        """XXH3 of a block, seeded with its identity and hash."""
        seed = xxh3_64_intdigest(self._identity + block_hash)
        return xxh3_64_intdigest(data, seed).to_bytes(CHECKSUM_BYTES, "little")


def _complete(done: Future[None]) -> bool:
    """Complete a future. Returns False if it was already done."""
    try:
        done.set_result(None)
    except InvalidStateError:
        return False
    return True


def _check_folder(folder: Path) -> None:
    """Create the folder if it does not exist. Raises ``PenstockError`` (``invalid``) if the folder cannot be used, or
    is accessible to other users."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        usable = os.access(folder, os.R_OK | os.W_OK | os.X_OK)
    except OSError as error:
        message = f"{folder} cannot be used ({error.strerror}); name a folder to which this user can write"
        raise PenstockError(Code.INVALID, message, "kv_offloading_disk_path") from error
    if not usable or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        message = f"{folder} must be accessible to this user only, since its files reveal prompts: chmod 700 it"
        raise PenstockError(Code.INVALID, message, "kv_offloading_disk_path")


def _private(path: str, flags: int) -> int:
    """Open a file that only this user can access (an ``opener`` of ``open``)."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _write_all_bytes(descriptor: int, data: bytes | memoryview) -> None:
    """Write all bytes, with several calls if the kernel writes only a part."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
