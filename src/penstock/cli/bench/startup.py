"""``penstock bench startup``: time from starting a server on this machine to its first token."""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from typing import IO

import msgspec

from penstock.config.settings import settings
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from ..flags import add_options
from ..screen import print_json
from .sse import DONE, EventReader, decode_chunk, error_message

HOST = "127.0.0.1"
POLL_INTERVAL = 0.01  # seconds between two attempts to connect
POLL_TIMEOUT = 5.0  # timeout of an attempt in seconds
STOP_TIMEOUT = 60.0  # seconds from SIGTERM to exit, without open requests


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--num-iters",
        type=int,
        default=3,
        metavar="N",
        help="number of starts (default: 3); the first one is reported separately",
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Start servers one after another and print their times."""
    if args.num_iters < 1:
        raise invalid("num_iters", f"must be at least 1, is {args.num_iters}", 1)
    flags = _flags(args)
    starts = [_start(flags) for _ in range(args.num_iters)]
    first, *others = starts
    median = {name: statistics.median(start[name] for start in others) for name in first} if others else None
    if args.json:
        results = {"bench": "startup", "first_s": first, "median_of_others_s": median, "starts_s": starts}
        print_json(results)
        return 0
    print(f"{'seconds until':<16}{'first':>8}" + (f"{f'median of {len(others)} more':>20}" if median else ""))
    for name, seconds in first.items():
        print(f"{name.replace('_', ' '):<16}{seconds:>8.3f}" + (f"{median[name]:>20.3f}" if median else ""))
    return 0


def _flags(args: argparse.Namespace) -> list[str]:
    """Options set on the command line, as flags."""
    flags = ["--config", args.config] if args.config else []
    for name, setting in settings().items():
        if not hasattr(args, name):
            continue
        value = getattr(args, name)
        if setting.kind is bool:
            flags.append(setting.flag if value else f"--no-{setting.flag.removeprefix('--')}")
        else:
            flags += [setting.flag, *map(str, value if setting.kind is tuple else [value])]
    return flags


def _start(flags: list[str]) -> dict[str, float]:
    """Seconds from starting a server until the port responds, the engine is ready, and the first token arrives."""
    started = time.perf_counter()
    with tempfile.TemporaryFile() as log, Server(flags, log) as server:
        moments = {
            "http": server.wait_for(200, 503),
            "ready": server.wait_for(200),
            "first_token": server.request_token(),
        }
    return {name: moment - started for name, moment in moments.items()}


class Server:
    """A server process, stopped with SIGTERM on exit.

    Methods raise ``PenstockError`` if the server exits too early, returns an error, or does not stop correctly.
    """

    def __init__(self, flags: list[str], log: IO[bytes]) -> None:
        with socket.create_server((HOST, 0)) as free:
            self.port = free.getsockname()[1]
        command = [sys.executable, "-P", "-m", "penstock.cli.main", "serve", "--host", HOST, "--port", str(self.port)]
        self._log = log
        self._process = subprocess.Popen([*command, *flags], stdout=log, stderr=log)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._process.kill()
            self._process.wait()
            return
        self._process.terminate()
        try:
            status = self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired as error:
            self._process.kill()
            self._process.wait()
            raise self._failure(f"was still running {STOP_TIMEOUT:g} s after SIGTERM") from error
        if status:
            raise self._failure(f"exited with status {status} after SIGTERM")

    def wait_for(self, *statuses: int) -> float:
        """Poll ``/ready`` until it returns one of the statuses; returns the time (``perf_counter``)."""
        while self._process.poll() is None:
            try:
                with closing(self._connect(POLL_TIMEOUT)) as connection:
                    connection.request("GET", "/ready")
                    if connection.getresponse().status in statuses:
                        return time.perf_counter()
            except (OSError, http.client.HTTPException):
                pass  # the server is not listening yet
            time.sleep(POLL_INTERVAL)
        raise self._failure(f"exited with status {self._process.returncode} before it was ready")

    def request_token(self) -> float:
        """Request one token; returns the time of its arrival (``perf_counter``)."""
        with closing(self._connect(None)) as connection:
            connection.request("GET", "/v1/models")
            models = self._checked(connection.getresponse()).read()
            body = {"model": msgspec.json.decode(models)["data"][0]["id"], "prompt": "Hello", "max_tokens": 1}
            body |= {"temperature": 0, "stream": True}
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response, reader = self._checked(connection.getresponse()), EventReader()
            while received := response.read1(1 << 16):
                if any(payload != DONE and decode_chunk(payload).choices for payload in reader.feed(received)):
                    return time.perf_counter()
        raise self._failure("returned no token")

    def _checked(self, response: http.client.HTTPResponse) -> http.client.HTTPResponse:
        if response.status != 200:
            raise self._failure(f"returned status {response.status}: {error_message(response.read())}")
        return response

    def _connect(self, timeout: float | None) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(HOST, self.port, timeout=timeout)

    def _failure(self, problem: str) -> PenstockError:
        """Create an error with the last line of the server's log."""
        self._log.seek(0)
        output = self._log.read().decode(errors="replace").strip()
        last_line = f": {output.splitlines()[-1]}" if output else ""
        return PenstockError(Code.UNAVAILABLE, f"the server {problem}{last_line}")
