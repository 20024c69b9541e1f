"""Run ``penstock serve`` as a separate process and read its log, or run other commands in this process."""

from __future__ import annotations

import inspect
import io
import logging
import os
import random
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self
from uuid import uuid4

import httpx

from penstock.cli.main import main

READY = r"ready: (.+) at (http[^\s\"]+)"
NO_DRAFTS = {"PENSTOCK_SPECULATIVE_CONFIG": '{"method": "none"}'}
"""Many tests need answers that take long; with drafts, answers that repeat themselves end in a few steps."""
SERVE = (sys.executable, "-m", "penstock.cli.main", "serve")
START_TIMEOUT = 60.0
STOP_TIMEOUT = 60.0
MODULES = {
    "penstock.serve.process.api_process": "api",
    "penstock.engine.service.server": "engine",
    "penstock.text.isolated_tokenizer": "tokenizer",
    "penstock.text.template_process": "template",
}


CERTIFICATES = ssl.create_default_context()
"""The system's certificates, loaded once: otherwise each httpx client (OpenAI's and Anthropic's, too) takes 30 ms."""
for call in (
    *(httpx.request, httpx.stream, httpx.get, httpx.options, httpx.head, httpx.post, httpx.put, httpx.delete),
    *(httpx.Client.__init__, httpx.AsyncClient.__init__),
):
    inspect.unwrap(call).__kwdefaults__["verify"] = CERTIFICATES


class LoggedProcess:
    """A process with a log that a thread reads line by line while the process runs."""

    log_timeout = 60.0
    """Default of the maximum seconds that ``find`` waits."""

    def __init__(self, log: IO[bytes]) -> None:
        self.lines: list[str] = []
        """Log lines of the process and its child processes so far."""
        self._log = log
        self._more = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def find(self, pattern: str, after: int = 0, limit: float | None = None) -> re.Match[str]:
        """Wait until a log line matches ``pattern``, from line number ``after`` on, for at most ``limit`` seconds."""
        deadline = time.monotonic() + (self.log_timeout if limit is None else limit)
        with self._more:
            while True:
                for line in self.lines[after:]:
                    if found := re.search(pattern, line):
                        return found
                after = max(after, len(self.lines))
                if not self._reader.is_alive() or not self._more.wait(max(0.0, deadline - time.monotonic())):
                    raise AssertionError("\n".join([f"no line matches {pattern!r}:", *self.lines[-80:]]))

    def close_log(self) -> None:
        """Read the remaining log of an ended process, and close the log."""
        self._reader.join(10)
        self._log.close()

    def _read(self) -> None:
        for line in self._log:
            with self._more:
                self.lines.append(line.decode(errors="backslashreplace").rstrip("\n"))
                self._more.notify_all()
        with self._more:
            self._more.notify_all()


class Served(LoggedProcess):
    """A server on a free port. At the end of the context, it gets SIGTERM, and must exit with status 0 and without
    remaining processes.

    Args:
        arguments: arguments of ``penstock serve``.
        environment: environment variables in addition to ``NO_DRAFTS``.
        command: command to run instead of ``penstock serve``.
    """

    def __init__(
        self, *arguments: str, environment: Mapping[str, str] | None = None, command: Sequence[str] = SERVE
    ) -> None:
        command = [*command, "--host", "127.0.0.1", "--port", "0", *arguments]
        self._process = start_marked(
            command,
            NO_DRAFTS | dict(environment or {}),
            stdin=subprocess.DEVNULL,  # with a terminal, SIGHUP ends the server
            stderr=subprocess.PIPE,
        )
        self.pid = self._process.pid
        """Process id of the supervisor."""
        assert self._process.stderr is not None
        super().__init__(self._process.stderr)

    def __enter__(self) -> Self:
        try:
            self.start()
            self._wait_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def start(self) -> None:
        """Wait until the log reports that the server is ready."""
        self.name, self.url = self.find(READY, limit=START_TIMEOUT).groups()

    def _wait_ready(self) -> None:
        """Wait until ``/ready`` succeeds several times in a row: a connection may reach any API process."""
        context = ssl._create_unverified_context()
        deadline, successes = time.monotonic() + START_TIMEOUT, 0
        while successes < 4 * len(self.pids["api"]):
            try:
                urllib.request.urlopen(f"{self.root}/ready", context=context).close()
                successes += 1
            except urllib.error.HTTPError as error:
                assert error.code == 503, error
                assert time.monotonic() < deadline, "\n".join(self.lines[-50:])
                successes = 0
                time.sleep(0.02)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self.running:
                self.terminate()
                assert self.ended() == 0, "\n".join(self.lines[-50:])
        finally:
            self.kill()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def root(self) -> str:
        """URL of the server, without ``/v1``."""
        return self.url.removesuffix("/v1")

    @property
    def pids(self) -> dict[str, list[int]]:
        """Ids of the running processes by kind: ``engine``, ``api``, ``tokenizer`` and ``template``."""
        found: dict[str, list[int]] = {kind: [] for kind in MODULES.values()}
        for pid in processes(self.pid):
            for argument in _file(pid, "cmdline").split("\0"):
                if argument in MODULES:
                    found[MODULES[argument]].append(pid)
        return found

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def interrupt(self, module: str) -> None:
        """Send SIGINT to the process group, as Ctrl-C does, as soon as a process runs this module."""
        deadline = time.monotonic() + 60
        while not any(module in _file(pid, "cmdline").split("\0") for pid in descendants(self.pid)):
            assert time.monotonic() < deadline, f"no process runs {module}"
        os.killpg(self.pid, signal.SIGINT)

    def ended(self, limit: float = STOP_TIMEOUT) -> int:
        """Wait for the end of the server, and return its exit status. Asserts that all its processes end."""
        status = self._process.wait(limit)
        deadline = time.monotonic() + STOP_TIMEOUT
        while (left := processes(self.pid)) and time.monotonic() < deadline:
            time.sleep(0.01)  # processes may end shortly after their killed parent
        assert not left, [_file(pid, "cmdline") for pid in left]
        return status

    def kill(self) -> None:
        """Kill all remaining processes."""
        for pid in processes(self.pid):
            with suppress(ProcessLookupError):  # the process has ended with its parent
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self.close_log()


