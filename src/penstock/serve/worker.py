"""One API process: ``python -m penstock.serve.worker``, told what to do on standard input.

SIGTERM lets its requests come to their end; it does not outlive the supervisor.
"""

from __future__ import annotations

import gc
import os
import sys

import msgspec
import uvloop

from penstock.core import PenstockError, logs
from penstock.engine.process import die_with

from .start import WRONG, WorkerStart


def main() -> None:
    report = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints is not to be taken for the report
    start = msgspec.json.decode(sys.stdin.buffer.read(), type=WorkerStart)
    die_with(start.parent)
    several = start.configuration.server.api_server_count > 1
    logs.set_up(start.configuration.log, f"api-{start.number}" if several else "api")
    gc.disable()  # until it serves: a third of the time that importing takes
    from .api import run

    try:
        uvloop.run(run(start, report))
    except PenstockError as error:
        print(f"penstock serve: {error}", file=sys.stderr)
        sys.exit(WRONG)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
