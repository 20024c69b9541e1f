"""``penstock generate``: complete a prompt from the command line or standard input, streaming to standard output."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

from penstock.core.errors import invalid

from .flags import add_options, options_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="prompt (default: standard input)")
    parser.add_argument("--chat", action="store_true", help="send the prompt as a chat message, with the chat template")
    parser.add_argument("--system", help="system prompt for --chat")
    parser.add_argument("--max-tokens", type=int, help="maximum tokens to generate (default: limited by the context)")
    parser.add_argument("--temperature", type=float, help="sampling temperature; 0: greedy (default: the model's)")
    parser.add_argument("--sampling-seed", type=int, help="seed for reproducible sampling (default: random)")
    add_options(parser)
    parser.add_argument("-m", dest="model", default=argparse.SUPPRESS, metavar="MODEL", help="the same as --model")


def run(args: argparse.Namespace) -> int:
    return asyncio.run(_stream(args))


async def _stream(args: argparse.Namespace) -> int:
    from penstock.frontend.async_llm import AsyncLLM

    if args.prompt is None and sys.stdin.isatty():
        raise invalid("prompt", 'is missing: penstock generate "Once upon a time", or send it to standard input')
    prompt = sys.stdin.read() if args.prompt is None else args.prompt
    if not prompt.strip():
        raise invalid("prompt", "is empty: give it as an argument, or send it to standard input")
    llm = AsyncLLM(**options_of(args))
    changes: dict[str, Any] = {"max_tokens": args.max_tokens, "seed": args.sampling_seed}
    if args.temperature is not None:
        changes["temperature"] = args.temperature
    sampling = llm.get_default_sampling_params().replace(**changes)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    messages.append({"role": "user", "content": prompt})
    async with llm:
        num_printed = 0
        stream = llm.chat(messages, sampling) if args.chat else llm.generate(prompt, sampling)
        async for output in stream:
            (completion,) = output.outputs
            print(completion.text[num_printed:], end="", flush=True)
            num_printed = len(completion.text)
            if completion.failure:
                print(f"\npenstock generate: {completion.failure.message}", file=sys.stderr)
                return 1
    print()
    return 0
