"""The Ray Serve application: ``serve run penstock.ray:app model=…``."""

# Ray Serve reads the annotation of ``app``'s parameter: no "from __future__ import annotations" here.
import json
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from ray import serve
from starlette.types import ASGIApp

from penstock.config.options import Configuration
from penstock.core.errors import invalid

from .configuration import configuration_of, deployment_options, with_cores
from .replica import Replica

POLICY = "penstock.ray.autoscaling:Autoscaling"


def _parse_json(value: Any) -> Any:
    """Parse an object given as JSON on the command line."""
    return json.loads(value) if isinstance(value, str) else value


class Arguments(BaseModel):
    """Arguments of the application: these fields, and the options of ``penstock serve`` by name."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    min_replicas: Annotated[int, Field(ge=0)] = 1
    """Minimum number of replicas."""
    max_replicas: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of replicas; None: ``min_replicas``, without autoscaling."""
    target_ongoing_requests: Annotated[float, Field(gt=0)] | None = None
    """Autoscaling target: number of open requests per replica; None: half of ``max_num_seqs``."""
    target_kv_cache_usage: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Autoscaling target: share of the KV cache that running and queued sequences use, from 0 to 1."""
    num_cpus: Annotated[float, Field(gt=0)] | None = None
    """Number of cores that Ray reserves for a replica, also the number of engine threads; None: ``threads`` (or 1) per
    rank."""
    num_gpus: Annotated[float, Field(ge=0)] = 0
    """Number of GPUs that Ray reserves for a replica."""
    deployment_config: Annotated[dict[str, Any], BeforeValidator(_parse_json)] = {}
    """Options of the Serve deployment. They override the options derived from the other arguments."""


def app(args: Arguments) -> serve.Application:
    """Build the application. Raises ``PenstockError`` for unknown and invalid options, and for options that Ray
    controls."""
    given = {name: value for name, value in args if name not in Arguments.model_fields}
    configuration, num_cpus = with_cores(configuration_of(given), args.num_cpus)
    options = {
        "name": "Penstock",
        **deployment_options(configuration),
        "ray_actor_options": {"num_cpus": num_cpus, "num_gpus": args.num_gpus},
        **_scaling(args, configuration),
    }
    for name, value in args.deployment_config.items():
        if isinstance(value, dict) and isinstance(options.get(name), dict):
            options[name] = {**options[name], **value}
        else:
            options[name] = value
    return serve.deployment(serve.ingress()(Penstock), **options).bind(configuration)


def _scaling(args: Arguments, configuration: Configuration) -> dict[str, Any]:
    maximum = max(args.min_replicas, 1) if args.max_replicas is None else args.max_replicas
    if maximum < args.min_replicas:
        message = f"must be at least min_replicas ({args.min_replicas}), is {maximum}"
        raise invalid("max_replicas", message, args.min_replicas)
    if maximum == args.min_replicas:
        return {"num_replicas": maximum}
    config = {
        "min_replicas": args.min_replicas,
        "max_replicas": maximum,
        "target_ongoing_requests": args.target_ongoing_requests or configuration.engine.max_num_seqs / 2,
        "policy": {"policy_function": POLICY, "policy_kwargs": {"target_kv_cache_usage": args.target_kv_cache_usage}},
    }
    return {"autoscaling_config": config}


class Penstock:
    """Ray Serve deployment: a replica with the methods that Ray Serve calls."""

    async def __init__(self, configuration: Configuration) -> None:  # type: ignore[misc] # Ray Serve awaits it
        self._replica = Replica(configuration)
        await self._replica.start()

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._replica.app

    async def check_health(self) -> None:
        self._replica.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return self._replica.autoscaling_stats

    async def __del__(self) -> None:
        await self._replica.close()
