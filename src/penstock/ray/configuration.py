"""Options of a deployment: Penstock's options, as in a configuration file, except those that Ray controls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.checkpoint.engine_config import engine_defaults
from penstock.config.options import Configuration, EngineOptions
from penstock.config.profiles import load
from penstock.config.profiles.vllm import DEFAULT_PROFILE
from penstock.config.settings import settings
from penstock.config.sources import read
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.core.spelling import did_you_mean
from penstock.engine.service.launcher import EXIT_TIMEOUT

LISTENS = "Ray Serve's proxies listen for a deployment; set their http_options"
ONE_MODEL = "a deployment has one model; deploy one application per model"
REFUSED = {
    **dict.fromkeys("host port health_port metrics_port ssl_certfile ssl_keyfile max_header_size".split(), LISTENS),
    "timeout_keep_alive": LISTENS,
    "grpc_port": "Ray Serve's proxies forward HTTP only; use penstock serve for KServe's gRPC",
    "api_server_count": "a replica has one API process; increase the number of replicas",
    **dict.fromkeys("models model_control_mode load_model".split(), ONE_MODEL),
    "allow_runtime_lora_updating": "a request would load the adapter in one replica only; set lora_modules",
    **dict.fromkeys(("server_dev_mode", "allowed_local_weights_path"), "a request reaches one replica only"),
    **dict.fromkeys(
        "role engine_address router_address prefill_instances decode_instances global_rank_table rank_table "
        "node_ports".split(),
        "use penstock serve for separate prefill and decode instances",
    ),
    "allow_shared_memory": "requests from any machine can reach any replica",
}
"""Options that must not be set in a deployment, with the reason or the alternative."""


def configuration_of(given: Mapping[str, Any]) -> Configuration:
    """Resolve the configuration of a deployment.

    Args:
        given: options by name, with ``_`` or ``-``, and ``config``, a YAML file of options. Names of vLLM, or of the
            system ``compat``, are accepted, too.

    Raises ``PenstockError``: ``invalid`` for unknown names and invalid values, ``unsupported`` for options of
    ``REFUSED``.
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
    if resolved.sources["cpu_binding"] == "default":  # replicas on the same node would bind to the same cores
        configuration = configuration.with_engine(cpu_binding="none")
    return configuration


def with_cores(configuration: Configuration, num_cpus: float | None) -> tuple[Configuration, float]:
    """Set ``threads`` to the number of cores per rank. Also returns the number of cores to reserve for the replica's
    process: all cores of the replica, or with a placement group the cores of its first bundle.

    Args:
        num_cpus: number of cores of a replica; None: one core per thread, or per rank if ``threads`` is 0.
    """
    engine = configuration.engine
    ranks = engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.data_parallel_size
    if num_cpus is None:
        num_cpus = float(ranks * max(engine.threads, 1))
    threads = engine.threads or max(1, int(num_cpus) // ranks)
    return configuration.with_engine(threads=threads), float(threads) if _is_placed(engine) else num_cpus


def deployment_options(configuration: Configuration) -> dict[str, Any]:
    """Options of a Ray Serve deployment. A replica accepts as many requests as its engine runs and queues, and may
    take ``drain_timeout`` to stop. With the executor ``ray``, it has a placement group with one bundle per rank of the
    engine, and runs in the first bundle."""
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
    """True if Ray places the ranks, possibly on several nodes."""
    several = engine.tensor_parallel_size * engine.pipeline_parallel_size > 1
    return several and engine.distributed_executor_backend == "ray"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
