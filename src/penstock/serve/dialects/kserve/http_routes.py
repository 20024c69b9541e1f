"""``/v2/…``: the protocol over HTTP, with the binary tensor data extension and Triton's extensions."""

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
    """List ready models only."""


class LoadRequest(RequestBody, forbid_unknown_fields=True):
    """Body of a request to load or unload a model."""

    parameters: dict[str, Any] | None = None


class RegionRequest(RequestBody, forbid_unknown_fields=True):
    """Body of a request to register a region."""

    key: str
    byte_size: int
    offset: int = 0


class Endpoints:
    """The endpoints of the protocol; they take the request, and the parameters of the path."""

    def __init__(self, repository: ModelRepository) -> None:
        self._repository = repository

    def _memory_of(self, request: Request) -> SharedMemory:
        """The regions of the request's client, which pages of other sites may not use."""
        check = functools.partial(request.app.state.origins.check, request.scope, Access.PRIVATE)
        return self._repository.memory.of_client(record_of(request.scope).tenant, check)

    async def _read(
        self, request: Request, max_size: int, parse: Callable[[bytes, bytes], V], header_length: str | None = None
    ) -> V:
        """Run ``parse`` on a body: its JSON, and the tensors in bytes after it."""
        body = await self._repository.served_models.receive(request, max_size)
        encoding = request.headers.get("content-encoding", "identity").lower()

        def work() -> tuple[int, V]:
            whole = body if encoding == "identity" else decompressed(body, encoding, max_size)
            head, raw = _split(whole, header_length)
            return check_elements(head) + len(raw), parse(head, raw)

        size = len(body) if encoding == "identity" else max_size
        return await self._repository.served_models.parse(record_of(request.scope), size, work)

    async def _settings_body_of(self, request: Request) -> dict[str, Any]:
        """The body of an administrative request, which is accepted without a live engine."""
        return await self._read(request, MIN_BODY_SIZE, lambda body, _: read_object(body or b"{}"))

    async def _change_of(self, request: Request, schema: type[T]) -> T:
        """Parse a request that changes the server; unknown fields are refused, as it would do something else."""
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
        except PenstockError as error:  # 400 whatever the reason, as Triton has it
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
        """One answer, or a stream of them at ``generate_stream``."""
        model, record = self._repository.find(name, version), record_of(request.scope)
        streamed = request.url.path.endswith("_stream")
        infer_request = await self._read(
            request,
            self._repository.served_models.max_text_size,
            lambda body, _: from_fields(model, read_object(body), record.unknown),
        )

        async def pieces() -> AsyncGenerator[bytes, None]:
            stream = run_inference(self._repository, model, infer_request, record, streamed)
            async with aclosing(stream):
                async for response in stream:
                    output = await to_fields(model, infer_request, response)
                    yield event(output) if streamed else encode(output)

        return Reply(model.service, pieces(), ERROR_FORMAT, streamed)

    async def index(self, request: Request) -> Response:
        wish = convert(await self._settings_body_of(request), IndexRequest, record_of(request.scope).unknown, "")
        return Json(state.repository_index(self._repository, wish.ready))

    async def load(self, request: Request, name: str) -> Response:
        wish = await self._change_of(request, LoadRequest)
        await state.load_model(self._repository, name, wish.parameters)
        return Response()

    async def unload(self, request: Request, name: str) -> Response:
        wish = await self._change_of(request, LoadRequest)
        await state.unload_model(self._repository, name, wish.parameters)
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
        wish = await self._change_of(request, RegionRequest)
        self._memory_of(request).register(name, wish.key, wish.offset, wish.byte_size)
        return Response()

    async def unregister(self, request: Request, name: str = "") -> Response:
        self._memory_of(request).unregister(name)
        return Response()

    async def no_cuda_memory(self, _: Request, name: str = "") -> Response:
        raise PenstockError(Code.UNSUPPORTED, NO_CUDA)

    async def cuda_status(self, _: Request) -> Response:
        return Json([])

    async def cuda_unregister(self, _: Request, name: str = "") -> Response:
        return Response()  # there is none


