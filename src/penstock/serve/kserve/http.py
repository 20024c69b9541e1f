"""``/v2/…``: the protocol over HTTP, with the binary tensor data extension and Triton's own."""

from __future__ import annotations

import zlib
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.types import Message

from penstock.core import Code, Failure, PenstockError
from penstock.core.errors import invalid
from penstock.serve.body import convert, read_body, read_object
from penstock.serve.record import record_of
from penstock.serve.reply import Reply
from penstock.serve.services import LEAST_BODY
from penstock.serve.shape import Shape

from . import state
from .generate import from_fields, to_fields
from .inference import NO_MEMORY, Asked, answers, check_memory
from .model import VERSION, Answer, Model
from .registry import Registry
from .tensors import from_bytes, from_json, in_json, to_bytes

HEADER_LENGTH = "inference-header-content-length"
COMPRESSIONS = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}


class KServeShape(Shape):
    def error(self, failure: Failure) -> bytes:
        return msgspec.json.encode({"error": failure.message})

    def late_error(self, failure: Failure) -> bytes:
        return event({"error": failure.message})


SHAPE = KServeShape()


def event(found: object) -> bytes:
    return b"data: " + msgspec.json.encode(found) + b"\n\n"


class Index(msgspec.Struct):
    """What may be asked of the repository's index."""

    ready: bool = False
    """Whether only models that can be asked are to be told."""


class Change(msgspec.Struct):
    """What may be said where a model is to be loaded or unloaded."""

    parameters: dict[str, Any] | None = None


class Json(Response):
    media_type = "application/json"

    def __init__(self, found: object) -> None:
        super().__init__(msgspec.json.encode(found))


def add_routes(app: FastAPI, registry: Registry) -> None:
    """Everything below ``/v2``."""
    services = registry.services

    async def body_of(request: Request) -> bytes:
        return await _body(request, services.max_body_size, services.options.client_timeout)

    async def wish_of(request: Request) -> dict[str, Any]:
        """Of whoever looks after the server, whether its engines live or not."""
        body = await _body(request, LEAST_BODY, services.options.client_timeout)
        return read_object(body) if body else {}

    async def live() -> Response:
        return Response()

    async def ready() -> Response:
        services.check()
        return Response()

    async def server() -> Response:
        return Json(state.server())

    async def model_metadata(name: str, version: str = "") -> Response:
        return Json(registry.find(name, version).metadata())

    async def model_config(name: str, version: str = "") -> Response:
        return Json(registry.find(name, version).config())

    async def model_ready(name: str, version: str = "") -> Response:
        registry.find(name, version).check()
        return Response()

    async def model_stats(name: str, version: str = "") -> Response:
        return Json({"model_stats": [registry.counts.statistics(registry.find(name, version))]})

    async def all_stats() -> Response:
        return Json({"model_stats": [registry.counts.statistics(model) for model in registry]})

    async def infer(request: Request, name: str, version: str = "") -> Response:
        asked = parse(await body_of(request), request.headers.get(HEADER_LENGTH))
        model = registry.find(name, version)
        return InferReply(registry, model, asked, request)

    def generating(streamed: bool) -> Callable[..., Any]:
        async def generate(request: Request, name: str, version: str = "") -> Response:
            found = read_object(await body_of(request))
            model = registry.find(name, version)
            asked = from_fields(model, found)

            async def pieces() -> AsyncGenerator[bytes, None]:
                stream = answers(registry, model, asked, record_of(request.scope), streamed)
                async with aclosing(stream):
                    async for answer in stream:
                        told = await to_fields(model, asked, answer)
                        yield event(told) if streamed else msgspec.json.encode(told)

            return Reply(model.service, pieces(), SHAPE, streamed)

        return generate

    async def index(request: Request) -> Response:
        wish = convert(await wish_of(request), Index)
        return Json(state.index(registry, wish.ready))

    async def load(request: Request, name: str) -> Response:
        wish = convert(await wish_of(request), Change)
        await state.load(registry, name, wish.parameters)
        return Response()

    async def unload(request: Request, name: str) -> Response:
        wish = convert(await wish_of(request), Change)
        await state.unload(registry, name, wish.parameters)
        return Response()

    def settings(current: Callable[[], dict[str, Any]]) -> Callable[..., Any]:
        async def change(request: Request, name: str = "") -> Response:
            if name:
                registry.find(name)
            return Json(state.unchanged(current(), await wish_of(request) if request.method == "POST" else {}))

        return change

    async def memory() -> Response:
        raise PenstockError(Code.UNSUPPORTED, NO_MEMORY)

    logging = settings(state.log_settings)
    tracing = settings(state.trace_settings)

    model = "/v2/models/{name}"
    routes: Iterable[tuple[str, str, Callable[..., Any]]] = [
        ("GET", "/v2", server),
        ("GET", "/v2/health/live", live),
        ("GET", "/v2/health/ready", ready),
        ("GET", "/v2/models/stats", all_stats),
        *[
            route
            for at in (model, f"{model}/versions/{{version}}")
            for route in (
                ("GET", at, model_metadata),
                ("GET", f"{at}/config", model_config),
                ("GET", f"{at}/ready", model_ready),
                ("GET", f"{at}/stats", model_stats),
                ("POST", f"{at}/infer", infer),
                ("POST", f"{at}/generate", generating(False)),
                ("POST", f"{at}/generate_stream", generating(True)),
            )
        ],
        ("POST", "/v2/repository/index", index),
        ("POST", "/v2/repository/models/{name:path}/load", load),
        ("POST", "/v2/repository/models/{name:path}/unload", unload),
        *[
            (method, f"/v2/{kind}sharedmemory/{{action:path}}", memory)
            for method in ("GET", "POST")
            for kind in ("system", "cuda")
        ],
        *[(method, "/v2/logging", logging) for method in ("GET", "POST")],
        *[
            (method, path, tracing)
            for method in ("GET", "POST")
            for path in ("/v2/trace/setting", f"{model}/trace/setting")
        ],
    ]
    for method, path, endpoint in routes:
        app.add_api_route(path, endpoint, methods=[method], include_in_schema=False, response_class=Response)


