"""``penstock chat``: chat in the terminal with a local engine or a server."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from penstock import demo

from ..flags import add_model, add_options, options_of
from ..running_servers import only_url
from ..screen import has_escapes
from .server_flags import add_server_flags, server_of

if TYPE_CHECKING:
    from .engine_backend import Engine
    from .server_backend import Server
    from .terminal import Editor

SAMPLING = {"temperature": "temperature", "top_p": "top_p", "max_tokens": "max_tokens", "sampling_seed": "seed"}
"""Sampling parameters by flag."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--system", default="", metavar="TEXT", help="system prompt")
    about = "image to send with the first message; can be repeated"
    parser.add_argument("--image", action="append", default=[], metavar="FILE or URL", help=about)
    parser.add_argument("--tools", metavar="FILE", help="JSON file of tools in OpenAI's format")
    parser.add_argument(
        "--tool-command",
        default="",
        metavar="COMMAND",
        help="command that executes tool calls, each after a confirmation: COMMAND NAME, with the arguments as JSON on "
        "standard input (default: type the results)",
    )
    parser.add_argument(
        "--mcp-config",
        metavar="FILE",
        help="JSON file of MCP servers whose tools the model may call, each call after a confirmation",
    )
    parser.add_argument("--temperature", type=float, help="sampling temperature; 0: greedy (default: the model's)")
    parser.add_argument(
        "--top-p", type=float, help="cumulative probability for nucleus sampling (default: the model's)"
    )
    parser.add_argument("--max-tokens", type=int, help="maximum tokens of an answer (default: limited by the context)")
    parser.add_argument("--sampling-seed", type=int, help="seed for reproducible sampling (default: random)")
    add_server_flags(
        parser,
        " (default: the only running server of this user, unless a model or other options of an engine are given)",
    )
    add_options(parser, ("model", "engine"))


def run(args: argparse.Namespace) -> int:
    """Run the chat. Returns 1 if a message from a pipe was not answered."""
    from anyio.from_thread import start_blocking_portal

    from .commands import ALIASES, COMMANDS
    from .conversation import Conversation
    from .images import image_url
    from .session import Session
    from .terminal import Terminal
    from .tools import load_tools

    conversation = Conversation(args.system)
    for flag, name in SAMPLING.items():
        if (value := getattr(args, flag)) is not None:
            conversation.set(name, value)
    conversation.images += [image_url(given) for given in args.image]
    if args.tools:
        conversation.tools = load_tools(Path(args.tools).expanduser())
    mcp = None
    if args.mcp_config:
        from .mcp import McpTools

        mcp = McpTools(args.mcp_config)
    if args.url is None and _has_no_engine_options(args) and (url := only_url(answering=True)):
        args.url = f"{url}/v1"
    terminal = Terminal(_editor())
    backend = _backend(args)
    with start_blocking_portal() as portal, ExitStack() as stack:
        with terminal.waiting(f"loading {backend.about}" if args.url is None else f"connecting to {args.url}"):
            stack.enter_context(portal.wrap_async_context_manager(backend))
            if mcp:
                stack.enter_context(portal.wrap_async_context_manager(mcp))
                conversation.tools += mcp.definitions
        return Session(backend, portal, conversation, terminal, COMMANDS, ALIASES, args.tool_command, mcp).run()


def _has_no_engine_options(args: argparse.Namespace) -> bool:
    return args.model_tag is None and args.config is None and not any(hasattr(args, name) for name in args.options)


def _editor() -> Editor | None:
    """Line editor if a person types the messages; None in a pipe."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return None
    from .terminal import PlainEditor

    if not has_escapes():
        return PlainEditor()
    from .commands import COMMANDS
    from .editor import ChatEditor

    return ChatEditor(COMMANDS)


def _backend(args: argparse.Namespace) -> Engine | Server:
    if server := server_of(args, unless=" unless exactly one server is running"):
        return server
    from .engine_backend import Engine

    options = options_of(args)
    return Engine(options, options["model"] or demo.NAME)
