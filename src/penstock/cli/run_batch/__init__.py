"""``penstock run-batch``: a file of requests in OpenAI's batch format, answered into another file."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from tqdm import tqdm

from penstock.core import PenstockError, logs
from penstock.core.errors import invalid
from penstock.core.options import Configuration, EngineOptions

from ..flags import add_options, configure
from .files import Results, Survey, requests, survey
from .work import Work


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-i", "--input-file", required=True, type=Path, metavar="FILE", help="requests, one a line")
    parser.add_argument(
        "-o",
        "--output-file",
        required=True,
        type=Path,
        metavar="FILE",
        help="results, one a line as they come; what it holds already is not asked again",
    )
    parser.add_argument(
        "--max-concurrency",
        dest="at_once",  # not the server's option of this name
        type=int,
        metavar="REQUESTS",
        help="requests at the same time (default: twice --max-num-seqs, as far as --max-waiting allows)",
    )
    parser.add_argument(
        "--served-model-name",
        nargs="+",
        default=argparse.SUPPRESS,
        metavar="NAME",
        help="names by which requests may ask for the model (default: that of --model)",
    )
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Returns 0 when every line has a good answer, else 1."""
    configuration = configure(args).configuration
    at_once = most_at_once(configuration.engine) if args.at_once is None else args.at_once
    if at_once < 1:
        raise invalid("max_concurrency", f"must be at least 1, is {at_once}", 1)
    logs.set_up(configuration.log, "run-batch")
    with Results(args.output_file, args.input_file) as results:
        found = survey(args.input_file, results)
        return asyncio.run(_answer(configuration, args.input_file, results, found, at_once)) if found.left else
'''
