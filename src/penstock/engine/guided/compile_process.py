"""Processes that compile grammars under limits of time and memory, so that a hostile grammar harms nobody.

llguidance does not limit what compiling takes. A compile process loads it and the vocabulary once, has no threads, and
forks itself for each grammar. The forked process reads its request from a socket, writes the result to it, and is ended
by the kernel when it takes too much, or when the engine closes the socket, because nobody waits any more.

``serve`` is the process itself, ``CompileProcess`` the engine's side.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import msgspec

from penstock.core import Code, PenstockError

MAX_CPU_TIME = 10.0
"""Seconds of processor time to compile one grammar."""
MAX_WALL_TIME = 60.0
"""Seconds to compile one grammar, whatever the processor time."""
LIMIT_EXCEEDED = f"compiling it takes more than {MAX_CPU_TIME:g} seconds, or too much memory"
STACK_SIZE = 256 * 2**20
"""Stack to compile with, bytes: recursion is as deep as a schema's references. Only used pages take memory."""
_LENGTH = 8
"""Bytes of the length before a message."""


class CompileResult(msgspec.Struct, omit_defaults=True):
    """What compiling a grammar has come to."""

    size: int = 0
    """Bytes of memory that the grammar takes."""
    error: str = ""
    """Why it is not supported; empty if compilation succeeded."""


Compile = Callable[[bytes], CompileResult]


def serve(prepare: Callable[[bytes], Compile], max_memory: int) -> None:
    """Compile what the engine sends, until it ends.

    Args:
        prepare: makes the compiling function of ``CompileProcess``'s ``vocabulary``.
        max_memory: bytes that compiling one grammar may take beside what is loaded.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    control = socket.socket(fileno=sys.stdin.fileno())
    compile_grammar = prepare(_receive(control))
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            os._exit(0)
        if os.fork() == 0:
            try:
                control.close()
                _serve_one(socket.socket(fileno=descriptors[0]), compile_grammar, max_memory)
            finally:
                os._exit(1)
        os.close(descriptors[0])


def _serve_one(connection: socket.socket, compile_grammar: Compile, max_memory: int) -> None:
    """Compile the grammar of one request, in a forked process."""
    request = _receive(connection)
    connection.sendall(os.getpid().to_bytes(_LENGTH))
    _end_with(connection)
    memory = _memory("VmData") + max_memory + STACK_SIZE
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_TIME)
    signal.setitimer(signal.ITIMER_REAL, MAX_WALL_TIME)

    def run() -> None:
        result = compile_grammar(request)
        fcntl.fcntl(connection, fcntl.F_SETFL, 0)  # SIGIO also tells that there is room to write
        _send(connection, msgspec.json.encode(result))
        os._exit(0)

    threading.stack_size(STACK_SIZE)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def _end_with(connection: socket.socket) -> None:
    """Have the kernel end this process when the other side closes the connection: SIGIO's default action."""
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETFL, os.O_ASYNC)
    with contextlib.suppress(BlockingIOError):
        if not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):  # closed before
            os._exit(1)


def memory_in_use() -> int:
    """Bytes of this process's own memory that are in use."""
    return _memory("RssAnon")


def _memory(name: str) -> int:
    match = re.search(rf"^{name}:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def _send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(len(data).to_bytes(_LENGTH) + data)


def _receive(connection: socket.socket) -> bytes:
    """A message; empty if the other side has closed the connection."""
    length = _receive_exactly(connection, _LENGTH)
    return _receive_exactly(connection, int.from_bytes(length)) if length else b""


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 2**20))
        if not part:
            return b""
        parts += part
    return bytes(parts)


class Compilation:
    """A grammar that is being compiled in a process of its own."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._pid = 0
        """Of the process; 0 before it has started."""

    def wait(self, timeout: float | None) -> CompileResult:
        """Wait for the result. Raises ``TimeoutError`` if compiling takes longer than ``timeout`` seconds."""
        try:
            self._wait_for_start()
            self._connection.settimeout(timeout)
            self._connection.recv(1, socket.MSG_PEEK)
            self._connection.settimeout(None)  # the result comes as a whole, soon after its first byte
            result = _receive(self._connection)
        except ConnectionResetError:
            result = b""
        if not result:
            return CompileResult(error=LIMIT_EXCEEDED)
        return msgspec.json.decode(result, type=CompileResult)

    def lower_priority(self) -> None:
        """Let others have the processor first."""
        with contextlib.suppress(OSError):  # it has just ended
            self._wait_for_start()
            os.setpriority(os.PRIO_PROCESS, self._pid, 19)

    def _wait_for_start(self) -> None:
        """Wait until the process has been forked, after the vocabulary has been loaded."""
        if not self._pid:
            self._pid = int.from_bytes(_receive_exactly(self._connection, _LENGTH))

    def cancel(self) -> None:
        """End the process: its result is not wanted any more. From any thread; ``wait`` returns."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()


class CompileProcess:
    """Starts a compile process, and starts it again if it has died.

    Args:
        vocabulary: what the ``prepare`` of ``llguidance_process`` takes.
    """

    def __init__(self, vocabulary: bytes) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", f"{__package__}.llguidance_process"]
            output = subprocess.DEVNULL
            process = subprocess.Popen(  # in its own group: a terminal's Ctrl-C must not end work under way
                command, stdin=theirs.fileno(), stdout=output, stderr=output, process_group=0
            )
        self._process, self._control = process, ours
        self._kill = weakref.finalize(self, _kill, process, ours)
        with contextlib.suppress(OSError):  # the process exited; ``compile`` restarts it
            _send(ours, self._vocabulary)

    def compile(self, request: bytes) -> Compilation:
        """Start to compile a grammar. Raises ``PenstockError`` (``internal``) if the process dies twice."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            for _ in range(2):
                try:
                    if self._process.poll() is None:
                        socket.send_fds(self._control, [b"\0"], [theirs.fileno()])
                        break
                    self._kill()
                    self._start()
                except OSError:
                    self._process.kill()
                    self._process.wait()
            else:
                raise PenstockError(Code.INTERNAL, "the process in which grammars are compiled has died twice")
        with contextlib.suppress(OSError):  # it has died; ``Compilation.wait`` finds out
            _send(ours, request)
        return Compilation(ours)


def _kill(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    process.kill()
    process.wait()
    control.close()
