"""Health, version and metrics of this process and its models."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST, Metric
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.core import PenstockError
from penstock.version import __version__

from .http.access import Access
from .http.routes import Routes
from .models.served_models import ServedModels
from .shared_result import SharedResult

if TYPE_CHECKING:  # the module imports SQLAlchemy (extra storage)
    from .storage.usage import Usage


def add_routes(routes: Routes, served_models: ServedModels, usage: Usage | None) -> None:
    """Add the routes of health, version and metrics.

    Args:
        usage: storage usage, for the metrics; None if storage is off.
    """

    async def live(_: Request) -> Response:
        return Response()

    async def health(_: Request) -> Response:
        served_models.check_health()
        return Response()

    async def ready(_: Request) -> Response:
        served_models.check()
        return Response()

    async def version(_: Request) -> Response:
        result: dict[str, Any] = {"version": __version__}
        for service in served_models:
            if engine := service.gateway.engine_pool.engine:
                result |= {"kernels": engine.fingerprint, "batch_invariant": engine.batch_invariant}
                result["weights"] = engine.weights_version
        return JSONResponse(result)

    async def compute_metrics() -> bytes:
        stored: list[Metric] = []
        if usage:
            with suppress(PenstockError):  # if the database is unavailable, requests report it
                stored = await usage.metrics()
        return await asyncio.to_thread(served_models.metrics.page, served_models.engine_stats, stored)

    page = SharedResult(compute_metrics)

    async def metrics(_: Request) -> Response:
        return Response(await page.get(), media_type=CONTENT_TYPE_LATEST)

    add = partial(routes.add, access=Access.PUBLIC)
    add("/live", live, summary="Liveness of this process")
    add("/health", health, summary="Liveness of the engines")
    add("/ready", ready, summary="Readiness: requests are accepted")
    add("/version", version, summary="Version, kernels and weights, which determine results bit for bit")
    add("/metrics", metrics, summary="Prometheus metrics")