class InferReply(Reply):
    """The answer to ``infer``: JSON, and behind it the outputs that were wanted in bytes."""

    def __init__(self, registry: Registry, model: Model, asked: Asked, request: Request) -> None:
        self._header: int | None = None

        async def pieces() -> AsyncGenerator[bytes, None]:
            found = answers(registry, model, asked, record_of(request.scope), streamed=False)
            async with aclosing(found):
                async for answer in found:
                    head, binary = await written(model, asked, answer)
                    self._header = len(head) if binary is not None else None
                    yield head + (binary or b"")

        super().__init__(model.service, pieces(), SHAPE, streamed=False)

    def _start(self, status: int, whole: bytes | None) -> Message:
        message = super()._start(status, whole)
        if self._header is not None:
            kept = [header for header in message["headers"] if header[0] != b"content-type"]
            length = (HEADER_LENGTH.encode(), str(self._header).encode())
            message["headers"] = [*kept, (b"content-type", b"application/octet-stream"), length]
        return message


def parse(body: bytes, header_length: str | None) -> Asked:
    """A request to ``infer``.

    Args:
        header_length: bytes of its JSON, where tensors in bytes follow.

    Raises ``PenstockError`` (``invalid``).
    """
    head, raw = body, b""
    if header_length is not None:
        if not header_length.isdecimal() or int(header_length) > len(body):
            raise invalid(HEADER_LENGTH, f"must be at most the {len(body)} bytes of the body, is {header_length[:20]}")
        head, raw = body[: int(header_length)], body[int(header_length) :]
    found = read_object(head)
    known = {"id": str, "parameters": dict, "inputs": list, "outputs": list}
    for name, value in found.items():
        if name not in known:
            raise invalid(name[:100], f"no such field; there is {', '.join(known)}")
        if not isinstance(value, known[name]):
            raise invalid(name, f"must be {known[name].__name__}")
    inputs, at = [], 0
    for given in found.get("inputs", ()):
        name, parameters = _named(given, "inputs")
        check_memory(name, parameters)
        size = parameters.get("binary_data_size")
        if size is None:
            inputs.append(from_json(name, given.get("datatype"), given.get("shape"), given.get("data", [])))
            continue
        if type(size) is not int or not 0 <= size <= len(raw) - at:
            raise invalid(name, f"has a binary_data_size that is none of the {len(raw) - at} bytes that are left")
        inputs.append(from_bytes(name, given.get("datatype"), given.get("shape"), raw[at : at + size]))
        at += size
    if at != len(raw):
        raise invalid("inputs", f"{len(raw) - at} bytes of the body belong to none of them")
    outputs = dict([_named(given, "outputs") for given in found.get("outputs", ())])
    for name, parameters in outputs.items():
        check_memory(name, parameters)
        if parameters.get("classification"):
            raise invalid(name, "classification is for models that classify")
    return Asked(inputs, found.get("id", ""), outputs, found.get("parameters", {}))


async def written(model: Model, asked: Asked, answer: Answer) -> tuple[bytes, bytes | None]:
    """The JSON of an answer, and the bytes behind it; None where nothing was wanted so."""
    default, raw = bool(asked.parameters.get("binary_data_output", False)), []
    outputs = []
    for tensor in answer.outputs:
        told: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        if asked.outputs.get(tensor.name, {}).get("binary_data", default):
            raw.append(to_bytes(tensor))
            told["parameters"] = {"binary_data_size": len(raw[-1])}
        else:
            told["data"] = await in_json(tensor)
        outputs.append(told)
    found: dict[str, Any] = {"id": asked.id} if asked.id else {}
    found |= {"model_name": model.name, "model_version": VERSION, "outputs": outputs}
    return msgspec.json.encode(found), b"".join(raw) if raw else None


async def _body(request: Request, most: int, patience: float) -> bytes:
    body = await read_body(request, most, patience)
    encoding = request.headers.get("content-encoding", "identity").lower()
    return body if encoding == "identity" else decompressed(body, encoding, most)


def decompressed(body: bytes, encoding: str, most: int) -> bytes:
    """Raises ``PenstockError`` (``invalid``) for what is not compressed so, and where too much comes of it."""
    if encoding not in COMPRESSIONS:
        raise PenstockError(
            Code.UNSUPPORTED,
            f"content-encoding: {encoding[:20]!r} is none of {', '.join(COMPRESSIONS)}",
            "content-encoding",
        )
    reader = zlib.decompressobj(COMPRESSIONS[encoding])
    try:
        found = reader.decompress(body, most + 1)
    except zlib.error as error:
        raise invalid("body", f"is not compressed as {encoding}: {error}") from error
    if len(found) > most:
        raise PenstockError(Code.TOO_LARGE, f"body: must have at most {most} bytes", "body", most)
    return found


def _named(given: Any, where: str) -> tuple[str, dict[str, Any]]:
    """The name and the parameters of an input or output."""
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise invalid(where, "holds something without a name")
    parameters = given.get("parameters", {})
    if not isinstance(parameters, dict):
        raise invalid(given["name"], "has parameters that are no object")
    return given["name"], parameters
