"""Decoding of untrusted media files in a separate process.

The process reads a request and the file from standard input and writes its reply to standard output. Its memory and
processor time are limited, and it is killed when it takes too long.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from typing import TypeVar

import msgspec

from penstock.core.errors import invalid

T = TypeVar("T")
R = TypeVar("R")

MAX_MEMORY = 4 * 2**30
"""Limit of the process's address space in bytes."""


def decode_isolated(module: str, request: msgspec.Struct, data: bytes, reply: type[T], kind: str, timeout: float) -> T:
    """Decode a file in a separate process.

    Args:
        module: module that the process runs; it calls ``serve_one``.
        request: arguments for the process.
        data: content of the file.
        reply: type of the reply.
        kind: ``video`` or ``audio``, for error messages.
        timeout: time limit in seconds (option ``video_timeout`` or ``audio_timeout``).

    Raises ``PenstockError`` (``invalid``) if the process fails or takes too long.
    """
    encoded = msgspec.msgpack.encode(request)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", module],
            input=len(encoded).to_bytes(8, "little") + encoded + data,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=timeout,
            check=True,
            start_new_session=True,  # Ctrl-C in a terminal must not kill a decoder of an open request
        )
        return msgspec.msgpack.decode(done.stdout, type=reply)
    except subprocess.TimeoutExpired as error:
        message = f"takes more than {timeout:g} seconds to decode ({kind}_timeout): send a shorter file"
        raise invalid(kind, message, timeout) from error
    except (subprocess.CalledProcessError, msgspec.MsgspecError) as error:
        raise invalid(kind, f"is damaged {kind}, or takes too much time or memory to decode: convert it") from error


def serve_one(
    request_type: type[R], timeout: Callable[[R], float], answer: Callable[[bytes, R], msgspec.Struct]
) -> None:
    """Serve the one request of a decoding process. Runs in that process.

    Args:
        timeout: returns the limit of processor time in seconds.
        answer: returns the reply for the file and the request.
    """
    size = int.from_bytes(sys.stdin.buffer.read(8), "little")
    request = msgspec.msgpack.decode(sys.stdin.buffer.read(size), type=request_type)
    data = sys.stdin.buffer.read()
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    seconds = int(timeout(request)) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    sys.stdout.buffer.write(msgspec.msgpack.encode(answer(data, request)))
