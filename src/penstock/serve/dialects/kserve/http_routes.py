"""``/v2/…``: the KServe protocol over HTTP, with the binary tensor data extension and Triton's extensions."""

from __future__ import annotations

import functools
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from penstock.core import Code, Failure, PenstockError
from penstock.core.errors import invalid
from penstock.core.numbers import read_decimal
from penstock.serve.http.access import Access
from penstock.serve.http.body import RequestBody, check_elements, convert, read_object
from penstock.serve.http.error_format import ErrorFormat
from penstock.serve.http.openapi import OBJECT, operation
from penstock.serve.http.reply import Json, Reply, encode, event
from penstock.serve.http.request_record import record_of
from penstock.serve.http.routes import Endpoint, Routes
from penstock.serve.http.unknown_fields import UnknownFields
from penstock.serve.models.served_models import MIN_BODY_SIZE

from . import server_state as state
from .generate_extension import from_fields, to_fields
from .inference import InferenceRequest, run_inference
from .model import VERSION, Model, ModelResponse
from .repository import ModelRepository
from .shared_memory import NO_CUDA, SharedMemory, in_memory
from .tensors import from_bytes, from_json, in_json, to_bytes

T = TypeVar("T", bound=RequestBody)
V = TypeVar("V")

HEADER_LENGTH = "inference-header-content-length"
SYSTEM, CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
COMPRESSIONS = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}


class KServeErrorFormat(ErrorFormat):
    dialect = "kserve"

    def document(self, failure: Failure) -> object:
        return {"error": failure.message}


ERROR_FORMAT = KServeErrorFormat()


class IndexRequest(RequestBody):
    """Body of ``/v2/repository/index``."""

    ready: bool = False
    """List only ready models."""


class LoadRequest(RequestBody, forbid_unknown_fields=True):
    """Body of a request to load or unload a model."""

    parameters: dict[str, Any] | None = None


class RegionRequest(RequestBody, forbid_unknown_fields=True):
    """Body of a request to register a region of shared memory."""

    key: str
    byte_size: int
    offset: int = 0


