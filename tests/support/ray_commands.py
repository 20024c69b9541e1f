"""A Ray cluster of several node processes on this machine, and ``serve run`` on it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import httpx
import yaml
from serving import LoggedProcess, free_ports, processes, start_marked

SERVE = "from ray.serve.scripts import cli; cli()"
START_TIMEOUT = 120.0


class RayCommand(LoggedProcess):
    """A command with the output of all its processes. At the end of the context, it is interrupted, or else killed.

    Args:
        url: URL of the application that the command serves.
    """

    log_timeout = START_TIMEOUT

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], url: str = "") -> None:
        self.url = url
        self.process = start_marked(
            command, environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert self.process.stdout
        super().__init__(self.process.stdout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def wait_ready(self, path: str) -> None:
        """Wait until the application is served, which ``serve run`` with a file does not log."""
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            with suppress(httpx.TransportError):
                if httpx.get(self.url + path).status_code == 200:
                    return
            assert time.monotonic() < deadline and self.process.poll() is None, "\n".join(self.lines[-80:])
            time.sleep(0.1)

    def close(self) -> None:
        """Send SIGINT to the command, and kill its remaining processes after a minute."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + 60
        while processes(self.process.pid) and time.monotonic() < deadline:
            self.process.poll()
            time.sleep(0.05)
        for pid in processes(self.process.pid):
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.close_log()


@contextmanager
def scratch() -> Iterator[tuple[Path, dict[str, str]]]:
    """Temporary folder of a cluster (with a short path, for Ray's sockets), and environment of its commands."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    environment = {
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_TOKEN": uuid4().hex,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_COLOR_PREFIX": "0",
    }
    try:
        yield folder, environment
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class RayCluster:
    """A cluster whose nodes are processes on this machine.

    Args:
        cores: numbers of cores of the head and of the other nodes.
    """

    def __init__(self, *cores: int) -> None:
        self._stack = ExitStack()
        self.folder, self.environment = self._stack.enter_context(scratch())
        nodes = [sys.executable, str(Path(__file__).with_name("ray_nodes.py")), *map(str, cores)]
        self._nodes = RayCommand(nodes, self.environment)

    def __enter__(self) -> Self:
        self.address = self._nodes.find("cluster at (.+)")[1]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._nodes.close()
        self._stack.close()

    @property
    def raylets(self) -> list[int]:
        """Process ids of the nodes' raylets."""
        return [pid for pid in processes(self._nodes.process.pid) if "/raylet/raylet" in _command(pid)]

    def replicas_of(self, raylet: int) -> list[int]:
        """Process ids of the replicas on a raylet's node."""
        return self._workers_of(raylet, "ServeReplica")

    def actors_of(self, raylet: int) -> list[int]:
        """Process ids of the actors on a raylet's node that run ranks of an engine."""
        return self._workers_of(raylet, "ray::_Node")

    @property
    def engines(self) -> list[int]:
        """Process ids of the replicas' engines."""
        return [pid for pid in processes(self._nodes.process.pid) if "penstock.engine.service.server" in _command(pid)]

    def _workers_of(self, raylet: int, name: str) -> list[int]:
        found = []
        for pid in processes(self._nodes.process.pid):
            with suppress(FileNotFoundError, ProcessLookupError):
                if name in _command(pid) and f"PPid:\t{raylet}\n" in Path(f"/proc/{pid}/status").read_text():
                    found.append(pid)
        return found

    def serve(self, args: Mapping[str, Any], import_path: str = "penstock.ray:app", path: str = "/ready") -> RayCommand:
        """Start an application with ``serve run``; return once ``path`` is served."""
        (port,) = free_ports(1)
        document = {
            "proxy_location": "HeadOnly",
            "http_options": {"host": "127.0.0.1", "port": port},
            "applications": [{"name": "default", "import_path": import_path, "args": dict(args)}],
        }
        file = self.folder / f"{port}.yaml"
        file.write_text(yaml.safe_dump(document))
        command = [sys.executable, "-c", SERVE, "run", "--address", self.address, str(file)]
        running = RayCommand(command, self.environment, f"http://127.0.0.1:{port}")
        try:
            running.wait_ready(path)
        except BaseException:
            running.close()
            raise
        return running


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
