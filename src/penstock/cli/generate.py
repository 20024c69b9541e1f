"""``penstock generate``: complete prompts from the command line or standard input, streaming to standard output."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.core import PenstockError
from penstock.core.errors import invalid

from .chat.server_flags import add_server_flags, server_of
from .flags import add_options, options_of

if TYPE_CHECKING:
    from .chat.server_backend import Server


class Answer(NamedTuple):
    """Output so far."""

    text: str
    failure: str = ""
    """Error message; empty: no error."""


Complete = Callable[[str], AsyncIterator[Answer]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="prompt (default: standard input)")
    parser.add_argument("--interactive", action="store_true", help="each line of standard input is a prompt")
    parser.add_argument("--chat", action="store_true", help="send the prompt as a chat message, with the chat template")
    parser.add_argument("--system", help="system prompt for --chat")
    parser.add_argument(
        "--max-tokens", type=int, help="maximum tokens to generate (default: the context, or the server's default)"
    )
    parser.add_argument("--temperature", type=float, help="sampling temperature; 0: greedy (default: the model's)")
    parser.add_argument("--sampling-seed", type=int, help="seed for reproducible sampling (default: random)")
    add_server_flags(parser)
    add_options(parser)
    parser.add_argument("-m", dest="model", default=argparse.SUPPRESS, metavar="MODEL", help="the same as --model")


def run(args: argparse.Namespace) -> int:
    return asyncio.run(_run(args))


async def _run(args: argparse.Namespace) -> int:
    server, prompts = server_of(args), _prompts(args)
    async with _server(server, args) if server else _engine(args) as complete:
        return max([await _print(complete(prompt)) for prompt in prompts], default=0)


def _prompts(args: argparse.Namespace) -> Iterator[str]:
    """Prompts of the command line or standard input. Raises ``PenstockError`` (``invalid``) for a missing prompt."""
    if args.interactive:
        if args.prompt is not None:
            raise invalid("prompt", "cannot be combined with --interactive, which reads prompts from standard input")
        from .chat.terminal import PlainEditor, Terminal

        signal.signal(signal.SIGINT, signal.default_int_handler)  # asyncio's handler would not interrupt input()
        return Terminal(PlainEditor() if sys.stdin.isatty() and sys.stdout.isatty() else None).lines()
    if args.prompt is None and sys.stdin.isatty():
        raise invalid("prompt", 'is missing: penstock generate "Once upon a time", or send it to standard input')
    prompt = sys.stdin.read() if args.prompt is None else args.prompt
    if not prompt.strip():
        raise invalid("prompt", "is empty: give it as an argument, or send it to standard input")
    return iter([prompt])


async def _print(answers: AsyncIterator[Answer]) -> int:
    """Print an answer while it is generated; returns 1 if it fails."""
    num_printed = 0
    async for answer in answers:
        print(answer.text[num_printed:], end="", flush=True)
        num_printed = len(answer.text)
        if answer.failure:
            print(f"\npenstock generate: {answer.failure}", file=sys.stderr)
            return 1
    print(flush=True)
    return 0


def _messages(prompt: str, args: argparse.Namespace) -> list[Any]:
    system = [{"role": "system", "content": args.system}] if args.system else []
    return [*system, {"role": "user", "content": prompt}]


@asynccontextmanager
async def _engine(args: argparse.Namespace) -> AsyncIterator[Complete]:
    """Run a local engine."""
    from penstock.frontend.async_llm import AsyncLLM

    llm = AsyncLLM(**options_of(args))
    changes: dict[str, Any] = {"max_tokens": args.max_tokens, "seed": args.sampling_seed}
    if args.temperature is not None:
        changes["temperature"] = args.temperature
    sampling = llm.get_default_sampling_params().replace(**changes)

    async def complete(prompt: str) -> AsyncIterator[Answer]:
        stream = llm.chat(_messages(prompt, args), sampling) if args.chat else llm.generate(prompt, sampling)
        async for output in stream:
            (completion,) = output.outputs
            yield Answer(completion.text, completion.failure.message if completion.failure else "")

    async with llm:
        yield complete


@asynccontextmanager
async def _server(server: Server, args: argparse.Namespace) -> AsyncIterator[Complete]:
    """Connect to a server."""
    from .chat.backend import ContextFull
    from .chat.conversation import Conversation

    given = {"max_tokens": args.max_tokens, "temperature": args.temperature, "seed": args.sampling_seed}
    sampling = {name: value for name, value in given.items() if value is not None}
    conversation = Conversation()
    for name, value in sampling.items():
        conversation.set(name, value)

    async def complete(prompt: str) -> AsyncIterator[Answer]:
        chat = server.answer(_messages(prompt, args), conversation) if args.chat else server.complete(prompt, sampling)
        answer = Answer("")
        try:
            async for each in chat:
                yield (answer := Answer(each.text))
        except (ContextFull, PenstockError) as error:
            yield Answer(answer.text, str(error))

    async with server:
        yield complete
