"""``penstock serve``: start a server."""

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
from .flags import TITLES, add_model, add_options, configure
from .served_models import served_models

if TYPE_CHECKING:
    from penstock.frontend.downloads import Selection

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--service-json", metavar="FILE", help="EAS service description of a BladeLLM service")
    parser.add_argument("--model-repository", metavar="FOLDER", help="Triton model repository of TensorRT-LLM models")
    add_options(parser, tuple(TITLES))


def expand_arguments(arguments: list[str]) -> list[str]:
    """Replace ``--service-json`` and ``--model-repository`` by the arguments derived from them."""
    return model_repository.expand_arguments(service_json.expand_arguments(arguments))


def run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    from penstock.serve.process.server_record import RecordFile
    from penstock.serve.process.supervisor import Supervisor

    configuration = with_role(with_rank_tables(configure(args, "serve").configuration))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        configuration = _with_torchrun(configuration)
        if int(os.environ["LOCAL_RANK"]):
            return 0  # the process of local rank 0 starts all ranks
    if configuration.engine.node_rank:
        return run_node(configuration)
    if configuration.engine.nnodes > 1 and configuration.server.models:
        raise PenstockError(
            Code.UNSUPPORTED, "models: a server on several nodes serves one model: unset models", "models"
        )
    if is_open(configuration.server):
        warning = (
            "anyone with network access to %s on this machine can send requests: set --api-key or --host 127.0.0.1"
        )
        logger.warning(warning, configuration.server.host)
    entries, engine = served_models(configuration), configuration.engine
    with RecordFile(
        models={entry.name: "starting" if entry.required else "unloaded" for entry in entries},
        role=engine.role,
        device=engine.device,
        drain_timeout=engine.drain_timeout,
    ) as record:
        models = [
            msgspec.structs.replace(entry, configuration=download_model(entry.configuration))
            if entry.required
            else entry
            for entry in entries
        ]

        async def serve() -> int:
            return await Supervisor(configuration, models, download_model, started, record).run()

        return asyncio.run(serve())


def with_role(configuration: Configuration) -> Configuration:
    """Set options that depend on ``role``: prefill and decode instances, and instances that register with a router, get
    an ``engine_address``.

    Raises ``PenstockError`` for contradictory options.
    """
    engine, server = configuration.engine, configuration.server
    router = engine.role == "router"
    refused = {
        "router_address": router and server.router_address and "a router does not register with other routers",
        "engine_address": router and engine.engine_address and "a router has no engine",
        "decode_instances": not router and server.decode_instances and "requires --role router",
        "prefill_instances": engine.role in ("mixed", "prefill")
        and server.prefill_instances
        and "requires --role router or decode",
        "model_idle_timeout": server.model_idle_timeout
        and (engine.role != "mixed" or engine.engine_address or server.router_address or engine.nnodes > 1)
        and "routers, their instances, and servers on several nodes do not unload models: omit it",
        "models": server.models
        and (engine.role != "mixed" or engine.engine_address or server.router_address)
        and "routers and their instances have one model; start a separate deployment per model",
    }
    for name, message in refused.items():
        if message:
            raise invalid(name, str(message))
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
    """Run a node other than node 0, which has no server, until SIGTERM."""
    from penstock.engine.executor import node_process

    configuration = download_model(configuration)

    def end(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, end)
    node_process.run_node(configuration.engine, configuration.log)
    return 0


def _with_torchrun(configuration: Configuration) -> Configuration:
    """Set the numbers of ranks and nodes that ``torchrun`` has started, unless options set them.

    Raises ``PenstockError`` (``invalid``) if options contradict them, or nodes have different numbers of processes.
    """
    here, everywhere = (int(os.environ[name]) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    nnodes, engine = everywhere // here, configuration.engine
    if everywhere % here:
        message = f"torchrun started {everywhere} ranks, {here} of them on this node: use the same number on each node"
        raise invalid("nnodes", message)
    if nnodes > 1:
        if engine.nnodes not in (1, nnodes):
            raise invalid("nnodes", f"is {engine.nnodes}, but torchrun started {nnodes} nodes", nnodes)
        used = int(os.environ["MASTER_PORT"])  # torchrun listens on this port
        configuration = configuration.with_engine(
            nnodes=nnodes,
            node_rank=int(os.environ["GROUP_RANK"]),
            master_addr=os.environ["MASTER_ADDR"],
            master_port=engine.master_port + (engine.master_port == used),
        )
    if (ranks := engine.tensor_parallel_size * engine.pipeline_parallel_size) == 1:
        configuration = configuration.with_engine(tensor_parallel_size=everywhere)
    elif ranks != everywhere:
        message = (
            f"tensor_parallel_size times pipeline_parallel_size is {ranks}, but torchrun started {everywhere} ranks"
        )
        remedy = "make both equal (torchrun --nproc-per-node and --nnodes)"
        raise invalid("tensor_parallel_size", f"{message}: {remedy}", everywhere)
    os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    return configuration


def is_open(options: ServerOptions) -> bool:
    """True if other machines can send requests without an API key."""
    try:
        is_local = ipaddress.ip_address(options.host).is_loopback
    except ValueError:
        is_local = options.host == "localhost"
    return not is_local and not options.api_key


def download_model(configuration: Configuration) -> Configuration:
    """Download the model if needed, and set ``engine.model`` to its local folder.

    Raises ``PenstockError`` if it cannot be downloaded.
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
    """Files of a model that a router, or one of several nodes, needs."""
    from penstock.frontend.downloads import NEEDED_FIRST, Selection, weight_files_of_node

    if engine.role == "router":
        return Selection(weights=False)
    if engine.engine_address:  # instances compare their checkpoints, which must be complete
        return Selection()
    folder = fetch(selection=Selection(include=NEEDED_FIRST))
    return Selection(weight_filter=weight_files_of_node(folder, engine))
