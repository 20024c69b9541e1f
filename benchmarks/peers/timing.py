"""What every runner does: a work a line comes in, its seconds go out. Needs nothing: each peer has its own Python."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable

Prompts = list[list[int]]


def answer(seconds: Callable[[int, int, int], float]) -> None:
    """For each line of JSON (prompts, tokens of each, tokens to generate for each) print how long that takes."""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"seconds": seconds(*json.loads(line))}), flush=True)


def run_all(generate: Callable[[Prompts, int], Callable[[], object]]) -> None:
    """Answer with random prompts, after a long one that does not count: memory is there by then.

    Args:
        generate: prepares a generation from prompts and the tokens to generate; what it returns is called and timed.
    """
    draw = random.Random(0)

    def run(prompts: int, read: int, generated: int) -> float:
        call = generate([[draw.randrange(1000, 100000) for _ in range(read)] for _ in range(prompts)], generated)
        begun = time.perf_counter()
        call()
        return time.perf_counter() - begun

    run(1, 2048, 8)
    answer(run)
