"""Compile processes: they compile grammars under limits of time and memory, which protects against hostile grammars.

llguidance does not limit the time and memory of compilation. A compile process loads llguidance and the vocabulary
once, has no threads, and forks itself for each grammar. The forked process reads its request from a socket and writes
the result to the same socket. The kernel ends the forked process if it exceeds a limit, or if the engine cancels by
closing the socket.

``serve`` is the main function of the compile process; the engine uses ``CompileProcess``.
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
"""Maximum seconds of processor time to compile one grammar."""
MAX_WALL_TIME = 60.0
"""Maximum seconds of wall time to compile one grammar."""
LIMIT_EXCEEDED = f"compiling it takes more than {MAX_CPU_TIME:g} seconds, or too much memory; simplify it"
"""End of the error message for a grammar that exceeds a limit."""
STACK_SIZE = 256 * 2**20
"""Bytes of the stack for compilation, which recurses to the depth of a schema's references. Only used pages take
memory."""
_LENGTH = 8
"""Bytes of the length prefix of a message."""


class CompileResult(msgspec.Struct, omit_defaults=True):
    """Result of compiling a grammar."""

    size: int = 0
    """Bytes of memory that the grammar takes."""
    error: str = ""
    """Error message; empty if compilation succeeded."""


Compile = Callable[[bytes], CompileResult]
"""Function that compiles the grammar of an encoded request."""


def serve(prepare: Callable[[bytes], Compile], max_memory: int) -> None:
    """Compile grammars for the engine, until it closes the socket on stdin.

    Args:
        prepare: creates the compile function from the ``vocabulary`` of ``CompileProcess``.
        max_memory: maximum bytes that compiling one grammar may add to the memory of this process.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forked processes
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
    """Compile the grammar of one request, in the forked process."""
    request = _receive(connection)
    connection.sendall(os.getpid().to_bytes(_LENGTH))
    _end_on_close(connection)
    memory = _memory("VmData") + max_memory + STACK_SIZE
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_TIME)
    signal.setitimer(signal.ITIMER_REAL, MAX_WALL_TIME)

    def run() -> None:
        result = compile_grammar(request)
        fcntl.fcntl(connection, fcntl.F_SETFL, 0)  # SIGIO is also sent when the socket becomes writable
        _send(connection, msgspec.json.encode(result))
        os._exit(0)

    threading.stack_size(STACK_SIZE)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def _end_on_close(connection: socket.socket) -> None:
    """End this process when the other side closes the connection: the kernel sends SIGIO, whose default action is to
    terminate."""
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETFL, os.O_ASYNC)
    with contextlib.suppress(BlockingIOError):
        if not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):  # the connection is already closed
            os._exit(1)


def memory_in_use() -> int:
    """Bytes of this process's anonymous resident memory."""
    return _memory("RssAnon")


def _memory(name: str) -> int:
    """Bytes of a memory counter in ``/proc/self/status``."""
    match = re.search(rf"^{name}:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def _send(connection: socket.socket, data: bytes) -> None:
    """Send a message with a length prefix."""
    connection.sendall(len(data).to_bytes(_LENGTH) + data)


def _receive(connection: socket.socket) -> bytes:
    """Receive a message; empty if the other side has closed the connection."""
    length = _receive_exactly(connection, _LENGTH)
    return _receive_exactly(connection, int.from_bytes(length)) if length else b""


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    """Receive ``count`` bytes; empty if the other side closes the connection before."""
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 2**20))
        if not part:
            return b""
        parts += part
    return bytes(parts)


class Compilation:
    """A grammar that is being compiled in a forked process."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._pid = 0
        """PID of the forked process; 0 before it has started."""

    def wait(self, timeout: float | None) -> CompileResult:
        """Wait for the result. Raises ``TimeoutError`` if it takes longer than ``timeout`` seconds."""
        try:
            self._wait_for_start()
            self._connection.settimeout(timeout)
            self._connection.recv(1, socket.MSG_PEEK)
            self._connection.settimeout(None)  # the whole result arrives soon after the first byte
            result = _receive(self._connection)
        except ConnectionResetError:
            result = b""
        if not result:
            return CompileResult(error=LIMIT_EXCEEDED)
        return msgspec.json.decode(result, type=CompileResult)

    def lower_priority(self) -> None:
        """Give the process the lowest scheduling priority."""
        with contextlib.suppress(OSError):  # the process may just have ended
            self._wait_for_start()
            os.setpriority(os.PRIO_PROCESS, self._pid, 19)

    def _wait_for_start(self) -> None:
        """Wait for the fork, which happens after the compile process has loaded the vocabulary."""
        if not self._pid:
            self._pid = int.from_bytes(_receive_exactly(self._connection, _LENGTH))

    def cancel(self) -> None:
        """End the process, so that ``wait`` returns. Thread-safe."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()


class CompileProcess:
    """Starts a compile process, and restarts it if it has died.

    Args:
        vocabulary: message for the process (``VocabularyMessage`` as JSON).
    """

    def __init__(self, vocabulary: bytes) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", f"{__package__}.llguidance_process"]
            output = subprocess.DEVNULL
            process = subprocess.Popen(  # a separate session, so that Ctrl-C in a terminal does not reach it
                command, stdin=theirs.fileno(), stdout=output, stderr=output, start_new_session=True
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
                message = "the process that compiles grammars has died twice; send the request again"
                raise PenstockError(Code.INTERNAL, message)
        with contextlib.suppress(OSError):  # the process has died; ``Compilation.wait`` reports it
            _send(ours, request)
        return Compilation(ours)


def _kill(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    """Kill a compile process and close its socket."""
    process.kill()
    process.wait()
    control.close()