class Endpoints:
    """The endpoints of the protocol. Each is called with the request and the path parameters."""

    def __init__(self, repository: ModelRepository) -> None:
        self._repository = repository

    def _memory_of(self, request: Request) -> SharedMemory:
        """The shared memory regions of a client. Web pages of other origins may not use them."""
        check = functools.partial(request.app.state.origins.check, request.scope, Access.PRIVATE)
        return self._repository.memory.of_client(record_of(request.scope).tenant, check)

    async def _read(
        self, request: Request, max_size: int, parse: Callable[[bytes, bytes], V], header_length: str | None = None
    ) -> V:
        """Read a body, decompress it, and return ``parse(json, binary_tensors)``."""
        body = await self._repository.served_models.receive(request, max_size)
        encoding = request.headers.get("content-encoding", "identity").lower()

        def work() -> tuple[int, V]:
            head, raw = _split(body if encoding == "identity" else decompress(body, encoding, max_size), header_length)
            return check_elements(head) + len(raw), parse(head, raw)

        size = len(body) if encoding == "identity" else max_size
        return await self._repository.served_models.parse(record_of(request.scope), size, work)

    async def _settings_body_of(self, request: Request) -> dict[str, Any]:
        """Read the JSON body of an administrative request. Such requests are accepted without a running engine."""
        return await self._read(request, MIN_BODY_SIZE, lambda body, _: read_object(body or b"{}"))

    async def _change_of(self, request: Request, schema: type[T]) -> T:
        """Parse a request that changes the server. Unknown fields are rejected, so that no other change is made."""
        return convert(await self._settings_body_of(request), schema, UnknownFields(strict=True), "")

    async def live(self, _: Request) -> Response:
        return Response()

    async def ready(self, _: Request) -> Response:
        self._repository.served_models.check()
        return Response()

    async def server(self, _: Request) -> Response:
        return Json(state.server_metadata())

    async def model_metadata(self, _: Request, name: str, version: str = "") -> Response:
        return Json(self._repository.find(name, version).metadata())

    async def model_config(self, _: Request, name: str, version: str = "") -> Response:
        return Json(self._repository.find(name, version).config())

    async def model_ready(self, _: Request, name: str, version: str = "") -> Response:
        try:
            self._repository.find(name, version).check()
        except PenstockError as error:  # the status is 400 for any reason, as in Triton
            raise invalid(name[:100], f"is not ready: {error.failure.message}") from error
        return Response()

    async def model_stats(self, _: Request, name: str, version: str = "") -> Response:
        return Json({"model_stats": await self._repository.counts.statistics([self._repository.find(name, version)])})

    async def all_stats(self, _: Request) -> Response:
        return Json({"model_stats": await self._repository.counts.statistics([*self._repository])})

    async def infer(self, request: Request, name: str, version: str = "") -> Response:
        length, unknown = request.headers.get(HEADER_LENGTH), record_of(request.scope).unknown
        memory = self._memory_of(request)
        infer_request = await self._read(
            request,
            self._repository.served_models.max_text_size,
            lambda head, raw: parse(head, raw, memory, unknown),
            length,
        )
        model = self._repository.find(name, version)
        return InferReply(self._repository, model, infer_request, request, memory)

    async def generate(self, request: Request, name: str, version: str = "") -> Response:
        """Respond once, or for ``generate_stream`` with a stream of responses."""
        model, record = self._repository.find(name, version), record_of(request.scope)
        streamed = request.url.path.endswith("_stream")
        infer_request = await self._read(
            request,
            self._repository.served_models.max_text_size,
            lambda body, _: from_fields(model, read_object(body), record.unknown),
        )

        async def chunks() -> AsyncGenerator[bytes, None]:
            stream = run_inference(self._repository, model, infer_request, record, streamed)
            async with aclosing(stream):
                async for response in stream:
                    output = await to_fields(model, infer_request, response)
                    yield event(output) if streamed else encode(output)

        return Reply(model.service, chunks(), ERROR_FORMAT, streamed)

    async def index(self, request: Request) -> Response:
        body = convert(await self._settings_body_of(request), IndexRequest, record_of(request.scope).unknown, "")
        return Json(state.repository_index(self._repository, body.ready))

    async def load(self, request: Request, name: str) -> Response:
        body = await self._change_of(request, LoadRequest)
        await state.load_model(self._repository, name, body.parameters)
        return Response()

    async def unload(self, request: Request, name: str) -> Response:
        body = await self._change_of(request, LoadRequest)
        await state.unload_model(self._repository, name, body.parameters)
        return Response()

    async def logging(self, request: Request) -> Response:
        settings = await self._settings_body_of(request) if request.method == "POST" else {}
        return Json(state.log_settings(self._repository, settings))

    async def tracing(self, request: Request, name: str = "") -> Response:
        settings = await self._settings_body_of(request) if request.method == "POST" else {}
        return Json(state.trace_settings(self._repository, settings, name))

    async def memory_status(self, request: Request, name: str = "") -> Response:
        return Json(self._memory_of(request).status(name))

    async def register(self, request: Request, name: str) -> Response:
        body = await self._change_of(request, RegionRequest)
        self._memory_of(request).register(name, body.key, body.offset, body.byte_size)
        return Response()

    async def unregister(self, request: Request, name: str = "") -> Response:
        self._memory_of(request).unregister(name)
        return Response()

    async def no_cuda_memory(self, _: Request, name: str = "") -> Response:
        raise PenstockError(Code.UNSUPPORTED, NO_CUDA)

    async def cuda_status(self, _: Request) -> Response:
        return Json([])

    async def cuda_unregister(self, _: Request, name: str = "") -> Response:
        return Response()  # nothing to do: CUDA regions cannot be registered


MODEL, REGION = "/v2/models/{name}", "/region/{name}"
STATUS = f"{REGION}/status"
ENDPOINTS: Sequence[tuple[str, str, Callable[..., Awaitable[Response]], str]] = [
    ("GET", "/v2", Endpoints.server, "Server metadata"),
    ("GET", "/v2/health/live", Endpoints.live, "Liveness of this process"),
    ("GET", "/v2/health/ready", Endpoints.ready, "Readiness of all models"),
    ("GET", "/v2/models/stats", Endpoints.all_stats, "Statistics of all models"),
    *[
        route
        for at in (MODEL, f"{MODEL}/versions/{{version}}")
        for route in (
            ("GET", at, Endpoints.model_metadata, "Inputs and outputs of a model"),
            ("GET", f"{at}/config", Endpoints.model_config, "Configuration of a model"),
            ("GET", f"{at}/ready", Endpoints.model_ready, "Readiness of a model"),
            ("GET", f"{at}/stats", Endpoints.model_stats, "Statistics of a model"),
            ("POST", f"{at}/infer", Endpoints.infer, "Infer from tensors"),
            ("POST", f"{at}/generate", Endpoints.generate, "Generate from a JSON object"),
            ("POST", f"{at}/generate_stream", Endpoints.generate, "Generate from a JSON object, streamed"),
        )
    ],
    ("POST", "/v2/repository/index", Endpoints.index, "List the models of the repository"),
    ("POST", "/v2/repository/models/{name:path}/load", Endpoints.load, "Load a model"),
    ("POST", "/v2/repository/models/{name:path}/unload", Endpoints.unload, "Unload a model"),
    *[("GET", SYSTEM + at, Endpoints.memory_status, "Regions of system shared memory") for at in ("/status", STATUS)],
    ("POST", f"{SYSTEM}{REGION}/register", Endpoints.register, "Register a region of system shared memory"),
    *[
        ("POST", f"{SYSTEM}{at}/unregister", Endpoints.unregister, "Unregister regions of system shared memory")
        for at in ("", REGION)
    ],
    ("GET", f"{CUDA}/status", Endpoints.cuda_status, "Regions of CUDA shared memory (always empty)"),
    *[
        (method, CUDA + at, Endpoints.no_cuda_memory, "Regions of CUDA shared memory (not supported)")
        for method, at in (("GET", STATUS), ("POST", f"{REGION}/register"))
    ],
    *[
        ("POST", f"{CUDA}{at}/unregister", Endpoints.cuda_unregister, "Unregister regions of CUDA shared memory")
        for at in ("", REGION)
    ],
    *[(method, "/v2/logging", Endpoints.logging, "Log settings") for method in ("GET", "POST")],
    *[
        (method, path, Endpoints.tracing, "Trace settings")
        for method in ("GET", "POST")
        for path in ("/v2/trace/setting", f"{MODEL}/trace/setting")
    ],
]
"""Method, path, endpoint and summary of each route."""


