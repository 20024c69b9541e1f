"""A fork server: a process that has imported PyTorch and the worker's modules, and forks each worker.

Importing PyTorch takes more than a second of CPU time. Forked workers do not repeat the import, and share its memory.
The fork server computes nothing and has no threads, so forking it is safe, unlike forking an application's process.

The fork server of ``multiprocessing`` is not used, because it runs the application's ``__main__`` in each worker, and
keeps the environment and the CPU affinity of its start.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
import weakref
from pathlib import Path
from typing import NoReturn

import msgspec

from penstock.core import Code, PenstockError

from ..exit_status import exit_reason
from ..lean_torch import import_torch
from .messages import Start

FORK_TIMEOUT = 300.0
"""Maximum seconds for the fork server to import PyTorch, perhaps from a slow disk, and to fork."""
EXIT_TIMEOUT = 5.0
"""Maximum seconds to wait until the fork server reports the exit status of an ended worker."""
SERVER_NAME = "penstock-forks"
MAX_MESSAGE = 2**17
MAX_DESCRIPTORS = 64


class _Fork(msgspec.Struct, tag=True):
    """Fork a worker. Sent with file descriptors: standard output, standard error, then ``descriptors``."""

    number: int
    start: Start
    descriptors: list[int]
    """Numbers of the file descriptors in ``start``. The worker uses the same numbers."""
    cores: list[int]


class _Forked(msgspec.Struct, tag=True):
    """The reply to ``_Fork``. Sent with a ``pidfd`` of the worker."""

    number: int
    pid: int


class _Exited(msgspec.Struct, tag=True):
    number: int
    status: int
    """Exit status, as in ``subprocess.Popen.returncode``."""


_encoder = msgspec.json.Encoder()
_reply = msgspec.json.Decoder(_Forked | _Exited)


class ForkedProcess:
    """A worker forked by a fork server.

    Args:
        pidfd: file descriptor of the process (``pidfd_open``), readable once the process has ended.
    """

    def __init__(self, server: ForkServer, number: int, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self._exit_status = functools.cache(functools.partial(server.take_exit_status, number))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end of the process. Returns True if the process ended within ``timeout`` seconds."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(None if timeout is None else timeout * 1000))

    def status(self) -> int | None:
        """Exit status of the ended process, as ``subprocess.Popen.returncode``; None if the fork server has ended
        without reporting it."""
        return self._exit_status()

    def kill(self) -> None:
        """Kill the process, and wait until it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        self.wait()
        self.status()

    def close(self) -> None:
        """Close the pidfd of the ended process."""
        self.status()
        os.close(self.pidfd)


class ForkServer:
    """A fork server process with this process's current environment and working directory. It is killed when this
    object is garbage-collected; its workers keep running."""

    def __init__(self) -> None:
        self._socket, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(FORK_TIMEOUT)
        command = [sys.executable, "-P", "-m", __name__, str(server_end.fileno()), str(os.getpid())]
        with server_end:
            self._process = subprocess.Popen(  # a separate session: Ctrl-C in a terminal is for this process
                command, stdin=subprocess.DEVNULL, pass_fds=[server_end.fileno()], start_new_session=True
            )
        self._count = 0
        self._forked: dict[int, tuple[int, list[int]]] = {}
        """Process id and ``pidfd`` of workers not yet returned by ``fork``, by number."""
        self._statuses: dict[int, int] = {}
        """Exit statuses of ended workers, by worker number."""
        self._unwanted: set[int] = set()
        """Numbers of the workers to kill: their ``fork`` was interrupted, and they have not ended yet."""
        self._lock = threading.Lock()
        weakref.finalize(self, _end_server, self._process, self._socket, os.getpid())

    def fork(self, start: Start, descriptors: list[int]) -> ForkedProcess:
        """Fork a worker with this thread's CPU affinity.

        Args:
            descriptors: file descriptors named in ``start``.

        Raises ``PenstockError`` if the fork server has ended or does not answer, and ``OSError`` if this process has
        no file descriptor left.
        """
        with self._lock:
            self._count += 1
            number = self._count
            message = _Fork(number, start, descriptors, sorted(os.sched_getaffinity(0)))
            try:
                socket.send_fds(self._socket, [_encoder.encode(message)], [1, 2, *descriptors])
            except (BrokenPipeError, ConnectionResetError):
                raise self._ended() from None
            except TimeoutError:
                raise self._hung() from None
            try:
                while number not in self._forked:
                    self._receive()
            except KeyboardInterrupt:
                self._discard(number)
                raise
            pid, pidfds = self._forked[number]
            if not pidfds:  # this process has no free file descriptor, so the kernel dropped the pidfd
                self._discard(number)
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            del self._forked[number]
        return ForkedProcess(self, number, pid, pidfds[0])

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def take_exit_status(self, number: int) -> int | None:
        """Remove and return the exit status of an ended worker; None if the fork server does not report it."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        with self._lock, contextlib.suppress(PenstockError):
            while number not in self._statuses and poll.poll(EXIT_TIMEOUT * 1000):
                self._receive()
        return self._statuses.pop(number, None)

    def _discard(self, number: int) -> None:
        """Kill a worker that ``fork`` does not return. If this method is interrupted, a later ``_receive`` kills the
        worker."""
        self._unwanted.add(number)
        if number in self._forked:
            _kill(*self._forked.pop(number))
        while number in self._unwanted:
            self._receive()

    def _receive(self) -> None:
        """Handle the next message of the fork server."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self._socket, MAX_MESSAGE, 1, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            message = b""
        except TimeoutError:
            raise self._hung() from None
        if not message:
            raise self._ended()
        reply = _reply.decode(message)
        if isinstance(reply, _Forked):
            self._forked[reply.number] = reply.pid, descriptors
            if reply.number in self._unwanted:
                _kill(*self._forked.pop(reply.number))
        elif reply.number in self._unwanted:
            self._unwanted.remove(reply.number)
        else:
            self._statuses[reply.number] = reply.status

    def _hung(self) -> PenstockError:
        self._process.kill()
        self._process.wait()
        message = f"the workers' fork server has not answered in {FORK_TIMEOUT:g} seconds and was killed; try again"
        return PenstockError(Code.UNAVAILABLE, message)

    def _ended(self) -> PenstockError:
        status = self._process.wait()
        message = f"the workers' fork server has ended ({exit_reason(status)}); see its standard error for the cause"
        return PenstockError(Code.INTERNAL, message)


