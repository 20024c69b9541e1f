"""Endpoints between routers and instances, and the status of a router (``penstock pd status``)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import cache

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.cluster.http import INSTANCE_PATH, REGISTER_PATH, EngineInfo, InstanceInfo, RegisterRequest
from penstock.cluster.signature import HEADER, verify
from penstock.config.addresses import reachable
from penstock.config.options import Configuration
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.engine.executor.cluster_secret import read_secret
from penstock.version import __version__

from ..http.access import Access
from ..http.body import read_body
from ..http.openapi import OBJECT, operation, reference
from ..http.routes import Endpoint, Route, Routes
from ..http.status import STATUS
from ..models.served_models import ServedModels
from .openai.schema import ErrorResponse

MAX_BODY = 2**16
"""Maximum size of a registration, bytes."""
STATUS_PATH = "/penstock/instances"
"""Path of a router (GET): the instances of the router, with their statistics."""
NUMBER_PATH = "/registered_number"
"""Path of a router (GET): number of ready instances by role, as in FastDeploy's router."""
Register = Callable[[str, tuple[str, ...], bool], Awaitable[None]]


def add_routes(routes: Routes, served_models: ServedModels, configuration: Configuration, register: Register) -> None:
    """Add the routes of instances and routers.

    Args:
        register: called with the name of an instance, the addresses of its engines, and True to unregister it.
    """
    engine = configuration.engine

    @cache
    def secret() -> bytes:
        return read_secret(engine.cluster_secret_file, make=True)

    async def instance_info(_: Request, body: bytes) -> Response:
        reports = [report for service in served_models for report in service.gateway.engine_pool.reports]
        engines = tuple(EngineInfo(one.engine_address, one.role) for one in reports if one.engine_address)
        return JSONResponse(msgspec.to_builtins(InstanceInfo(__version__, engines)))

    async def register_instance(request: Request, body: bytes) -> Response:
        if engine.role != "router":
            raise PenstockError(Code.UNSUPPORTED, "this server is not a router; start one with --role router")
        try:
            registration = msgspec.json.decode(body, type=RegisterRequest)
        except msgspec.MsgspecError as error:
            message = f"is not a registration request of version {__version__}, which the router runs: {error}"
            raise invalid("body", message) from error
        host = request.client.host if request.client else ""
        addresses = tuple(reachable(one.address, host) for one in registration.engines)
        await register(registration.name, addresses, registration.leaves)
        return JSONResponse({})

    def signed(path: str, endpoint: Callable[[Request, bytes], Awaitable[Response]]) -> Endpoint:
        """Allow only requests signed with the cluster secret. Errors are ``{"message": …}``, as routers expect."""

        async def checked(request: Request) -> Response:
            try:
                if not engine.engine_address and engine.role != "router":
                    message = "routers cannot reach this server's engine; start it with --engine-address or --role"
                    raise PenstockError(Code.UNSUPPORTED, message)
                body = await read_body(request, MAX_BODY, served_models.options.client_timeout)
                verify(await asyncio.to_thread(secret), path, body, request.headers.get(HEADER, ""))
                return await endpoint(request, body)
            except PenstockError as error:
                return JSONResponse({"message": error.failure.message}, STATUS[error.failure.code])

        return checked

    async def status(_: Request) -> Response:
        result = [one for service in served_models for one in service.gateway.engine_pool.instances_status]
        return JSONResponse({"version": __version__, "instances": result})

    async def registered_number(_: Request) -> Response:
        found = [one for service in served_models for one in service.gateway.engine_pool.instances_status]
        ready = [one["role"] for one in found if one["state"] == "ready"]
        return JSONResponse({role: ready.count(role) for role in ("mixed", "prefill", "decode")})

    for method, path, endpoint in (("GET", INSTANCE_PATH, instance_info), ("POST", REGISTER_PATH, register_instance)):
        routes.append(Route(path, signed(path, endpoint), access=Access.SIGNED, methods=[method]))
    described = operation(OBJECT, reference(ErrorResponse))
    summary = "Instances of a router, with their statistics"
    routes.add(STATUS_PATH, status, access=Access.PRIVATE, summary=summary, described=described)
    if engine.role == "router":
        summary = "Number of ready instances by role"
        routes.add(NUMBER_PATH, registered_number, access=Access.PRIVATE, summary=summary, described=described)
