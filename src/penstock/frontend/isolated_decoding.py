"""Decoding of media files, which are not trusted, in a process of its own.

The process reads a request and the file on standard input and writes its reply on standard output. Its memory and
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
"""Bytes of the process's address space."""


def decode_isolated(module: str, request: msgspec.Struct, data: bytes, reply: type[T], kind: str, timeout: float) -> T:
    """Decode a file in a process.

    Args:
        module: which the process runs; it calls ``serve_one``.
        request: what the process is asked.
        data: the file.
        reply: type of the reply.
        kind: what the file is, ``video`` or ``audio``, for errors.
        timeout: seconds that it may take, of the option ``KIND_timeout``.

    Raises ``PenstockError`` (``invalid``) where the process fails or takes too long.
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
            process_group=0,  # a terminal's Ctrl-C must not end work under way
        )
        return msgspec.msgpack.decode(done.stdout, type=reply)
    except subprocess.TimeoutExpired as error:
        raise invalid(kind, f"takes more than {timeout:g} seconds to decode ({kind}_timeout)", timeout) from error
    except (subprocess.CalledProcessError, msgspec.MsgspecError) as error:
        raise invalid(kind, f"is damaged {kind}, or takes too much time or memory to decode") from error


def serve_one(
    request_type: type[R], timeout: Callable[[R], float], answer: Callable[[bytes, R], msgspec.Struct]
) -> None:
    """In the process: answer the one request.

    Args:
        timeout: seconds of processor time that a request may take.
        answer: makes the reply of the file and the request.
    """
    size = int.from_bytes(sys.stdin.buffer.read(8), "little")
    request = msgspec.msgpack.decode(sys.stdin.buffer.read(size), type=request_type)
    data = sys.stdin.buffer.read()
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    seconds = int(timeout(request)) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    sys.stdout.buffer.write(msgspec.msgpack.encode(answer(data, request)))
