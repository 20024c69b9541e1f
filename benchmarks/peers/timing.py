"""What every runner does: the works in turn, a line of JSON for each. Needs nothing: each peer has its own Python."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable

Prompts = list[list[int]]


def run_all(works: str, generate: Callable[[Prompts, int], Callable[[], object]]) -> None:
    """Print the seconds of each work, after a long prompt that does not count: memory is there by then.

    Args:
        works: JSON, of each the prompts, their tokens and the tokens to generate.
        generate: prepares a generation from prompts and that number; what it returns is called and timed.
    """
    draw = random.Random(0)

    def run(prompts: int, read: int, generated: int) -> float:
        call = generate([[draw.randrange(1000, 100000) for _ in range(read)] for _ in range(prompts)], generated)
        begun = time.perf_counter()
        call()
        return time.perf_counter() - begun

    run(1, 2048, 8)
    for work in json.loads(works):
        print(json.dumps({"work": work, "seconds": run(*work)}), flush=True)
