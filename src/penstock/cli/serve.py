"""``penstock serve``: the server."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from penstock.cluster.deployment import with_rank_tables
from penstock.config.addresses import join_address, split_address
from penstock.config.options import Configuration, EngineOptions, ServerOptions
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

from .compat import model_repository, service_json
from .flags import TITLES, add_options, configure
from .served_models import served_models

if TYPE_CHECKING:
    from penstock.frontend.downloads import Selection

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--service-json", metavar="FILE", help="a service of BladeLLM as EAS describes it")
    parser.add_argument("--model-repository", metavar="FOLDER", help="Triton's, with TensorRT-LLM's models")
    add_options(parser, tuple(TITLES))


def expand_arguments(arguments: list[str]) -> list[str]:
    """The arguments, with those of ``--service-json`` and ``--model-repository`` added."""
    return model_repository.expand_arguments(service_json.expand_arguments(arguments))


def run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    from penstock.serve.process.supervisor import Supervisor

    if args.model_tag is not None:
        if getattr(args, "model", args.model_tag) != args.model_tag:
            raise invalid("model", f"given twice, as {args.model_tag} and as --model {args.model}")
        args.model = args.model_tag
    configuration = with_role(with_rank_tables(configure(args, "serve").configuration))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        configuration = _of_torchrun(configuration)
        if int(os.environ["LOCAL_RANK"]):
            return 0  # the first one starts all ranks
    if configuration.engine.node_rank:
        return run_node(configuration)
    if configuration.engine.nnodes > 1 and configuration.server.models:
        raise PenstockError(Code.UNSUPPORTED, "a server of several nodes has one model", "models")
    if is_open(configuration.server):
        warning = "anyone who can reach %s of this machine can send requests: set --api-key, or --host 127.0.0.1"
        logger.warning(warning, configuration.server.host)
    models = [
        msgspec.structs.replace(model, configuration=download_model(model.configuration)) if model.required else model
        for model in served_models(configuration)
    ]

    async def serve() -> int:
        return await Supervisor(configuration, models, download_model, started).run()

    return asyncio.run(serve())


def with_role(configuration: Configuration) -> Configuration:
    """The configuration with what follows from ``role``: routers reach the engine of a prefill or decode instance, and
    of one that registers with them.

    Raises ``PenstockError`` where options contradict each other.
    """
    engine, server = configuration.engine, configuration.server
    router = engine.role == "router"
    refused = {
        "router_address": router and server.router_address and "a router registers with no other one",
        "engine_address": router and engine.engine_address and "a router has no engine",
        "decode_instances": not router and server.decode_instances and "needs --role router",
        "prefill_instances": engine.role in ("mixed", "prefill")
        and server.prefill_instances
        and "needs --role router or decode",
        "models": server.models
        and (engine.role != "mixed" or engine.engine_address or server.router_address)
        and "routers and instances have one model; start others for each",
    }
    for name, words in refused.items():
        if words:
            raise invalid(name, str(words))
    for address in server.router_address:
        split_address(address.rpartition("://")[2], "router_address")
    if engine.kv_advertised_address:
        split_address(engine.kv_advertised_address, "kv_advertised_address")
    if engine.engine_address:
        split_address(engine.engine_address, "engine_address")
    elif not router and (engine.role != "mixed" or server.router_address):
        return configuration.with_engine(engine_address=join_address(server.host, 0))
    return configuration


def run_node(configuration: Configuration) -> int:
    """Be a node other than the first, without a server, until SIGTERM."""
    from penstock.engine.executor import node_process

    configuration = download_model(configuration)

    def end(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, end)
    node_process.run_node(configuration.engine, configuration.log)
    return 0


def _of_torchrun(configuration: Configuration) -> Configuration:
    """The configuration under ``torchrun``: with as many ranks as it has started processes, and as many nodes, where
    options name none.

    Raises ``PenstockError`` (``invalid``) where they name others, or nodes have different numbers of processes.
    """
    here, everywhere = (int(os.environ[name]) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    nnodes, engine = everywhere // here, configuration.engine
    if everywhere % here:
        raise invalid(
            "nnodes", f"torchrun has started {everywhere} ranks, {here} of them on this node: give all the same"
        )
    if nnodes > 1:
        if engine.nnodes not in (1, nnodes):
            raise invalid("nnodes", f"torchrun has started {nnodes} nodes, and nnodes is {engine.nnodes}", nnodes)
        taken = int(os.environ["MASTER_PORT"])  # by torchrun itself
        configuration = configuration.with_engine(
            nnodes=nnodes,
            node_rank=int(os.environ["GROUP_RANK"]),
            master_addr=os.environ["MASTER_ADDR"],
            master_port=engine.master_port + (engine.master_port == taken),
        )
    if (ranks := engine.tensor_parallel_size * engine.pipeline_parallel_size) == 1:
        configuration = configuration.with_engine(tensor_parallel_size=everywhere)
    elif ranks != everywhere:
        words = (
            f"torchrun has started {everywhere} ranks, and tensor_parallel_size times pipeline_parallel_size is {ranks}"
        )
        raise invalid("tensor_parallel_size", words, everywhere)
    os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    return configuration


def is_open(options: ServerOptions) -> bool:
    """Whether other machines can send requests without an API key."""
    try:
        inside = ipaddress.ip_address(options.host).is_loopback
    except ValueError:
        inside = options.host == "localhost"
    return not inside and not options.api_key


def download_model(configuration: Configuration) -> Configuration:
    """Download the model where needed; returns the configuration with its local folder as ``engine.model``.

    Raises ``PenstockError`` where it cannot be downloaded.
    """
    from penstock.frontend.hub import resolve_draft, resolve_source

    fetch = partial(resolve_source, configuration.engine.model, configuration.model, progress=sys.stderr.isatty())
    if configuration.engine.role == "router" or configuration.engine.nnodes > 1:
        folder = fetch(selection=_selection(configuration.engine, fetch))
    else:
        folder = fetch()
    draft = resolve_draft(configuration.engine.speculative_config)
    return configuration.with_engine(model=str(folder), speculative_config=draft)


def _selection(engine: EngineOptions, fetch: Callable[..., Path]) -> Selection:
    """What a router, or one of several nodes, needs of a model."""
    from penstock.frontend.downloads import NEEDED_FIRST, Selection, weight_files_of_node

    if engine.role == "router":
        return Selection(weights=False)
    if engine.engine_address:  # instances compare their checkpoints, which have to be whole for that
        return Selection()
    folder = fetch(selection=Selection(include=NEEDED_FIRST))
    return Selection(weight_filter=weight_files_of_node(folder, engine))