def _kill(pid: int, pidfds: list[int]) -> None:
    """Kill a worker before the fork server has reported its end, and close its pidfd."""
    with contextlib.suppress(ProcessLookupError):
        if pidfds:
            signal.pidfd_send_signal(pidfds[0], signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)
    for pidfd in pidfds:
        os.close(pidfd)


def _end_server(process: subprocess.Popen[bytes], connection: socket.socket, owner: int) -> None:
    connection.close()
    if os.getpid() == owner:
        process.kill()
        process.wait()


_shared: tuple[object, ForkServer] | None = None
_sharing = threading.Lock()


def fork_worker(start: Start, descriptors: list[int]) -> ForkedProcess:
    """Fork a worker from this process's fork server (see ``ForkServer.fork``). The fork server is started for the first
    worker, and restarted if it has ended or the environment or working directory has changed."""
    global _shared
    with _sharing:
        started_in = os.getpid(), dict(os.environ), os.getcwd()
        if _shared is None or _shared[0] != started_in or not _shared[1].running:
            _shared = started_in, ForkServer()
        server = _shared[1]
    return server.fork(start, descriptors)


# --- In the fork server's process -----------------------------------------------------------------------------------


def main() -> None:
    """Run the fork server until its parent ends. Command-line arguments: socket descriptor, parent's process id."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # a terminal signals all processes, but the engine ends its workers
        signal.signal(ignored, signal.SIG_IGN)
    _name(SERVER_NAME)
    gc.disable()  # garbage collections would take a tenth of the import time
    import_torch()
    from . import worker_process  # noqa: F401

    gc.collect()
    gc.freeze()  # garbage collections in workers would copy the shared memory pages
    connection, parent = socket.socket(fileno=int(sys.argv[1])), os.pidfd_open(int(sys.argv[2]))
    children: dict[int, tuple[int, int]] = {}
    """Number and process id of each worker, by its pidfd."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    poll.register(parent, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == parent:
                return
            if descriptor in children:
                number, pid = children.pop(descriptor)
                poll.unregister(descriptor)
                os.close(descriptor)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                connection.send(_encoder.encode(_Exited(number, status)))
                continue
            encoded, received, _, _ = socket.recv_fds(connection, MAX_MESSAGE, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
            if not encoded:
                return
            message = msgspec.json.decode(encoded, type=_Fork)
            _name(f"penstock-rank{message.start.rank_info.world_rank}")  # the forked worker inherits this name
            with warnings.catch_warnings():  # Python warns of threads, but OpenBLAS ends its threads before a fork
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                for inherited in (connection.detach(), parent, *children):
                    os.close(inherited)
                _move([1, 2, *message.descriptors], received)
                _run_worker(message)
            _name(SERVER_NAME)
            for sent in received:
                os.close(sent)
            pidfd = os.pidfd_open(pid)
            children[pidfd] = message.number, pid
            poll.register(pidfd, select.POLLIN)
            socket.send_fds(connection, [_encoder.encode(_Forked(message.number, pid))], [pidfd])


def _name(name: str) -> None:
    """Set the process name shown by ``ps`` and ``top``."""
    Path("/proc/self/comm").write_text(name)


def _move(wanted: list[int], received: list[int]) -> None:
    """Give each received file descriptor the number at the same index of ``wanted``."""
    free = max(*wanted, *received) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, free) for descriptor in received]
    for descriptor in received:
        os.close(descriptor)
    for number, descriptor in zip(wanted, moved, strict=True):
        os.dup2(descriptor, number, inheritable=number <= 2)
        os.close(descriptor)


def _run_worker(message: _Fork) -> NoReturn:
    from .worker_process import run

    status = 1
    try:
        os.sched_setaffinity(0, message.cores)
        gc.enable()
        run(message.start)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    # These errors mean that the parent process has ended.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, ProcessLookupError):
        main()
