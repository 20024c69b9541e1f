"""Main program of an API process (``python -m penstock.serve.process.api_process``), controlled through stdin.

On SIGTERM it finishes its requests and exits. It is killed when the supervisor dies.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys

import msgspec
import uvloop

from penstock.config import logs, secrets
from penstock.core import PenstockError
from penstock.core.machine_errors import start_failure
from penstock.engine.service.server import kill_with_parent

from ..models.messages import EXIT_MISCONFIGURED, ApiProcessStart


def main() -> None:
    report = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not reach the pipe to the supervisor
    first, rest = _first_line()
    start = msgspec.json.decode(first, type=ApiProcessStart)
    kill_with_parent(start.parent)
    several = start.configuration.server.api_server_count > 1
    secrets.register(start.configuration)
    logs.set_up(start.configuration.log, f"api-{start.number}" if several else "api")
    gc.disable()  # enabled once this process serves; collections would take a third of the import time
    atexit.register(gc.freeze)  # collections at interpreter exit take 0.1 seconds and more
    from .api_server import run

    try:
        uvloop.run(run(start, report, rest))
    except PenstockError as error:
        print(f"penstock serve: {secrets.mask(str(error))}", file=sys.stderr)
        sys.exit(EXIT_MISCONFIGURED)
    except (OSError, MemoryError, ImportError, RuntimeError) as error:
        if (failure := start_failure(error)) is None:
            raise
        print(f"penstock serve: an API process has ended: {failure.message}", file=sys.stderr)
        sys.exit(1)


def _first_line() -> tuple[bytes, bytes]:
    """Read the first line of standard input; returns the line, and the bytes read after it."""
    received = b""
    while b"\n" not in received:
        if not (more := os.read(0, 2**16)):
            sys.exit(EXIT_MISCONFIGURED)
        received += more
    first, _, rest = received.partition(b"\n")
    return first, rest


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
