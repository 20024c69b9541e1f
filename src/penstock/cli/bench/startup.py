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
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec

from penstock.config.option import option
from penstock.config.settings import settings
from penstock.core import Code, PenstockError

from ..flags import add_fields, add_options, read_fields
from ..parser import PROFILE_PREFIX
from ..screen import print_json
from .option_values import check_writable
from .sse import DONE, EventReader, decode_chunk, error_message

HOST = "127.0.0.1"
POLL_INTERVAL = 0.01  # seconds between two attempts to connect
POLL_TIMEOUT = 5.0  # timeout of an attempt in seconds
STOP_TIMEOUT = 60.0  # seconds from SIGTERM to exit, without open requests


class StartupOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``bench startup``."""

    num_iters: Annotated[int, option("starts", ge=1)] = 3
    """Number of starts; the first one is reported separately."""
    num_iters_cold: Annotated[int, option("starts", ge=0)] = 0
    """Number of starts before them, each with an empty weight cache in a temporary folder."""
    num_iters_warmup: Annotated[int, option("starts", ge=0)] = 0
    """Number of starts between them, which are not reported."""
    output_json: str = ""
    """File for the results as JSON; empty: no file."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    add_options(parser, profiles=True)
    add_fields(parser, StartupOptions, profiles=True)


def run(args: argparse.Namespace) -> int:
    """Start servers one after another and print their times."""
    options = read_fields(args, StartupOptions)
    if options.output_json:
        check_writable("output_json", Path(options.output_json))
    flags = _flags(args)
    cold = [_start_cold(flags) for _ in range(options.num_iters_cold)]
    for _ in range(options.num_iters_warmup):
        _start(flags)
    starts = [_start(flags) for _ in range(options.num_iters)]
    first, *others = starts
    median = {name: statistics.median(start[name] for start in others) for name in first} if others else None
    results = {"bench": "startup", "first_s": first, "median_of_others_s": median, "starts_s": starts, "cold_s": cold}
    results |= _ready_times("cold", cold) | _ready_times("warm", starts)
    if options.output_json:
        Path(options.output_json).write_text(json.dumps(results, indent=4))
    if args.json:
        print_json(results)
        return 0
    columns = {"first": first} | ({f"median of {len(others)} more": median} if median else {})
    if cold:
        columns |= {"cold median": {name: statistics.median(start[name] for start in cold) for name in first}}
    print(f"{'seconds until':<16}" + "".join(f"{title:>20}" for title in columns))
    for name in first:
        print(f"{name.replace('_', ' '):<16}" + "".join(f"{column[name]:>20.3f}" for column in columns.values()))
    return 0


def _ready_times(kind: str, starts: list[dict[str, float]]) -> dict[str, Any]:
    """Seconds until the engine is ready, under vLLM's names; empty without starts."""
    if not starts:
        return {}
    from .report import percentiles_of

    times = [start["ready"] for start in starts]
    return {
        f"avg_{kind}_startup_time": statistics.mean(times),
        f"{kind}_startup_times": times,
        f"{kind}_startup_percentiles": percentiles_of(times),
    }


def _start_cold(flags: list[str]) -> dict[str, float]:
    """Start a server with an empty weight cache."""
    with tempfile.TemporaryDirectory() as folder:
        return _start([*flags, "--weight-cache-dir", folder])


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
    for name in args.profile.flags if args.profile else ():
        for value in _given(args, name):
            flags.append(f"--{name.replace('_', '-')}={value}")
    return flags


def _given(args: argparse.Namespace, name: str) -> list[str]:
    """Values of another system's flag."""
    value = getattr(args, PROFILE_PREFIX + name, [])
    return value if isinstance(value, list) else [value]


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