def add_routes(routes: Routes, repository: ModelRepository) -> None:
    """Add all routes under ``/v2``."""
    routes.error_formats.add(ERROR_FORMAT, "/v2")
    endpoints = Endpoints(repository)
    for method, path, endpoint, summary in ENDPOINTS:
        schema = OBJECT if path.endswith(WITH_BODY) else None
        described = operation(schema, FAILED, schema, path.endswith("_stream"))
        called, access = _with_parameters(endpoint, endpoints), _access_of(method, path)
        routes.add(path, called, access=access, method=method, summary=summary, described=described)


def _access_of(method: str, path: str) -> Access:
    """Access class of a route. Shared memory regions belong to one API key; log and trace settings are global."""
    if path.startswith("/v2/health/"):
        return Access.PUBLIC
    if path.startswith((SYSTEM, CUDA)):
        return Access.PRIVATE
    if path == "/v2/logging" or path.endswith("/trace/setting"):
        return Access.CONTROL if method == "POST" else Access.PRIVATE
    return Access.CONTROL if path.endswith(("/load", "/unload")) else Access.INFERENCE


def _with_parameters(endpoint: Callable[..., Awaitable[Response]], endpoints: Endpoints) -> Endpoint:
    """Make an endpoint that passes the path parameters as keyword arguments."""

    @functools.wraps(endpoint)
    async def called(request: Request) -> Response:
        return await endpoint(endpoints, request, **request.path_params)

    return called


FAILED = {"type": "object", "properties": {"error": {"type": "string"}}}
WITH_BODY = ("/infer", "/generate", "/generate_stream")


class InferReply(Reply):
    """The response to ``infer``: JSON, followed by the outputs requested as binary data."""

    def __init__(
        self,
        repository: ModelRepository,
        model: Model,
        infer_request: InferenceRequest,
        request: Request,
        memory: SharedMemory,
    ) -> None:
        self._header: int | None = None

        async def chunks() -> AsyncGenerator[bytes, None]:
            stream = run_inference(repository, model, infer_request, record_of(request.scope), streamed=False)
            async with aclosing(stream):
                async for response in stream:
                    head, binary = await encode_response(model, infer_request, response, memory)
                    self._header = len(head) if binary is not None else None
                    yield head + (binary or b"")

        super().__init__(model.service, chunks(), ERROR_FORMAT, streamed=False)

    def _start(self, status: int, document: bytes | None) -> Message:
        message = super()._start(status, document)
        if self._header is not None:
            headers = [header for header in message["headers"] if header[0] != b"content-type"]
            length = (HEADER_LENGTH.encode(), str(self._header).encode())
            message["headers"] = [*headers, (b"content-type", b"application/octet-stream"), length]
        return message


def _split(body: bytes, header_length: str | None) -> tuple[bytes, bytes]:
    """Split a body into its JSON and the binary tensors after it.

    Args:
        header_length: size of the JSON in bytes, as text; None: the whole body.

    Raises ``PenstockError`` (``invalid``) if ``header_length`` is not a number, or exceeds the size of the body.
    """
    if header_length is None:
        return body, b""
    length = read_decimal(header_length, len(body))
    if length is None:
        raise invalid(HEADER_LENGTH, f"must be from 0 to {len(body)} (bytes of the body), is {header_length[:20]!r}")
    return body[:length], bytes(body[length:])


