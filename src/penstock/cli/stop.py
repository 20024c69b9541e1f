"""``penstock stop``: stop running servers."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

from penstock.core.errors import invalid
from penstock.serve.process.server_record import ServerRecord, process_start_time

from .processes import ProcessHandle
from .running_servers import describe, listed_servers

EXIT_SECONDS = 20.0
"""Seconds after ``drain_timeout`` within which a server ends; it kills its own processes before."""
KILL_SECONDS = 10.0
"""Seconds within which a killed server ends."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "model, port, URL or process id of the server, as penstock ps shows it (default: the only running server)"
    parser.add_argument("server", nargs="?", metavar="MODEL|PORT|PID", help=about)
    parser.add_argument("--all", action="store_true", help="stop all running servers of this user")
    about = (
        "time to wait for the end of a server (default: its --drain-timeout, in which open requests finish, and "
        f"{EXIT_SECONDS:.0f} seconds more)"
    )
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help=about)
    parser.add_argument("--force", action="store_true", help="kill the server at once; open requests are lost")


def run(args: argparse.Namespace) -> int:
    """Stop the selected servers. Returns 1 if no server runs, or a server does not end in time.

    Raises ``PenstockError`` (``invalid``) if the arguments do not select servers.
    """
    if args.timeout is not None and args.timeout < 0:
        raise invalid("--timeout", f"must be at least 0 seconds, is {args.timeout:g}", 0)
    if args.all and args.server is not None:
        raise invalid("--all", f"cannot be combined with {args.server}: remove one of them")
    servers = listed_servers()
    if not servers and args.server is None:
        print("no server is running", file=sys.stderr)
        return 0 if args.all else 1
    selected = servers if args.all else [_select(servers, args.server)]
    with ExitStack() as stack:
        handles = [handle for server in selected for handle in _signalled(server, args.force, stack)]
        started = time.monotonic()
        ended = [_wait(server, handle, args, started) for server, handle in handles]
    return 0 if all(ended) else 1


def _select(servers: list[ServerRecord], name: str | None) -> ServerRecord:
    """The server that ``name`` means; None: the only one. Raises ``PenstockError`` (``invalid``) if it is not one."""
    found = [server for server in servers if name is None or name in _names(server)]
    if len(found) == 1:
        return found[0]
    listing = "; ".join(map(describe, found or servers))
    if found:
        meant = "several servers are running" if name is None else f"{name} means several servers"
        raise invalid("MODEL|PORT|PID", f"{meant}: give the process id of one, or --all: {listing}")
    running = f"running are: {listing}" if servers else "no server is running"
    raise invalid("MODEL|PORT|PID", f"no server has the model, port, URL or process id {name}: {running}")


def _names(server: ServerRecord) -> set[str]:
    """Names by which a server can be given: models (also without folder), addresses, ports, process id."""
    addresses = [address for address in (server.url, server.grpc_address) if address]
    ports = {address.rpartition(":")[2] for address in addresses}
    models = {*server.models, *(name.rpartition("/")[2] for name in server.models)}
    return {*models, *addresses, *(f"{address}/v1" for address in addresses), *ports, str(server.pid)}


def _signalled(server: ServerRecord, force: bool, stack: ExitStack) -> Iterator[tuple[ServerRecord, ProcessHandle]]:
    """Send the signal that ends a server. Yields its process, unless it has ended."""
    with suppress(ProcessLookupError):
        handle = stack.enter_context(ProcessHandle(server.pid))
        if process_start_time(server.pid) != server.start_time:
            return
        print(f"{'killing' if force else 'stopping'} {describe(server)}", file=sys.stderr)
        handle.send(signal.SIGKILL if force else signal.SIGTERM)  # its child processes end with it
        yield server, handle


def _wait(server: ServerRecord, handle: ProcessHandle, args: argparse.Namespace, started: float) -> bool:
    """Wait for the end of a server; returns False, after a message, if it still runs after the timeout."""
    default = KILL_SECONDS if args.force else server.drain_timeout + EXIT_SECONDS
    timeout = default if args.timeout is None else args.timeout
    if handle.wait(started + timeout - time.monotonic()):
        print(f"stopped {describe(server)} after {time.monotonic() - started:.1f} s")
        return True
    remedy = "see its state with ps" if args.force else f"kill it with penstock stop {server.pid} --force"
    message = f"process {server.pid} still runs after {timeout:g} seconds: wait for its open requests, or {remedy}"
    print(f"penstock stop: {message}", file=sys.stderr)
    return False
