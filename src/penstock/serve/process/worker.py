"""One API process, ``python -m penstock.serve.process.worker``; the supervisor tells it what to serve on stdin.

SIGTERM lets its requests come to their end; it does not outlive the supervisor.
"""

from __future__ import annotations

import gc
import os
import sys

import msgspec
import uvloop

from penstock.config import logs
from penstock.core import PenstockError
from penstock.engine.service.server import die_with

from ..models.messages import EXIT_MISCONFIGURED, WorkerStart


def main() -> None:
    report = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints is not to be taken for the report
    first, rest = _first_line()
    start = msgspec.json.decode(first, type=WorkerStart)
    die_with(start.parent)
    several = start.configuration.server.api_server_count > 1
    logs.set_up(start.configuration.log, f"api-{start.number}" if several else "api")
    gc.disable()  # until it serves: a third of the time that importing takes
    from .api_server import run

    try:
        uvloop.run(run(start, report, rest))
    except PenstockError as error:
        print(f"penstock serve: {error}", file=sys.stderr)
        sys.exit(EXIT_MISCONFIGURED)


def _first_line() -> tuple[bytes, bytes]:
    """And what came with it of the lines after."""
    found = b""
    while b"\n" not in found:
        if not (more := os.read(0, 2**16)):
            sys.exit(EXIT_MISCONFIGURED)
        found += more
    first, _, rest = found.partition(b"\n")
    return first, rest


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
