"""``penstock pd``: start prefill and decode instances with a router on this machine, or show a router's instances."""

from __future__ import annotations

import argparse

from ..flags import TITLES, add_options
from ..running_servers import DEFAULT_URL, default_url


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "status: show the instances of a running router (default: start instances and a router)"
    parser.add_argument("action", nargs="?", choices=("status",), help=about)
    parser.add_argument("--prefill", type=int, default=1, metavar="N", help="number of prefill instances (default: 1)")
    parser.add_argument("--decode", type=int, default=1, metavar="N", help="number of decode instances (default: 1)")
    group = parser.add_argument_group("with status")
    group.add_argument("--url", help=f"router (default: the only running server of this user, or {DEFAULT_URL})")
    group.add_argument("--once", action="store_true", help="print the table once, and exit")
    add_options(parser, tuple(TITLES))


def run(args: argparse.Namespace) -> int:
    if args.action == "status":
        from .status import show

        return show(args.url or default_url(), getattr(args, "api_key", [""])[0], args.once)
    from .deployment import start

    return start(args)
