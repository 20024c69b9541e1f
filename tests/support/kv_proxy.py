"""Proxy between decode and prefill engines that loses, delays, duplicates or corrupts KV transfer messages."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from random import Random

import msgspec

from penstock.engine.kv_transfer.messages import Data, Message, Offer, decode, encode

HANDSHAKE = {"to_prefill": 1, "to_decode": 2}
"""Number of handshake messages in each direction; their headers differ in length from other messages' headers."""
Frames = list[tuple[Message, bytes]]
Fault = Callable[[Random, str, Message, bytes], Frames | None]
"""Returns the messages to forward for a direction, a message and the bytes after it; None: forward it after the next
message."""


class KVProxy:
    """Proxy that forwards connections to ``target``, and applies ``fault`` to each message after the handshake. Decode
    engines connect to ``address``, with ``kv_transport="tcp"``."""

    def __init__(self, target: str, fault: Fault, seed: int = 0) -> None:
        host, port = target.rsplit(":", 1)
        self._target = host, int(port)
        self._fault = fault
        self._random = Random(seed)
        self.faults = 0
        """Number of messages that were lost, delayed, duplicated or changed."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Close the listener and all connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for each in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def cut(self) -> None:
        """Close the current connections; new connections are accepted."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                decode_side, _ = self._listener.accept()
                prefill_side = socket.create_connection(self._target)
                self._sockets += [decode_side, prefill_side]
                for source, target, way in (
                    (decode_side, prefill_side, "to_prefill"),
                    (prefill_side, decode_side, "to_decode"),
                ):
                    threading.Thread(target=self._forward, args=(source, target, way), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, way: str) -> None:
        delayed: Frames = []
        with contextlib.suppress(OSError, EOFError):
            for _ in range(HANDSHAKE[way]):
                header = _read(source, 12)
                target.sendall(header + _read(source, int.from_bytes(header[:8], "little")))
            while True:
                message = decode(_read(source, int.from_bytes(_read(source, 4), "little")))
                data = _read(source, message.size) if isinstance(message, Data) else b""
                frames = self._fault(self._random, way, message, data)
                if frames is None:
                    self.faults += 1
                    delayed.append((message, data))
                    continue
                self.faults += frames != [(message, data)]
                for forwarded, content in [*frames, *delayed]:
                    encoded = encode(forwarded)
                    target.sendall(len(encoded).to_bytes(4, "little") + encoded + content)
                delayed.clear()
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def _read(source: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = source.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def lossy(share: float) -> Fault:
    """Fault that loses, delays or duplicates this share of the messages."""

    def fault(rng: Random, way: str, message: Message, data: bytes) -> Frames | None:
        if rng.random() >= share:
            return [(message, data)]
        return rng.choice(([], None, [(message, data)] * 2))

    return fault


def flipped_bit(share: float) -> Fault:
    """Fault that flips a bit in this share of the messages with KV data."""

    def fault(rng: Random, way: str, message: Message, data: bytes) -> Frames:
        if not data or rng.random() >= share:
            return [(message, data)]
        damaged = bytearray(data)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        return [(message, bytes(damaged))]

    return fault


def swapped_pieces(share: float) -> Fault:
    """Fault that swaps the slot indices 0 and 1 in this share of the messages with KV data of these slots."""

    def fault(rng: Random, way: str, message: Message, data: bytes) -> Frames:
        if not isinstance(message, Data) or message.index > 1 or rng.random() >= share:
            return [(message, data)]
        return [(msgspec.structs.replace(message, index=1 - message.index), data)]

    return fault


def wrong_epoch(share: float) -> Fault:
    """Fault that sets the epochs of all slots to the epochs of an earlier use, in this share of the offers."""

    def fault(rng: Random, way: str, message: Message, data: bytes) -> Frames:
        if not isinstance(message, Offer) or rng.random() >= share:
            return [(message, data)]
        old = [msgspec.structs.replace(piece, epoch=piece.epoch - 2) for piece in message.pieces]
        return [(msgspec.structs.replace(message, pieces=old), data)]

    return fault