MODEL, REGION = "/v2/models/{name}", "/region/{name}"
STATUS = f"{REGION}/status"
ENDPOINTS: Sequence[tuple[str, str, Callable[..., Awaitable[Response]], str]] = [
    ("GET", "/v2", Endpoints.server, "The server, and the extensions it has"),
    ("GET", "/v2/health/live", Endpoints.live, "This process answers"),
    ("GET", "/v2/health/ready", Endpoints.ready, "The models accept requests"),
    ("GET", "/v2/models/stats", Endpoints.all_stats, "Statistics of all models"),
    *[
        route
        for at in (MODEL, f"{MODEL}/versions/{{version}}")
        for route in (
            ("GET", at, Endpoints.model_metadata, "A model's inputs and outputs"),
            ("GET", f"{at}/config", Endpoints.model_config, "A model's configuration"),
            ("GET", f"{at}/ready", Endpoints.model_ready, "A model accepts requests"),
            ("GET", f"{at}/stats", Endpoints.model_stats, "Statistics of a model"),
            ("POST", f"{at}/infer", Endpoints.infer, "Infer from tensors"),
            ("POST", f"{at}/generate", Endpoints.generate, "Generate from a JSON object"),
            ("POST", f"{at}/generate_stream", Endpoints.generate, "Generate from a JSON object, streamed"),
        )
    ],
    ("POST", "/v2/repository/index", Endpoints.index, "Models of the repository"),
    ("POST", "/v2/repository/models/{name:path}/load", Endpoints.load, "Load a model"),
    ("POST", "/v2/repository/models/{name:path}/unload", Endpoints.unload, "Unload a model"),
    *[("GET", SYSTEM + at, Endpoints.memory_status, "Regions of system shared memory") for at in ("/status", STATUS)],
    ("POST", f"{SYSTEM}{REGION}/register", Endpoints.register, "Register a region of system shared memory"),
    *[
        ("POST", f"{SYSTEM}{at}/unregister", Endpoints.unregister, "Unregister regions of system shared memory")
        for at in ("", REGION)
    ],
    ("GET", f"{CUDA}/status", Endpoints.cuda_status, "Regions of CUDA shared memory, of which there are none"),
    *[
        (method, CUDA + at, Endpoints.no_cuda_memory, "Regions of CUDA shared memory, which are refused")
        for method, at in (("GET", STATUS), ("POST", f"{REGION}/register"))
    ],
    *[
        ("POST", f"{CUDA}{at}/unregister", Endpoints.cuda_unregister, "Unregister regions of CUDA shared memory")
        for at in ("", REGION)
    ],
    *[(method, "/v2/logging", Endpoints.logging, "Settings of the log") for method in ("GET", "POST")],
    *[
        (method, path, Endpoints.tracing, "Settings of traces")
        for method in ("GET", "POST")
        for path in ("/v2/trace/setting", f"{MODEL}/trace/setting")
    ],
]
"""Method, path, endpoint and summary of each route."""


def add_routes(routes: Routes, repository: ModelRepository) -> None:
    """Add all routes below ``/v2``."""
    routes.error_formats.add(ERROR_FORMAT, "/v2")
    endpoints = Endpoints(repository)
    for method, path, endpoint, summary in ENDPOINTS:
        asks = path.endswith(WITH_BODY)
        described = operation(OBJECT if asks else None, FAILED, OBJECT if asks else None, path.endswith("_stream"))
        answer, access = _with_parameters(endpoint, endpoints), _access_of(method, path)
        routes.add(path, answer, access=access, method=method, summary=summary, described=described)


def _access_of(method: str, path: str) -> Access:
    """Class of a route. Regions belong to API keys; the settings of the log and of traces are shared."""
    if path.startswith("/v2/health/"):
        return Access.PUBLIC
    if path.startswith((SYSTEM, CUDA)):
        return Access.PRIVATE
    if path == "/v2/logging" or path.endswith("/trace/setting"):
        return Access.CONTROL if method == "POST" else Access.PRIVATE
    return Access.CONTROL if path.endswith(("/load", "/unload")) else Access.INFERENCE


def _with_parameters(endpoint: Callable[..., Awaitable[Response]], endpoints: Endpoints) -> Endpoint:
    """An endpoint that is called with the request, and with the parameters of the path by their names."""

    @functools.wraps(endpoint)
    async def called(request: Request) -> Response:
        return await endpoint(endpoints, request, **request.path_params)

    return called


FAILED = {"type": "object", "properties": {"error": {"type": "string"}}}
WITH_BODY = ("/infer", "/generate", "/generate_stream")


