"""Health, version and metrics of this process and its models."""

from __future__ import annotations

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

if TYPE_CHECKING:  # what it imports may not be installed
    from .storage.usage import Usage


def add_routes(routes: Routes, served_models: ServedModels, usage: Usage | None) -> None:
    """Add them.

    Args:
        usage: of what clients have stored, for the metrics; None where nothing is kept.
    """

    async def live(_: Request) -> Response:
        return Response()

    async def health(_: Request) -> Response:
        served_models.check_alive()
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

    async def metrics(_: Request) -> Response:
        stored: list[Metric] = []
        if usage:
            with suppress(PenstockError):  # where the database does not answer, which requests tell
                stored = await usage.metrics()
        page = served_models.metrics.page(served_models.engine_stats, stored)
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    add = partial(routes.add, access=Access.PUBLIC)
    add("/live", live, summary="This process answers")
    add("/health", health, summary="The engine lives")
    add("/ready", ready, summary="Requests are accepted")
    add("/version", version, summary="Version, and the kernels and weights that decide a result's bits")
    add("/metrics", metrics, summary="Prometheus metrics")