def parse(head: bytes, raw: bytes, memory: SharedMemory, unknown: UnknownFields) -> InferenceRequest:
    """Parse a request to ``infer``.

    Args:
        head: the JSON part of the body.
        raw: concatenated binary tensors.

    Raises ``PenstockError`` (``invalid``) for wrong types or values.
    """
    result = read_object(head)
    known = {"id": str, "parameters": dict, "inputs": list, "outputs": list}
    for name, value in result.items():
        if name not in known:
            unknown.ignore("", name, known, value=value)
        elif not isinstance(value, known[name]):
            kind = {str: "a string", dict: "an object", list: "a list"}[known[name]]
            raise invalid(name, f"must be {kind}, is {str(value)[:50]!r}")
    inputs, offset = [], 0
    for given in result.get("inputs", ()):
        name, parameters = _named(given, "inputs")
        if in_memory(name, parameters):
            inputs.append(from_bytes(name, given.get("datatype"), given.get("shape"), memory.read(name, parameters)))
            continue
        size = parameters.get("binary_data_size")
        if size is None:
            inputs.append(from_json(name, given.get("datatype"), given.get("shape"), given.get("data", [])))
            continue
        if type(size) is not int or not 0 <= size <= len(raw) - offset:
            message = f"binary_data_size must be from 0 to {len(raw) - offset} (the remaining bytes of the body)"
            raise invalid(name, f"{message}, is {str(size)[:50]}")
        inputs.append(from_bytes(name, given.get("datatype"), given.get("shape"), raw[offset : offset + size]))
        offset += size
    if offset != len(raw):
        raise invalid("inputs", f"the body has {len(raw) - offset} bytes more than the sum of all binary_data_size")
    outputs = dict([_named(given, "outputs") for given in result.get("outputs", ())])
    for name, parameters in outputs.items():
        in_memory(name, parameters)
        if parameters.get("classification"):
            raise invalid(name, "classification is not supported: the model is not a classifier; leave it out")
    return InferenceRequest(inputs, result.get("id", ""), outputs, result.get("parameters", {}))


async def encode_response(
    model: Model, infer_request: InferenceRequest, response: ModelResponse, memory: SharedMemory
) -> tuple[bytes, bytes | None]:
    """Encode a response as JSON and concatenated binary outputs (None without binary outputs). Outputs requested in
    shared memory are written to their regions.

    Raises ``PenstockError`` (``invalid``) if a shared memory region is too small.
    """
    default, raw = bool(infer_request.parameters.get("binary_data_output", False)), []
    outputs = []
    for tensor in response.outputs:
        output: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        output_parameters = infer_request.outputs.get(tensor.name, {})
        if in_memory(tensor.name, output_parameters):
            output["parameters"] = memory.write(tensor.name, output_parameters, to_bytes(tensor))
        elif output_parameters.get("binary_data", default):
            raw.append(to_bytes(tensor))
            output["parameters"] = {"binary_data_size": len(raw[-1])}
        else:
            output["data"] = await in_json(tensor)
        outputs.append(output)
    result: dict[str, Any] = {"id": infer_request.id} if infer_request.id else {}
    result |= {"model_name": model.name, "model_version": VERSION, "outputs": outputs}
    return encode(result), b"".join(raw) if raw else None


def decompress(body: bytes, encoding: str, maximum: int) -> bytes:
    """Decompress a body. Raises ``PenstockError``: ``unsupported`` for unknown encodings, ``invalid`` for invalid data,
    ``too_large`` if the result exceeds ``maximum`` bytes."""
    if encoding not in COMPRESSIONS:
        raise PenstockError(
            Code.UNSUPPORTED,
            f"content-encoding: {encoding[:20]!r} is not supported; use {' or '.join(COMPRESSIONS)}",
            "content-encoding",
        )
    reader = zlib.decompressobj(COMPRESSIONS[encoding])
    try:
        result = reader.decompress(body, maximum + 1)
    except zlib.error as error:
        raise invalid("body", f"is not valid {encoding} data: {error}") from error
    if len(result) > maximum:
        message = f"body: must have at most {maximum} bytes when decompressed"
        raise PenstockError(Code.TOO_LARGE, message, "body", maximum)
    return result


def _named(given: Any, where: str) -> tuple[str, dict[str, Any]]:
    """Name and parameters of an input or output. Raises ``PenstockError`` (``invalid``) without a name."""
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise invalid(where, f"must be objects with a name, has {str(given)[:50]!r}")
    parameters = given.get("parameters", {})
    if not isinstance(parameters, dict):
        raise invalid(given["name"], f"parameters must be an object, is {str(parameters)[:50]!r}")
    return given["name"], parameters
