"""Request loop of the runners: reads one JSON request per line and prints the response. Uses only Python's standard
library, since each peer has a separate environment."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable

Prompts = list[list[int]]


def answer(seconds: Callable[[int, int, int], float], perplexity: Callable[[str, int], float] | None = None) -> None:
    """Serve requests from standard input.

    Args:
        seconds: handles ``{"seconds": [prompts, tokens per prompt, tokens to generate per prompt]}``.
        perplexity: handles ``{"perplexity": [text file, windows]}``.
    """
    functions = {"seconds": seconds, "perplexity": perplexity}
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        ((method, arguments),) = json.loads(line).items()
        function = functions[method]
        assert function is not None, f"this system does not measure {method}"
        print(json.dumps({method: function(*arguments)}), flush=True)


def run_all(
    generate: Callable[[Prompts, int], Callable[[], object]], perplexity: Callable[[str, int], float] | None = None
) -> None:
    """Serve requests with random prompts, after a long warm-up prompt that allocates memory.

    Args:
        generate: prepares a generation for prompts and a number of tokens to generate; returns the function to time.
        perplexity: handler of perplexity requests, as for ``answer``.
    """
    draw = random.Random(0)

    def run(prompts: int, read: int, generated: int) -> float:
        call = generate([[draw.randrange(1000, 40000) for _ in range(read)] for _ in range(prompts)], generated)
        begun = time.perf_counter()
        call()
        return time.perf_counter() - begun

    run(1, 2048, 8)
    answer(run, perplexity)
