"""``penstock download``: fetches a model, or goes on with fetching it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from penstock.config.profiles import load
from penstock.core.errors import invalid

from .flags import add_options, configure

OPTIONS = ("model_hub", "revision", "hf_token", "download_dir")
HUBS = {"hf": "huggingface", "huggingface": "huggingface", "modelscope": "modelscope", "ms": "modelscope"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        metavar="NAME|URI",
        help="org/name, org/name@revision, org/name:Q4_K_M for a GGUF file; or hf://, modelscope://, s3://, oss://, "
        "gs://, http://, https://",
    )
    parser.add_argument("--dir", type=Path, metavar="FOLDER", help="where to put the files (default: the cache)")
    parser.add_argument(
        "--include", nargs="+", default=[], metavar="PATTERN", help="paths to fetch (default: what a checkpoint needs)"
    )
    parser.add_argument("--exclude", nargs="+", default=[], metavar="PATTERN", help="paths not to fetch")
    parser.add_argument("--source", choices=sorted(HUBS), help="hub of org/name (default: --model-hub)")
    parser.add_argument("--endpoint", default="", metavar="URL", help="address of the hub or object store")
    parser.add_argument("--token", help="for the hub (default: HF_TOKEN or MODELSCOPE_API_TOKEN)")
    parser.add_argument("--max-workers", type=int, default=8, help="connections at the same time (default: 8)")
    parser.add_argument("--compat", default="", help="system whose environment variables are read, too")
    add_options(parser, (), OPTIONS)


def run(args: argparse.Namespace) -> int:
    from penstock.frontend.downloads import DownloadOptions, Selection, download, parse

    args.profile = load(args.compat)
    options = configure(args).configuration.model
    if args.max_workers < 1:
        raise invalid("--max-workers", "must be 1 or more", 1)
    name = parse(args.name, HUBS.get(args.source or "", options.model_hub), options.revision)
    hub_token = options.hf_token if name.scheme == "huggingface" else ""
    how = DownloadOptions(
        token=args.token or hub_token or None,
        endpoint=args.endpoint,
        cache_dir=Path(options.download_dir) if options.download_dir else None,
        max_workers=args.max_workers,
        progress=sys.stderr.isatty(),
    )
    selection = Selection(args.include, args.exclude)
    print(download(name, selection, how, args.dir).absolute())
    return 0