class InferReply(Reply):
    """The response to ``infer``: JSON, followed by the outputs that were requested in binary."""

    def __init__(
        self,
        repository: ModelRepository,
        model: Model,
        infer_request: InferenceRequest,
        request: Request,
        memory: SharedMemory,
    ) -> None:
        self._header: int | None = None

        async def pieces() -> AsyncGenerator[bytes, None]:
            stream = run_inference(repository, model, infer_request, record_of(request.scope), streamed=False)
            async with aclosing(stream):
                async for response in stream:
                    head, binary = await encode_response(model, infer_request, response, memory)
                    self._header = len(head) if binary is not None else None
                    yield head + (binary or b"")

        super().__init__(model.service, pieces(), ERROR_FORMAT, streamed=False)

    def _start(self, status: int, document: bytes | None) -> Message:
        message = super()._start(status, document)
        if self._header is not None:
            headers = [header for header in message["headers"] if header[0] != b"content-type"]
            length = (HEADER_LENGTH.encode(), str(self._header).encode())
            message["headers"] = [*headers, (b"content-type", b"application/octet-stream"), length]
        return message


def _split(body: bytes, header_length: str | None) -> tuple[bytes, bytes]:
    """The JSON of a body, and the tensors in bytes after it.

    Args:
        header_length: bytes of the JSON; None where nothing follows it.

    Raises ``PenstockError`` (``invalid``).
    """
    if header_length is None:
        return body, b""
    length = read_decimal(header_length, len(body))
    if length is None:
        raise invalid(HEADER_LENGTH, f"must be at most the {len(body)} bytes of the body, is {header_length[:20]!r}")
    return body[:length], bytes(body[length:])


def parse(head: bytes, raw: bytes, memory: SharedMemory, unknown: UnknownFields) -> InferenceRequest:
    """A request to ``infer``.

    Args:
        head: its JSON.
        raw: its tensors in bytes.

    Raises ``PenstockError`` (``invalid``).
    """
    result = read_object(head)
    known = {"id": str, "parameters": dict, "inputs": list, "outputs": list}
    for name, value in result.items():
        if name not in known:
            unknown.ignore("", name, known, value=value)
        elif not isinstance(value, known[name]):
            raise invalid(name, f"must be {known[name].__name__}")
    inputs, at = [], 0
    for given in result.get("inputs", ()):
        name, parameters = _named(given, "inputs")
        if in_memory(name, parameters):
            inputs.append(from_bytes(name, given.get("datatype"), given.get("shape"), memory.read(name, parameters)))
            continue
        size = parameters.get("binary_data_size")
        if size is None:
            inputs.append(from_json(name, given.get("datatype"), given.get("shape"), given.get("data", [])))
            continue
        if type(size) is not int or not 0 <= size <= len(raw) - at:
            raise invalid(name, f"has a binary_data_size that is not one of the {len(raw) - at} bytes that are left")
        inputs.append(from_bytes(name, given.get("datatype"), given.get("shape"), raw[at : at + size]))
        at += size
    if at != len(raw):
        raise invalid("inputs", f"{len(raw) - at} bytes of the body belong to none of them")
    outputs = dict([_named(given, "outputs") for given in result.get("outputs", ())])
    for name, parameters in outputs.items():
        in_memory(name, parameters)
        if parameters.get("classification"):
            raise invalid(name, "classification is for models that classify")
    return InferenceRequest(inputs, result.get("id", ""), outputs, result.get("parameters", {}))


async def encode_response(
    model: Model, infer_request: InferenceRequest, response: ModelResponse, memory: SharedMemory
) -> tuple[bytes, bytes | None]:
    """The JSON of a response, and the binary outputs after it; None without binary outputs. Outputs requested in
    shared memory are put there.

    Raises ``PenstockError`` (``invalid``) where there is no room for them.
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


def decompressed(body: bytes, encoding: str, maximum: int) -> bytes:
    """Decompress a body. Raises ``PenstockError`` (``invalid``) for invalid data, or where the result is too large."""
    if encoding not in COMPRESSIONS:
        raise PenstockError(
            Code.UNSUPPORTED,
            f"content-encoding: {encoding[:20]!r} is not one of {', '.join(COMPRESSIONS)}",
            "content-encoding",
        )
    reader = zlib.decompressobj(COMPRESSIONS[encoding])
    try:
        result = reader.decompress(body, maximum + 1)
    except zlib.error as error:
        raise invalid("body", f"is not compressed as {encoding}: {error}") from error
    if len(result) > maximum:
        raise PenstockError(Code.TOO_LARGE, f"body: must have at most {maximum} bytes", "body", maximum)
    return result


def _named(given: Any, where: str) -> tuple[str, dict[str, Any]]:
    """Name and parameters of an input or output."""
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise invalid(where, "holds something without a name")
    parameters = given.get("parameters", {})
    if not isinstance(parameters, dict):
        raise invalid(given["name"], "has parameters that are no object")
    return given["name"], parameters
