"""Snapshots of recurrent states at block boundaries, which the prefix cache needs beside keys and values."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class StateSnapshots:
    """Numbers of the workers' snapshots, by the prefix cache's hash of the block that ends where the state was copied.
    The least recently used snapshot is overwritten first.

    Args:
        count: number of snapshots.
        needs_kv: False for models without attention, whose sequences can start from a state alone.
    """

    def __init__(self, count: int, needs_kv: bool = True) -> None:
        self.needs_kv = needs_kv
        """True if a sequence that starts from a state needs the keys and values of the tokens before it."""
        self.total = count
        """Number of snapshots."""
        self._free = list(range(count))
        self._by_hash: OrderedDict[bytes, int] = OrderedDict()

    @property
    def num_used(self) -> int:
        """Number of snapshots with a state."""
        return len(self._by_hash)

    @property
    def num_taken(self) -> int:
        """Number of snapshots that are being written, exported or imported."""
        return self.total - len(self._free) - len(self._by_hash)

    @property
    def can_take(self) -> bool:
        """True if ``take`` returns a snapshot."""
        return bool(self._free or self._by_hash)

    @property
    def has_free(self) -> bool:
        """True if ``take`` returns a snapshot without overwriting another."""
        return bool(self._free)

    def get(self, block_hash: bytes) -> int | None:
        """Snapshot of the state after the block with a hash; None if the pool has no such state."""
        return self._by_hash.get(block_hash)

    def find_longest(self, hashes: Sequence[bytes]) -> tuple[int, int]:
        """The longest prefix of blocks with a snapshot at its end: number of blocks, and snapshot; 0 and -1 if there is
        none."""
        for count in range(len(hashes), 0, -1):
            if (snapshot := self._by_hash.get(hashes[count - 1])) is not None:
                self._by_hash.move_to_end(hashes[count - 1])
                return count, snapshot
        return 0, -1

    def take(self) -> int | None:
        """A snapshot to be written: a free one, or the least recently used; None if all are being written."""
        if self._free:
            return self._free.pop()
        return self._by_hash.popitem(last=False)[1] if self._by_hash else None

    def put(self, block_hash: bytes, snapshot: int) -> None:
        """Keep a written snapshot under a hash. If there is one already, the older one is freed."""
        if (old := self._by_hash.pop(block_hash, None)) is not None:
            self._free.append(old)
        self._by_hash[block_hash] = snapshot

    def free(self, snapshot: int) -> None:
        """Free a snapshot that was taken, and will not be written."""
        self._free.append(snapshot)

    def forget(self, block_hash: bytes) -> None:
        """Free the snapshot of a hash, if there is one."""
        if (snapshot := self._by_hash.pop(block_hash, None)) is not None:
            self._free.append(snapshot)

    def clear(self) -> None:
        """Free all snapshots that are not being written."""
        self._free += self._by_hash.values()
        self._by_hash.clear()