class CommandResult(NamedTuple):
    """Exit status and output of a command."""

    returncode: object
    stdout: str
    stderr: str


def run_in_process(command: Callable[[list[str]], int], *arguments: str) -> CommandResult:
    """Run a command in this process, and restore the logging configuration. A new process would take 0.25 s to import
    the package."""
    root, out, err = logging.getLogger(), io.StringIO(), io.StringIO()
    handlers, level = root.handlers, root.level
    root.handlers = []
    try:
        with redirect_stdout(out), redirect_stderr(err):
            status: object = command([*arguments])
    except SystemExit as ended:
        status = ended.code
    finally:
        root.handlers = handlers
        root.setLevel(level)
    return CommandResult(status, out.getvalue(), err.getvalue())


def usage_error(*arguments: str) -> str:
    """Error message of ``penstock serve`` for arguments that it refuses before it starts any process."""
    result = run_in_process(main, "serve", *arguments)
    assert result.returncode == 2, result
    return result.stderr


class Servers:
    """Servers shared by tests, by their options: each is started on first use, and runs until ``close``.

    Only for tests that restore all settings, and that do not need counters at zero. A server that a test has ended is
    started again on its next use.
    """

    def __init__(self) -> None:
        self._running: dict[tuple[str, ...], Served] = {}
        self._stack = ExitStack()

    def get(self, *flags: str) -> Served:
        """The server with these options of ``penstock serve``."""
        if flags not in self._running or not self._running[flags].running:
            self._running[flags] = self._stack.enter_context(Served(*flags))
        return self._running[flags]

    def close(self) -> None:
        """Stop all servers, with the checks of ``Served``."""
        self._stack.close()


MARK = "PROCESSES_OF_TEST"
"""Environment variable that all processes of a command inherit, even if it is killed and they start new sessions."""
_marks: dict[int, str] = {}


def start_marked(command: Sequence[str], environment: Mapping[str, str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a command in a new session, with additional environment variables, so that ``processes`` finds all its
    processes."""
    value = uuid4().hex
    variables = {**os.environ, **environment, MARK: value}
    process = subprocess.Popen(command, env=variables, start_new_session=True, **options)
    _marks[process.pid] = f"{MARK}={value}"
    return process


def processes(command: int) -> list[int]:
    """Ids of the live processes of a command of ``start_marked``, by start time (ids wrap around). Ray overwrites the
    environment of its processes, but these stay in the command's session."""
    found = []
    for pid in [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]:
        fields = _file(pid, "stat").rpartition(")")[2].split()
        marked = fields[3:4] == [str(command)] or _marks[command] in _file(pid, "environ").split("\0")
        if fields and fields[0] != "Z" and marked:
            found.append((int(fields[19]), pid))
    return [pid for _, pid in sorted(found)]


def children(pid: int) -> list[int]:
    """Ids of the child processes that all threads of a process have started."""
    return [int(child) for task in _tasks(pid) for child in _file(pid, f"task/{task}/children").split()]


def descendants(pid: int) -> list[int]:
    found = children(pid)
    return [*found, *(each for child in found for each in descendants(child))]


def worker_pids(pid: int) -> dict[str, int]:
    """Ids of the worker processes among the descendants of a process, by name."""
    named = {_file(child, "comm").strip(): child for child in descendants(pid)}
    return {name: child for name, child in named.items() if name.startswith("penstock-rank")}


def free_ports(count: int) -> list[int]:
    """Free TCP ports outside the ephemeral range."""
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[int] = []
    for port in random.sample(range(10_000, ephemeral), 200):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"fewer than {count} of 200 tried ports are free")


def num_sockets(pid: int) -> int:
    """Number of open sockets of a process."""
    return sum(path.readlink().name.startswith("socket:") for path in Path(f"/proc/{pid}/fd").iterdir())


def count_files_and_threads(pid: int) -> tuple[int, int]:
    """Numbers of open files and of threads of a process."""
    folder = Path("/proc") / str(pid)
    return len(list((folder / "fd").iterdir())), len(list((folder / "task").iterdir()))


def _tasks(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return []


def _file(pid: int, name: str) -> str:
    try:
        return (Path("/proc") / str(pid) / name).read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
