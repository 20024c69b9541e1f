"""The options of a deployment: ours by name, as in a configuration file, less those that are Ray's to decide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.checkpoint.engine_config import engine_defaults
from penstock.config.options import Configuration, EngineOptions
from penstock.config.profiles import load
from penstock.config.profiles.vllm import DEFAULT_PROFILE
from penstock.config.settings import did_you_mean, settings
from penstock.config.sources import read
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.engine.service.launcher import EXIT_TIMEOUT

LISTENS = "Ray Serve's proxies listen for a deployment; set their http_options"
ONE_MODEL = "a deployment has one model; deploy an application for each"
REFUSED = {
    **dict.fromkeys("host port health_port metrics_port ssl_certfile ssl_keyfile max_header_size".split(), LISTENS),
    "timeout_keep_alive": LISTENS,
    "grpc_port": "Ray Serve's proxies pass on HTTP; KServe's gRPC needs penstock serve",
    "api_server_count": "a replica is one API process; ask for more replicas",
    **dict.fromkeys("models model_control_mode load_model".split(), ONE_MODEL),
    "allow_runtime_lora_updating": "a request reaches one replica, and the others would lack the adapter; "
    "give lora_modules",
    **dict.fromkeys(
        ("server_dev_mode", "allowed_local_weights_path"),
        "a request reaches one replica, not all",
    ),
    **dict.fromkeys(
        "role engine_address router_address prefill_instances decode_instances global_rank_table rank_table "
        "node_ports".split(),
        "separate prefill and decode instances are servers; start them with penstock serve",
    ),
    "allow_shared_memory": "a request may come from another machine, and reaches any replica",
}
"""Options that a deployment cannot have, with the reason."""


def configuration_of(given: Mapping[str, Any]) -> Configuration:
    """The configuration of a deployment.

    Args:
        given: options by name, with ``_`` or ``-``, and ``config``, a YAML file of options. Names of vLLM, or of the
            system that ``compat`` names, are accepted, too.

    Raises ``PenstockError``: ``invalid`` for unknown names and wrong values, ``unsupported`` for what Ray decides.
    """
    named = {name.replace("-", "_"): value for name, value in given.items() if value is not None}
    file = named.pop("config", None)
    profile = load(str(named.get("compat", ""))) or DEFAULT_PROFILE
    aliases = {name: _text(named.pop(name)) for name in list(named) if name in profile.flags}
    for name in named:
        if name not in settings():
            raise invalid(name, f"no such option{did_you_mean(name, settings())}")
    resolved = read(named, file, profile=profile, aliases=aliases, model_defaults=engine_defaults)
    for name, reason in REFUSED.items():
        source = resolved.sources[name]
        if source != "default" and not source.startswith("the profile") and source != "api_key is given":
            raise PenstockError(Code.UNSUPPORTED, f"{source} has no meaning on Ray: {reason}", name)
    configuration = resolved.configuration
    if resolved.sources["cpu_binding"] == "default":  # another replica on the node would take the same cores
        configuration = configuration.with_engine(cpu_binding="none")
    return configuration


def with_cores(configuration: Configuration, num_cpus: float | None) -> tuple[Configuration, float]:
    """The configuration with as many threads as its replica has cores, and the number of cores that the replica's own
    process reserves: all, or, with a placement group, those of the group's first bundle.

    Args:
        num_cpus: cores of a replica; None is a core for each thread, or one core for each rank.
    """
    engine = configuration.engine
    ranks = engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.data_parallel_size
    if num_cpus is None:
        num_cpus = float(ranks * max(engine.threads, 1))
    threads = engine.threads or max(1, int(num_cpus) // ranks)
    return configuration.with_engine(threads=threads), float(threads) if _is_placed(engine) else num_cpus


def deployment_options(configuration: Configuration) -> dict[str, Any]:
    """Options of a Ray Serve deployment: what a replica accepts is what its engine's queue has room for, and what it
    is given to stop is ``drain_timeout``. With the executor ``ray`` it has a placement group for the engine's ranks, of
    which it is in the first bundle itself."""
    engine = configuration.engine
    placement: dict[str, Any] = {}
    if _is_placed(engine):
        from penstock.engine.executor.ray_executor import bundle_of

        bundles = [bundle_of(engine)] * (engine.tensor_parallel_size * engine.pipeline_parallel_size)
        placement = {"placement_group_bundles": bundles, "placement_group_strategy": "PACK"}
    open_requests = (engine.max_num_seqs + engine.max_waiting) * engine.data_parallel_size
    return {
        **placement,
        "max_ongoing_requests": open_requests,
        "max_queued_requests": max(engine.max_waiting, 1),
        "graceful_shutdown_timeout_s": engine.drain_timeout + EXIT_TIMEOUT,
    }


def _is_placed(engine: EngineOptions) -> bool:
    """Whether ranks are placed on several nodes."""
    several = engine.tensor_parallel_size * engine.pipeline_parallel_size > 1
    return several and engine.distributed_executor_backend == "ray"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
