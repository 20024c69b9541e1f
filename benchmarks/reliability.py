"""Outcomes of requests when clients disconnect, processes are killed and queues are full (table in
docs/reliability.md).

python benchmarks/reliability.py        # about five minutes on two cores

Runs the scenarios of tests/support/storm.py with more requests. Every request is greedy; an answer is right if it
equals the known answer byte for byte. The longest pause is that between two events of a stream with a right answer.
After each scenario no request may be running or waiting, and no KV block in use.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

import storm
from storm import Outcome, Question, Tally
from tqdm import tqdm

COLUMNS = (Outcome.RIGHT, Outcome.LEFT, Outcome.REFUSED, Outcome.FAILED, Outcome.BROKEN, Outcome.WRONG, Outcome.LOST)
FIXED_ADDRESS = ("--engine-address", "127.0.0.1:0")
"""Options with which no second engine can run next to the first."""
Scenario = Callable[[list[Question]], Coroutine[Any, Any, Tally]]
SCENARIOS: dict[str, Scenario] = {
    "clients disconnect during the answer": lambda q: storm.clients_disconnecting(q, 1000),
    "slow readers, and one that never reads": lambda q: storm.slow_and_silent_readers(q, slow=16, silent=2, others=200),
    "1,000 connections at once, a queue for all": lambda q: storm.many_connections(q, 1000, "--max-waiting", "1000"),
    "1,000 connections at once, a queue of 256": lambda q: storm.many_connections(q, 1000),
    "more requests than the queue holds": lambda q: storm.overload(q, 400),
    "kill -9 of the engine": lambda q: storm.engine_killed(q, 200),
    "kill -9 of an engine, one of two": lambda q: storm.engine_killed(q, 200, "--data-parallel-size", "2"),
    "kill -9 of a rank, one of two": lambda q: storm.worker_killed(q, 200),
    "SIGHUP: rolling restart": lambda q: storm.engine_replaced(q, 200),
    "SIGHUP: rolling restart of two replicas": lambda q: storm.engine_replaced(q, 200, "--data-parallel-size", "2"),
    "SIGHUP: restart after the old engine": lambda q: storm.engine_replaced(q, 200, *FIXED_ADDRESS),
    "greedy clients": lambda q: storm.greedy_clients(q, 24),
    "10,000 pipelined requests": lambda q: storm.pipelined_requests(q, 10_000),
    "SIGSTOP of the engine": lambda q: storm.engine_hung(q, 200),
    "kill -9 of an API process, one of two": lambda q: storm.api_killed(q, 200),
    "SIGSTOP of an API process": lambda q: storm.api_stopped(q, 200),
    "SIGTERM": lambda q: storm.sigterm(q, 200),
    "SIGTERM with 0.2 s to drain": lambda q: storm.sigterm_drain_timeout(q, 200),
    "kill -9 of the engine, three times": lambda q: storm.engine_killed_repeatedly(q, 50),
    "kill -9 of the server": lambda q: storm.supervisor_killed(q, 50),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    asked = storm.questions()
    lines = [
        f"| scenario | sent | {' | '.join(COLUMNS)} | longest pause, s |",
        f"|---|---:|{'---:|' * (len(COLUMNS) + 1)}",
    ]
    total = dict.fromkeys(COLUMNS, 0)
    for name, scenario in tqdm(SCENARIOS.items(), desc="scenarios", unit="scenario"):
        tally = storm.run(scenario(asked), limit=600)
        lines.append(row(name, tally.counts, f"{tally.longest_pause:.2f}"))
        for outcome in COLUMNS:
            total[outcome] += tally.counts[outcome]
        print(lines[-1], file=sys.stderr)
    lines.append(row("**all**", total))
    print("\n".join(lines))


def row(name: str, counts: dict[Outcome, int], pause: str = "") -> str:
    cells = [str(sum(counts.values())), *(str(counts[outcome]) for outcome in COLUMNS), pause]
    return f"| {name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
