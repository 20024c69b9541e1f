"""Start prefill and decode instances and their router on this machine, each with ``penstock serve``."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec

from penstock.cluster.deployment import bind_devices
from penstock.config.addresses import ANY_ADDRESS, join_address
from penstock.config.options import Configuration
from penstock.config.settings import settings
from penstock.config.temporary_folder import TemporaryFolder
from penstock.core import PenstockError
from penstock.core.errors import invalid
from penstock.engine.service.server import kill_with_parent
from penstock.planning.host_memory import FREE_SHARE
from penstock.serve.process.server_record import RecordFile

from ..flags import configure
from ..served_models import served_models
from ..table import table
from .status import instances

POLL_INTERVAL = 0.2
"""Seconds between two checks of the processes."""
START_TIMEOUT = 600.0
"""Seconds within which all processes must be ready."""
OWN = (
    "role",
    "host",
    "port",
    "engine_address",
    "router_address",
    "prefill_instances",
    "decode_instances",
    "cpu_binding",
)
"""Options that ``penstock pd`` sets separately for each process."""
KV_CACHE_SIZES = (
    "num_gpu_blocks_override",
    "kv_cache_memory_bytes",
    "kv_cache_sequences",
    "kv_cache_free_memory_fraction",
    "gpu_memory_utilization",
)
"""Options that size an instance's KV cache."""


class _Process:
    """A ``penstock serve`` process. Its log lines are printed with its name as prefix.

    Args:
        cores: CPU cores that the process may use.
    """

    def __init__(self, name: str, arguments: Sequence[str], cores: set[int]) -> None:
        self.name = name
        self.cores = cores
        own = os.getpid()

        def prepare() -> None:
            kill_with_parent(own)
            os.sched_setaffinity(0, cores)

        command = [sys.executable, "-P", "-m", "penstock.cli.main", "serve", *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, preexec_fn=prepare, start_new_session=True)
        assert self.process.stderr
        self._printer = threading.Thread(target=self._print, args=(self.process.stderr,), daemon=True)
        self._printer.start()

    def _print(self, log: IO[bytes]) -> None:
        for line in log:
            print(f"{self.name}: {line.decode(errors='replace').rstrip()}", file=sys.stderr, flush=True)

    def end(self) -> int:
        """Stop the process after its open requests; returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        status = self.process.wait()
        self._printer.join(1)
        return status


def start(args: argparse.Namespace) -> int:
    """Run a deployment until Ctrl-C or SIGTERM (returns 0), or until one of its processes exits (returns 1).

    Raises ``PenstockError`` (``invalid``) for invalid options.
    """
    resolved = configure(args)
    for name in ("prefill", "decode"):
        if (count := getattr(args, name)) < 1:
            raise invalid(name, f"must be at least 1, is {count}", 1)
    for name in OWN:
        if name not in ("host", "port") and resolved.sources[name] != "default":
            raise invalid(name, "is set by penstock pd; use penstock serve to start instances with other values")
    signal.signal(signal.SIGTERM, lambda signum, frame: signal.raise_signal(signal.SIGINT))
    engine = resolved.configuration.engine
    models = {entry.name: "starting" for entry in served_models(resolved.configuration)}
    about = {"role": "pd", "device": engine.device, "drain_timeout": engine.drain_timeout}
    with TemporaryFolder("pd-") as folder, RecordFile(models=models, **about) as record:
        file = folder.path / "options.yaml"
        file.write_text(json.dumps(_given(resolved.configuration)))
        processes: list[_Process] = []
        try:
            sized = any(resolved.sources[name] != "default" for name in KV_CACHE_SIZES)
            return _run(
                processes, record, file, resolved.configuration, args.prefill, args.decode, share_memory=not sized
            )
        except KeyboardInterrupt:
            return 0
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            record.update(state="draining")
            try:
                for process in processes:  # the router first, so that its requests finish before instances stop
                    process.end()
            except KeyboardInterrupt:
                for process in processes:
                    process.process.kill()


def _run(
    processes: list[_Process],
    record: RecordFile,
    file: Path,
    configuration: Configuration,
    prefill: int,
    decode: int,
    share_memory: bool,
) -> int:
    """Start all processes, print them, and wait until one exits.

    Args:
        share_memory: divide the default size of a KV cache on the host among the instances.
    """
    server = configuration.server
    host = "127.0.0.1" if server.host in ANY_ADDRESS else server.host
    port = server.port or _free_port(host)
    router = join_address(host, port)
    record.update(url=f"http://{router}")
    common = ("--config", str(file))
    every = os.sched_getaffinity(0)
    arguments = [*common, "--role", "router", "--host", server.host, "--port", str(port)]
    processes.append(_Process("router", arguments, every))
    names = [*(f"prefill-{i}" for i in range(prefill)), *(f"decode-{i}" for i in range(decode))]
    numbers = [str(number) for number in range(len(names))]
    for name, number in zip(names, numbers, strict=True):
        cores = set(map(int, bind_devices([number], numbers).split(",")))
        arguments = [*common, "--role", name.partition("-")[0], "--host", "127.0.0.1", "--port", "0"]
        if share_memory:
            arguments += ["--kv-cache-free-memory-fraction", f"{FREE_SHARE / len(names):.3f}"]
        processes.append(_Process(name, [*arguments, "--router-address", router], cores))
    key = server.api_key[0] if server.api_key else ""
    if not _all_serve(processes, f"http://{router}", key):
        return 1
    record.update(state="ready", models=dict.fromkeys(record.record.models, "ready"))
    rows = [[one.name, str(one.process.pid), ",".join(map(str, sorted(one.cores)))] for one in processes]
    print(*table(("PROCESS", "PID", "CORES"), rows), sep="\n")
    print(f"requests: http://{router}/v1    instances: penstock pd status --url http://{router}", flush=True)
    while (ended := _ended(processes)) is None:
        record.refresh()
        time.sleep(POLL_INTERVAL)
    print(f"penstock pd: {ended.name} exited with status {ended.process.returncode}", file=sys.stderr)
    return 1


def _all_serve(processes: Sequence[_Process], url: str, api_key: str) -> bool:
    """Wait until all instances have joined the router; returns False if a process exits, or on timeout."""
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        if ended := _ended(processes):
            status = ended.process.returncode
            print(f"penstock pd: {ended.name} exited with status {status} before it was ready", file=sys.stderr)
            return False
        try:
            ready = [one for one in instances(url, api_key) if one["state"] == "ready"]
            if len(ready) >= len(processes) - 1:
                return True
        except PenstockError:  # the router is starting
            pass
        time.sleep(POLL_INTERVAL)
    print(f"penstock pd: not all instances joined the router within {START_TIMEOUT:.0f} seconds", file=sys.stderr)
    return False


def _ended(processes: Sequence[_Process]) -> _Process | None:
    return next((one for one in processes if one.process.poll() is not None), None)


def _given(configuration: Configuration) -> dict[str, object]:
    """Options that differ from their defaults, by name, except the options ``OWN``."""
    sections = msgspec.to_builtins(configuration)
    return {
        name: value
        for name, setting in settings().items()
        if name not in OWN and (value := sections[setting.section][name]) != msgspec.to_builtins(setting.default)
    }


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as found:
        return int(found.getsockname()[1])
