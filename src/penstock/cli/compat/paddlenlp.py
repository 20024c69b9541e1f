"""PaddleNLP's commands: ``start_server``, ``stop_server`` and ``download_model.py``."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
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

from ..flags import TITLES, add_options, configure
from ..parser import Parser, exit_status

MODEL_NAME = "model_name"
MODELS = "/models/"
"""Default of ``MODEL_DIR``."""
LAST_LINES = 20
"""Lines of the log that are printed where the server does not start."""
PATIENCE = 300.0
"""Seconds that a server gets to end."""
DEFAULT_MODEL = "deepseek-ai/DeepSeek-R1/weight_only_int4"
MPI = (
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_SIZE"),
)
"""Environment variables of Open MPI and MPICH: rank on the node, ranks on the node, and ranks in all."""


def start_server() -> int:
    """Start a server in the background; returns the exit status once it is ready."""
    parser = _parser("start_server", "Start a server by PaddleNLP's environment, and wait until it is ready.")
    parser.add_argument("model_name", nargs="?", help="org/model or org/model/format; nothing for what is in MODEL_DIR")
    add_options(parser, tuple(TITLES))
    args = parser.parse_args()
    if args.model_name and sys.argv[1] != args.model_name:
        parser.error("the model's name comes before all options")
    return exit_status(
        parser, lambda: _run_on_first_rank(lambda: _start(args, sys.argv[2:] if args.model_name else sys.argv[1:]))
    )


def stop_server() -> int:
    """Stop what ``start_server`` of this user has started; returns the exit status."""
    parser = _parser("stop_server", "Stop the servers that start_server has started.")
    parser.add_argument("timeout", nargs="?", type=float, default=PATIENCE, help="seconds that they get to end")
    args = parser.parse_args()
    return exit_status(parser, lambda: _run_on_first_rank(lambda: _stop(args.timeout)))


def download_model() -> int:
    """Download a model into a folder; returns the exit status."""
    parser = _parser("download_model.py", "Fetch a model from the Hugging Face hub.")
    parser.add_argument("--model_name", "-m", default=DEFAULT_MODEL, help="org/model or org/model/format")
    parser.add_argument("--dir", "-d", type=Path, default=Path("downloads"), help="where its folder model_name is put")
    parser.add_argument("--nnodes", "-n", type=int, default=1, help="machines that it is for")
    parser.add_argument("--mode", "-M", choices=("master", "slave"), help="which of several machines this is")
    parser.add_argument(
        "--speculate_model_path",
        "-s",
        metavar="FOLDER",
        help="ignored: MTP layers are part of their model's checkpoint",
    )
    args = parser.parse_args()
    return exit_status(parser, lambda: _download(args))


def _parser(name: str, about: str) -> argparse.ArgumentParser:
    return Parser(prog=name, description=about, allow_abbrev=False)


# --- Under mpirun -----------------------------------------------------------------------------------------------------


def _run_on_first_rank(work: Callable[[], int]) -> int:
    """Do the work on the first of the ranks that ``mpirun`` has started on this node; the others return 0 at once.

    The first rank may use all cores that ``mpirun`` may, which binds each rank to some.

    Raises ``PenstockError`` (``invalid``) where ``mpirun`` has started several nodes, and ``MP_NNODE`` says one.
    """
    names = next((names for names in MPI if all(name in os.environ for name in names)), None)
    if not names:
        return work()
    rank, here, everywhere = [int(os.environ[name]) for name in names]
    if here != everywhere and os.environ.get("MP_NNODE", "1") == "1":
        words = f"is 1, and mpirun has started {everywhere} ranks, {here} of them on this node"
        raise invalid("MP_NNODE", words)
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
    if engine.node_rank:  # nodes may share the folder
        log_name += f"-node{engine.node_rank}"
    file = Path("log", f"{log_name}.log").resolve()
    file.parent.mkdir(exist_ok=True)
    read_log = partial(file.read_text, encoding="utf-8", errors="replace")
    with file.open("wb") as log:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    print(f"Starting, with the log in {file}", flush=True)
    with _registered(server):
        while not (NODE_READY in read_log() if engine.node_rank else _ready(options)):
            try:
                status = server.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
            print("\n".join(["The server has ended:", *read_log().splitlines()[-LAST_LINES:]]), file=sys.stderr)
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
    """Record a starting server for ``stop_server``, which may be called before it is ready. The server is ended where
    its start is interrupted."""
    note = _notes() / str(server.pid)
    note.write_text(_process_start_time(server.pid))
    try:
        yield
    except BaseException:
        server.terminate()
        server.wait()
        raise
    finally:
        if server.poll() is not None:
            note.unlink(missing_ok=True)


def _check_ports(options: ServerOptions) -> None:
    """Raises ``PenstockError`` where one is taken: otherwise another server there might be taken for this one."""
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
    notes = sorted(_notes().iterdir())
    stopped = [
        _end(int(note.name), timeout) for note in notes if note.read_text() == _process_start_time(int(note.name))
    ]
    for note in notes:
        note.unlink(missing_ok=True)
    print("\n".join(stopped) if stopped else "Nothing runs that start_server has started.")
    return 0


def _end(pid: int, timeout: float) -> str:
    """Description of an exit status."""
    handle = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        if select.select([handle], [], [], timeout)[0]:
            return f"Stopped process {pid}."
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        return f"Killed process {pid}, which had not ended in {timeout:g} seconds."
    finally:
        os.close(handle)


def _notes() -> Path:
    """A folder of this user's, with a file for each server: its process, and when that began."""
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir(), f"penstock-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise invalid("XDG_RUNTIME_DIR", f"{folder} belongs to another user; name another folder")
    return folder


def _process_start_time(pid: int) -> str:
    """When a process began, in ticks of the kernel's; empty where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


# --- Fetching ---------------------------------------------------------------------------------------------------------


def _download(args: argparse.Namespace) -> int:
    if (named := nodes_named(args.model_name)) not in (None, args.nnodes):
        raise invalid("--nnodes", f"is {args.nnodes}, and {args.model_name} is for {named} nodes", named)
    if args.mode == "slave" and args.nnodes == 1:
        raise invalid("--mode", "slave is for several nodes, and --nnodes is 1")
    if args.speculate_model_path:
        print("--speculate_model_path is ignored: MTP layers are part of their model's checkpoint", file=sys.stderr)
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
