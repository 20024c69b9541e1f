"""Flags of commands that use a server with OpenAI's API instead of a local engine."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from penstock.core.errors import invalid

if TYPE_CHECKING:
    from .server_backend import Server

KEYS = ("OPENAI_API_KEY", "PENSTOCK_API_KEY")
"""Environment variables with an API key."""


def add_server_flags(parser: argparse.ArgumentParser, default: str = "") -> None:
    """Add ``--url``, ``--api-key`` and ``--model-name``.

    Args:
        default: default of ``--url``, for the help.
    """
    group = parser.add_argument_group("use a server instead of a local engine")
    group.add_argument("--url", help=f"URL of any server with OpenAI's API: http://HOST:8000/v1{default}")
    about = f"API key (default: {' or '.join(f'${name}' for name in KEYS)})"
    group.add_argument("--api-key", dest="key", metavar="KEY", help=about)
    group.add_argument("--model-name", metavar="NAME", help="model (default: the first one that the server lists)")


def server_of(args: argparse.Namespace, unless: str = "") -> Server | None:
    """Server of ``--url``; None: use a local engine. Raises ``PenstockError`` (``invalid``) for flags of the other.

    Args:
        unless: condition under which ``--url`` is not required, for the error.
    """
    if args.url is None:
        if args.model_name is not None or args.key is not None:
            raise invalid("url", f"is required with --model-name and --api-key{unless}")
        return None
    if getattr(args, "model_tag", None) is not None or hasattr(args, "model"):
        raise invalid("url", "cannot be combined with MODEL, which starts a local engine: use --model-name")
    from .server_backend import Server

    return Server(args.url, _key() if args.key is None else args.key, args.model_name)


def _key() -> str | None:
    """API key of the environment. The variable of ``penstock serve`` has several keys, separated by commas."""
    keys = (os.environ.get(name, "").split(",")[0].strip() for name in KEYS)
    return next(filter(None, keys), None)
