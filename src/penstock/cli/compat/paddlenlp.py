"""PaddleNLP's commands: ``start_server``, ``stop_server`` and ``download_model.py``."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from penstock.config.options import ServerOptions
from penstock.config.profiles import load
from penstock.config.profiles.paddlenlp import OLD, model_named, nodes_named
from penstock.core.errors import invalid
from penstock.engine.executor.node_messages import NODE_READY
from penstock.serve.process.server_record import process_start_time

from ..flags import TITLES, add_options, configure
from ..parser import Parser, exit_status
from ..processes import ProcessHandle

MODEL_NAME = "model_name"
MODELS = "/models/"
"""Default of ``MODEL_DIR``."""
LAST_LINES = 20
"""Number of log lines printed if the server does not start."""
STOP_TIMEOUT = 300.0
"""Default seconds that ``stop_server`` waits for a server to stop."""
DEFAULT_MODEL = "deepseek-ai/DeepSeek-R1/weight_only_int4"
MTP_IN_CHECKPOINT = "MTP layers are part of the model's checkpoint"
MPI = (
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_SIZE"),
)
"""Environment variables of Open MPI and MPICH: local rank, number of local ranks, number of all ranks."""


def start_server() -> int:
    """Start a server in the background; returns the exit status once it is ready."""
    parser = _parser(
        "start_server", "Start a server with PaddleNLP's environment variables, and wait until it is ready."
    )
    parser.add_argument("model_name", nargs="?", help="org/model or org/model/format (default: the model in MODEL_DIR)")
    add_options(parser, tuple(TITLES))
    args = parser.parse_args()
    if args.model_name and sys.argv[1] != args.model_name:
        parser.error("the model's name must precede all options")
    return exit_status(
        parser, lambda: _run_on_first_rank(lambda: _start(args, sys.argv[2:] if args.model_name else sys.argv[1:]))
    )


def stop_server() -> int:
    """Stop the servers that this user started with ``start_server``; returns the exit status."""
    parser = _parser("stop_server", "Stop the servers started by start_server.")
    about = f"seconds to wait before servers are killed (default: {STOP_TIMEOUT:g})"
    parser.add_argument("timeout", nargs="?", type=float, default=STOP_TIMEOUT, help=about)
    args = parser.parse_args()
    return exit_status(parser, lambda: _run_on_first_rank(lambda: _stop(args.timeout)))


def download_model() -> int:
    """Download a model into a folder; returns the exit status."""
    parser = _parser("download_model.py", "Download a model from the Hugging Face hub.")
    about = f"org/model or org/model/format (default: {DEFAULT_MODEL})"
    parser.add_argument("--model_name", "-m", default=DEFAULT_MODEL, help=about)
    parser.add_argument("--dir", "-d", type=Path, default=Path("downloads"), help="parent folder (default: downloads)")
    parser.add_argument("--nnodes", "-n", type=int, default=1, help="number of nodes of the server (default: 1)")
    parser.add_argument("--mode", "-M", choices=("master", "slave"), help="role of this node, with several nodes")
    parser.add_argument("--speculate_model_path", "-s", metavar="FOLDER", help=f"ignored: {MTP_IN_CHECKPOINT}")
    args = parser.parse_args()
    return exit_status(parser, lambda: _download(args))


def _parser(name: str, about: str) -> argparse.ArgumentParser:
    return Parser(prog=name, description=about, allow_abbrev=False)


# --- Under mpirun -----------------------------------------------------------------------------------------------------


def _run_on_first_rank(work: Callable[[], int]) -> int:
    """Run ``work`` on the first rank that ``mpirun`` started on this node; other ranks return 0.

    The first rank gets all cores of ``mpirun``, which binds ranks to single cores.

    Raises ``PenstockError`` (``invalid``) if ``mpirun`` started several nodes, and ``MP_NNODE`` is 1.
    """
    names = next((names for names in MPI if all(name in os.environ for name in names)), None)
    if not names:
        return work()
    rank, here, everywhere = [int(os.environ[name]) for name in names]
    if here != everywhere and os.environ.get("MP_NNODE", "1") == "1":
        message = f"is 1, but mpirun started {everywhere} ranks, only {here} of them on this node"
        raise invalid("MP_NNODE", f"{message}: set MP_NNODE to the number of nodes")
    if rank:
        return 0
    os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    return work()


# --- Starting ---------------------------------------------------------------------------------------------------------


def _start(args: argparse.Namespace, flags: list[str]) -> int:
    args.profile = load("paddlenlp")
    if args.model_name:
        os.environ[MODEL_NAME] = args.model_name
    configuration = configure(args).configuration
    options, engine = configuration.server, configuration.engine
    if not engine.node_rank:
        _check_ports(options)
    command = [sys.executable, "-P", "-m", "penstock.cli.main", "serve", "--compat", "paddlenlp", *flags]
    if name := os.environ.get(MODEL_NAME):
        folder = Path(os.environ.get("MODEL_DIR") or MODELS, name)
        from penstock.frontend.downloads import missing_files

        if not (folder / "config.json").exists() or missing_files(folder):
            _fetch(name, folder)
        command += ["--model", str(folder)]
    log_name = "console" if os.environ.get("OUTPUT_LOG_TO_CONSOLE") == "1" else "server"
    if engine.node_rank:  # nodes may share the log folder
        log_name += f"-node{engine.node_rank}"
    file = Path("log", f"{log_name}.log").resolve()
    file.parent.mkdir(exist_ok=True)
    read_log = partial(file.read_text, encoding="utf-8", errors="replace")
    with file.open("wb") as log:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    print(f"Starting; the log is in {file}", flush=True)
    with _registered(server):
        while not (NODE_READY in read_log() if engine.node_rank else _ready(options)):
            try:
                status = server.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
            print("\n".join(["The server has exited:", *read_log().splitlines()[-LAST_LINES:]]), file=sys.stderr)
            return status or 1
    if engine.node_rank:
        print(f"Ready: process {server.pid}, node {engine.node_rank} of {engine.nnodes}")
        return 0
    where = f"http://127.0.0.1:{options.port}/v1/chat/completions"
    if options.port < 0:
        where = f"gRPC at 127.0.0.1:{options.grpc_port}"
    print(f"Ready: process {server.pid}, {where}")
    return 0


@contextlib.contextmanager
def _registered(server: subprocess.Popen[bytes]) -> Iterator[None]:
    """Record a starting server in a file for ``stop_server``, which may be called before it is ready. If the start is
    interrupted, the server is stopped."""
    record = _records() / str(server.pid)
    record.write_text(process_start_time(server.pid))
    try:
        yield
    except BaseException:
        server.terminate()
        server.wait()
        raise
    finally:
        if server.poll() is not None:
            record.unlink(missing_ok=True)


def _check_ports(options: ServerOptions) -> None:
    """Raise ``PenstockError`` if a port is in use, as another server there could be mistaken for this one."""
    ports = {
        "SERVICE_HTTP_PORT": options.port,
        "SERVICE_GRPC_PORT": options.grpc_port,
        "HEALTH_HTTP_PORT": options.health_port,
        "METRICS_HTTP_PORT": options.metrics_port,
    }
    for name, port in ports.items():
        if port < 0:
            continue
        old = next((old for old, new in OLD.items() if new == name and old in os.environ), name)
        try:
            socket.create_server((options.host, port)).close()
        except OSError as error:
            raise invalid(old, f"{port} is not available ({error.strerror}); set another port") from error


def _ready(options: ServerOptions) -> bool:
    scheme, host = "https" if options.ssl_certfile else "http", options.host.replace("0.0.0.0", "127.0.0.1")
    url = f"{scheme}://{host}:{options.health_port}/v2/health/ready"
    try:
        with urllib.request.urlopen(url, timeout=10, context=ssl._create_unverified_context()):
            return True
    except OSError:
        return False


# --- Stopping ---------------------------------------------------------------------------------------------------------


def _stop(timeout: float) -> int:
    records = sorted(_records().iterdir())
    running = [int(record.name) for record in records if record.read_text() == process_start_time(int(record.name))]
    stopped = [_end(pid, timeout) for pid in running]
    for record in records:
        record.unlink(missing_ok=True)
    print("\n".join(stopped) if stopped else "No server started by start_server is running.")
    return 0


def _end(pid: int, timeout: float) -> str:
    """Stop a process; returns a message for the user."""
    with ProcessHandle(pid) as process:
        process.send(signal.SIGTERM)
        if process.wait(timeout):
            return f"Stopped process {pid}."
        process.send(signal.SIGKILL)
    return f"Killed process {pid}, which did not stop within {timeout:g} seconds."


def _records() -> Path:
    """Folder of this user with a file per server: the name is the process id, the content its start time."""
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir(), f"penstock-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise invalid("XDG_RUNTIME_DIR", f"{folder} belongs to another user; set another folder")
    return folder


# --- Fetching ---------------------------------------------------------------------------------------------------------


def _download(args: argparse.Namespace) -> int:
    if (named := nodes_named(args.model_name)) not in (None, args.nnodes):
        raise invalid("--nnodes", f"is {args.nnodes}, but {args.model_name} is for {named} nodes", named)
    if args.mode == "slave" and args.nnodes == 1:
        raise invalid("--mode", "slave is for several nodes, but --nnodes is 1")
    if args.speculate_model_path:
        print(f"--speculate_model_path is ignored: {MTP_IN_CHECKPOINT}", file=sys.stderr)
    folder = args.dir / args.model_name
    _fetch(args.model_name, folder)
    print(folder.resolve())
    return 0


def _fetch(name: str, folder: Path) -> None:
    from penstock.frontend.downloads import DownloadOptions, Selection, download, parse

    try:
        repository = str(model_named(name)["model"])
    except ValueError as error:
        raise invalid("model_name", f"{name!r} is wrong: {error}") from error
    download(parse(repository), Selection(), DownloadOptions(progress=sys.stderr.isatty()), folder)


COMMANDS = {"start_server": start_server, "stop_server": stop_server, "download_model.py": download_model}

if __name__ == "__main__":
    sys.exit(COMMANDS[sys.argv.pop(1)]())
