"""Memory of open requests in an API process: what the gateway needs for their answers, and what the engine pool adds so
that they can continue on another engine.

python benchmarks/open_requests.py [--requests N] [--prompt-len N] [--output-len N]

The objects are those of ``Gateway.generate`` and ``EnginePool.add``, for streams of the built-in model that have
received ``--output-len`` tokens. Memory is that of Python's allocator (``tracemalloc``).
"""

from __future__ import annotations

import argparse
import gc
import random
import tracemalloc
from functools import partial

import msgspec

from penstock.config.options import ModelOptions
from penstock.core import SamplingParams, TokenDelta
from penstock.engine.service.replica import OpenRequest
from penstock.frontend.fair_queue import DeltaQueue
from penstock.frontend.input_processor import InputProcessor
from penstock.frontend.output_processor import OutputProcessor
from penstock.frontend.prompts import TokenizedPrompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="open requests (default: 10000)")
    parser.add_argument("--prompt-len", type=int, default=100, help="tokens per prompt (default: 100)")
    parser.add_argument("--output-len", type=int, default=100, help="tokens received per request (default: 100)")
    args = parser.parse_args()
    rng, inputs = random.Random(0), InputProcessor("", ModelOptions())
    size = len(inputs.tokenizer.vocabulary)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(size) for _ in range(count)]

    def open_request(number: int) -> OutputProcessor:
        prompt = TokenizedPrompt(tokens(args.prompt_len))
        processor = inputs.create_output_processor(str(number), prompt, SamplingParams(max_tokens=2 * args.output_len))
        for token in tokens(args.output_len):
            processor.add(TokenDelta(request_id=str(number), token_ids=[token]))
        return processor

    def keep(request: object) -> OpenRequest:
        assert isinstance(request, msgspec.Struct)
        sampling = request.sampling.replace(seed=rng.getrandbits(63))  # type: ignore[attr-defined]
        return OpenRequest(msgspec.structs.replace(request, sampling=sampling, uid=rng.getrandbits(64)))

    open_request(0)
    gc.collect()
    tracemalloc.start()
    processors = [open_request(number) for number in range(args.requests)]
    queues = [DeltaQueue(partial(print, number)) for number in range(args.requests)]
    before = traced()
    kept = [keep(processor.request) for processor in processors]
    after = traced()
    print(f"{len(kept)} requests with {args.prompt_len} prompt tokens and {args.output_len} generated tokens:")
    print(f"  answers (prompt, text, tokens, queues): {before / 1e6:.1f} MB, {before / len(queues) / 1e3:.2f} kB each")
    print(f"  resumption: {(after - before) / 1e6:.1f} MB, {(after - before) / len(kept) / 1e3:.2f} kB each")


def traced() -> int:
    """Allocated bytes."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


if __name__ == "__main__":
    main()
