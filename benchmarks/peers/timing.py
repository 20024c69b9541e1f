"""The side of a system: it reads a question a line and prints the answer. Needs only Python's standard library, since
each peer has an environment of its own."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable

Prompts = list[list[int]]


def answer(seconds: Callable[[int, int, int], float], perplexity: Callable[[str, int], float] | None = None) -> None:
    """Answer lines of JSON.

    Args:
        seconds: answers ``{"seconds": [prompts, tokens of each, tokens to generate for each]}``.
        perplexity: answers ``{"perplexity": [text file, windows]}``.
    """
    functions = {"seconds": seconds, "perplexity": perplexity}
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        ((what, arguments),) = json.loads(line).items()
        function = functions[what]
        assert function is not None, f"this system does not measure {what}"
        print(json.dumps({what: function(*arguments)}), flush=True)


def run_all(
    generate: Callable[[Prompts, int], Callable[[], object]], perplexity: Callable[[str, int], float] | None = None
) -> None:
    """Answer with random prompts, after a long one that does not count: memory is there by then.

    Args:
        generate: prepares a generation from prompts and the tokens to generate; what it returns is called and timed.
        perplexity: as of ``answer``.
    """
    draw = random.Random(0)

    def run(prompts: int, read: int, generated: int) -> float:
        call = generate([[draw.randrange(1000, 40000) for _ in range(read)] for _ in range(prompts)], generated)
        begun = time.perf_counter()
        call()
        return time.perf_counter() - begun

    run(1, 2048, 8)
    answer(run, perplexity)
