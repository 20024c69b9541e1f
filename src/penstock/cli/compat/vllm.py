"""The command ``vllm`` of ``penstock shims``: runs Penstock's commands under vLLM's names and flags."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from penstock.core import Code, PenstockError

from ..main import COMMANDS as OTHERS
from ..main import main
from ..parser import Parser, exit_status

URL = "http://localhost:8000/v1"
HELP = ("-h", "--help")
ABOUT = {
    "serve": "start a server with the API of OpenAI (penstock serve)",
    "chat": "chat with a model on a running server (penstock chat, penstock generate)",
    "complete": "complete prompts with a model on a running server (penstock generate)",
    "bench": "measure a server or an engine: serve, throughput, latency, startup (penstock bench)",
    "run-batch": "process a file of requests in OpenAI's batch format (penstock run-batch)",
    "collect-env": "show hardware, versions and environment variables for a bug report (penstock doctor)",
}
UNSUPPORTED = {
    ("launch",): "run vllm serve, whose POST /tokenize renders chats as token ids",
    ("bench", "sweep"): "run vllm bench serve in a loop, each time with --append-result and --metadata",
    ("bench", "mm-processor"): "measure images with vllm bench serve; GET /metrics reports the time per stage",
}
"""Commands that are refused, with what to use."""


def run(arguments: Sequence[str]) -> int:
    """Run a command; returns its exit status."""
    command, *rest = [*arguments, ""]
    rest = rest[:-1]
    if command in ("", *HELP):
        _overview().print_help()
        return 0
    if command in ("-v", "--version"):
        return main(["--version"])
    if command in CLIENTS:
        parser = Parser(prog=f"vllm {command}", description=f"{ABOUT[command]}.".capitalize(), allow_abbrev=False)
        return exit_status(parser, lambda: CLIENTS[command](parser, rest))
    for names, instead in UNSUPPORTED.items():
        if names == (command, *rest[:1])[: len(names)]:
            error = PenstockError(Code.UNSUPPORTED, f"is not supported: {instead}", " ".join(names))
            print(f"vllm {' '.join(names)} {error.failure.message}", file=sys.stderr)
            return 2
    return main(["doctor", "--report", *rest] if command == "collect-env" else [command, *rest])


def _overview() -> Parser:
    others = ", ".join(name for name in OTHERS if name not in ABOUT)
    parser = Parser(
        prog="vllm",
        description="vLLM's commands, run by Penstock. vllm COMMAND --help shows the flags of a command.",
        epilog=f"Penstock's other commands can also be used: {others}.",
    )
    parser.add_argument("-v", "--version", action="store_true", help="show version, commit and kernels, and exit")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, about in ABOUT.items():
        commands.add_parser(name, help=about)
    return parser


def _client_arguments(parser: argparse.ArgumentParser, arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the flags of ``vllm chat`` and ``vllm complete``; returns them, and the server as Penstock's flags."""
    parser.add_argument("--url", default=URL, help=f"URL of the server's API, including /v1 (default: {URL})")
    parser.add_argument("--model-name", metavar="NAME", help="model (default: the first one that the server lists)")
    parser.add_argument("--api-key", metavar="KEY", help="API key (default: $OPENAI_API_KEY)")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="send one text, print the answer, and exit")
    parser.add_argument("--stats", action="store_true", help="ignored: a chat in a terminal always shows its speed")
    args = parser.parse_args(arguments)
    given = {"--url": args.url, "--model-name": args.model_name, "--api-key": args.api_key}
    if args.stats:
        print(f"{parser.prog}: --stats is ignored: the chat in a terminal always shows its speed", file=sys.stderr)
    return args, [f"{flag}={value}" for flag, value in given.items() if value is not None]


def _chat(parser: argparse.ArgumentParser, arguments: list[str]) -> int:
    parser.add_argument("--system-prompt", default="", metavar="TEXT", help="system prompt")
    args, server = _client_arguments(parser, arguments)
    system = [f"--system={args.system_prompt}"] if args.system_prompt else []
    if args.quick is None:
        return main(["chat", *server, *system])
    return main(["generate", "--chat", *server, *system, "--", args.quick])


def _complete(parser: argparse.ArgumentParser, arguments: list[str]) -> int:
    parser.add_argument(
        "--max-tokens", type=int, metavar="TOKENS", help="maximum tokens to generate (default: the server's)"
    )
    args, server = _client_arguments(parser, arguments)
    limit = [f"--max-tokens={args.max_tokens}"] if args.max_tokens is not None else []
    return main(["generate", *server, *limit, *(["--interactive"] if args.quick is None else ["--", args.quick])])


CLIENTS: dict[str, Callable[[argparse.ArgumentParser, list[str]], int]] = {"chat": _chat, "complete": _complete}

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
