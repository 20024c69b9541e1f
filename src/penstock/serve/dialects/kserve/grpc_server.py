"""``GRPCInferenceService``: the protocol over gRPC. Needs the extra ``grpc``."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
from google.protobuf import message_factory
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from penstock.config.options import ServerOptions
from penstock.config.secrets import mask_values
from penstock.core import Code, Failure, PenstockError
from penstock.core.errors import invalid
from penstock.serve.http.access import NO_CONTROL
from penstock.serve.http.middleware import REQUEST_ID, ApiKeys, Client
from penstock.serve.http.reply import CLIENT_DISCONNECTED
from penstock.serve.http.request_record import RequestRecord
from penstock.serve.http.unexpected import unexpected
from penstock.serve.http.unknown_fields import HEADER, UnknownFieldLog, UnknownFields
from penstock.serve.spans import end_rpc, logged
from penstock.version import __version__

from . import grpc_messages as messages
from . import server_state as state
from .inference import run_inference
from .repository import ModelRepository
from .shared_memory import NO_CUDA, SharedMemory

logger = logging.getLogger("penstock.requests")

STATUS = {
    Code.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Code.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    Code.UNAUTHORIZED: grpc.StatusCode.UNAUTHENTICATED,
    Code.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Code.TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    Code.TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.TOO_LONG: grpc.StatusCode.INVALID_ARGUMENT,
    Code.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.CANCELLED: grpc.StatusCode.CANCELLED,
    Code.INTERNAL: grpc.StatusCode.INTERNAL,
    Code.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
}
UNREADABLE = Failure(Code.INVALID, "body: is no message of this method", "body")
MAX_MESSAGE = 64 * 2**20
"""Bytes of a message that gRPC accepts; larger than ``max_body_size``, which is refused with an error that names it."""
MAX_STREAM_REQUESTS = 256
"""Open requests of a stream; further ones are not read until one has ended."""
MAX_QUEUED_RESPONSES = 16
"""Responses of a stream that wait for its client to read; its requests wait before they make more."""
NO_KEY = Failure(Code.UNAUTHORIZED, "an API key is missing or wrong: send the metadata authorization: Bearer KEY")
SERVICE = "inference.GRPCInferenceService"
"""Name of the service, in spans."""
PUBLIC_METHODS = ("ServerLive", "ServerReady")
SERVER = ("server", f"penstock/{__version__}")
"""Trailing metadata of every response: this server's name, as ``ServerMetadata`` says triton. Unknown fields of
requests are there, too, under the name of the HTTP header."""


class GrpcServer:
    """The gRPC server of one process.

    Args:
        address: host and port to listen on, which several processes share (``SO_REUSEPORT``).
        options: whose keys and certificate are asked for and shown.
    """

    def __init__(self, repository: ModelRepository, address: str, options: ServerOptions) -> None:
        self._stopping = asyncio.Event()
        self._stopped: asyncio.Task[None] | None = None
        limits = [("grpc.max_receive_message_length", MAX_MESSAGE), ("grpc.max_send_message_length", -1)]
        inference = Inference(repository, ApiKeys(options.api_key, options.admin_api_key), self._stopping)
        self._server = grpc.aio.server(
            interceptors=[Authorization(inference)], options=[("grpc.so_reuseport", 1), *limits]
        )
        self._server.add_generic_rpc_handlers((_handlers(inference),))
        try:
            if options.ssl_certfile:
                certificate = Path(options.ssl_certfile).read_bytes()
                key = Path(options.ssl_keyfile).read_bytes() if options.ssl_keyfile else certificate
                self._server.add_secure_port(address, grpc.ssl_server_credentials([(key, certificate)]))
            else:
                self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise invalid("grpc_port", f"cannot listen on {address}: {error}") from error

    async def start(self) -> None:
        await self._server.start()

    def stop(self, patience: float) -> None:
        """Refuse new requests, and end open ones after ``patience`` seconds."""
        self._stopping.set()
        self._stopped = asyncio.create_task(self._server.stop(patience))

    async def stopped(self) -> None:
        """Wait until the server has stopped, if ``stop`` was called."""
        if self._stopped:
            await self._stopped


class Authorization(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without a valid API key before any of their messages is read."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        method = details.method.rpartition("/")[2]
        handler = await continuation(details)
        if handler is None or method in PUBLIC_METHODS:
            return handler
        if self._inference.client_of(details.invocation_metadata) is not None:
            return handler

        async def refused(requests: AsyncIterator[Any], context: Any) -> None:
            context.set_trailing_metadata((SERVER,))
            async with self._inference.authorized_request(context, method):
                pass

        return grpc.stream_stream_rpc_method_handler(refused)


Method = Callable[["Inference", Any, RequestRecord], Awaitable[Any]]


def unary(method: Method) -> Any:
    """Adapts a method of one request and one response to gRPC."""

    async def called(self: Inference, request: Any, context: Any) -> Any:
        model = getattr(request, "model_name", "") or getattr(request, "name", "")
        context.set_trailing_metadata((SERVER,))
        async with self.authorized_request(context, method.__name__, model) as record:
            _check_read(request)
            try:
                return await method(self, request, record)
            finally:
                context.set_trailing_metadata(_trailing(record.unknown))

    return called


class Inference(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """The methods of the service.

    Args:
        keys: API keys, of which a client must send one.
        stopping: set when no further request of a stream is to be read.
    """

    def __init__(self, repository: ModelRepository, keys: ApiKeys, stopping: asyncio.Event) -> None:
        self._repository = repository
        self._keys = keys
        self._stopping = stopping
        self._unknown_field_log = UnknownFieldLog()

    @unary
    async def ServerLive(self, request: Any, record: RequestRecord) -> Any:
        return pb.ServerLiveResponse(live=True)

    @unary
    async def ServerReady(self, request: Any, record: RequestRecord) -> Any:
        return pb.ServerReadyResponse(ready=_succeeds(self._repository.served_models.check))

    @unary
    async def ServerMetadata(self, request: Any, record: RequestRecord) -> Any:
        return pb.ServerMetadataResponse(**state.server_metadata())

    @unary
    async def ModelReady(self, request: Any, record: RequestRecord) -> Any:
        def check() -> None:
            self._repository.find(request.name, request.version).check()

        return pb.ModelReadyResponse(ready=_succeeds(check))

    @unary
    async def ModelMetadata(self, request: Any, record: RequestRecord) -> Any:
        return messages.metadata_of(self._repository.find(request.name, request.version))

    @unary
    async def ModelConfig(self, request: Any, record: RequestRecord) -> Any:
        return messages.config_of(self._repository.find(request.name, request.version))

    @unary
    async def ModelStatistics(self, request: Any, record: RequestRecord) -> Any:
        models = [self._repository.find(request.name, request.version)] if request.name else [*self._repository]
        return messages.statistics_of([self._repository.counts.statistics(model) for model in models])

    @unary
    async def RepositoryIndex(self, request: Any, record: RequestRecord) -> Any:
        result = state.repository_index(self._repository, request.ready)
        return pb.RepositoryIndexResponse(models=[pb.RepositoryIndexResponse.ModelIndex(**each) for each in result])

    @unary
    async def RepositoryModelLoad(self, request: Any, record: RequestRecord) -> Any:
        _check_control(record)
        await state.load_model(self._repository, request.model_name, messages.parameters(request.parameters))
        return pb.RepositoryModelLoadResponse()

    @unary
    async def RepositoryModelUnload(self, request: Any, record: RequestRecord) -> Any:
        _check_control(record)
        await state.unload_model(self._repository, request.model_name, messages.parameters(request.parameters))
        return pb.RepositoryModelUnloadResponse()

    @unary
    async def TraceSetting(self, request: Any, record: RequestRecord) -> Any:
        if changes := messages.parse_trace_settings(request):
            _check_control(record)
        return messages.build_trace_settings(state.trace_settings(self._repository, changes, request.model_name))

    @unary
    async def LogSettings(self, request: Any, record: RequestRecord) -> Any:
        if changes := messages.parse_log_settings(request):
            _check_control(record)
        return messages.build_log_settings(state.log_settings(self._repository, changes))

    @unary
    async def ModelInfer(self, request: Any, record: RequestRecord) -> Any:
        async with aclosing(self._responses(request, record, streamed=False)) as responses:
            (response,) = [response async for response in responses]
            return response

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], context: Any) -> None:
        """Requests of a stream are answered concurrently; clients match responses by the requests' ids.

        Responses are written rather than yielded, as gRPC does not close a generator whose client has left.
        """
        context.set_trailing_metadata((SERVER,))
        patience = self._repository.served_models.options.client_timeout
        async with self.authorized_request(context, "ModelStreamInfer", quiet=True) as stream_record:
            news: asyncio.Queue[Any] = asyncio.Queue(MAX_QUEUED_RESPONSES)
            places = asyncio.Semaphore(MAX_STREAM_REQUESTS)
            tasks: set[asyncio.Task[None]] = set()

            async def answer(request: Any) -> None:
                model, request_id = getattr(request, "model_name", ""), getattr(request, "id", "")
                try:
                    async with (
                        self.request_record(context, "ModelStreamInfer", model) as record,
                        aclosing(self._responses(request, record, streamed=True)) as responses,
                    ):
                        async for response in responses:
                            await news.put(pb.ModelStreamInferResponse(infer_response=response))
                        stream_record.unknown.join(record.unknown)
                except PenstockError as error:
                    failed = pb.ModelInferResponse(model_name=model, id=request_id)
                    await news.put(
                        pb.ModelStreamInferResponse(error_message=error.failure.message, infer_response=failed)
                    )

            def ended(task: asyncio.Task[None]) -> None:
                tasks.discard(task)
                places.release()

            async def read() -> None:
                async for request in requests:
                    await places.acquire()
                    task = asyncio.create_task(answer(request))
                    tasks.add(task)
                    task.add_done_callback(ended)

            async def run() -> None:
                reading, stopping = asyncio.create_task(read()), asyncio.create_task(self._stopping.wait())
                try:
                    await asyncio.wait((reading, stopping), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    reading.cancel()
                    stopping.cancel()
                    await asyncio.gather(reading, stopping, return_exceptions=True)
                await asyncio.gather(*tasks)
                await news.put(None)

            running = asyncio.create_task(run())
            try:
                while (response := await news.get()) is not None:
                    async with asyncio.timeout(patience):
                        await context.write(response)
                context.set_trailing_metadata(_trailing(stream_record.unknown))
            except TimeoutError as error:
                raise PenstockError(Code.TIMEOUT, f"nothing was read for {patience:g} seconds") from error
            finally:
                for task in (running, *tasks):
                    task.cancel()
                await asyncio.gather(running, *tasks, return_exceptions=True)

    @unary
    async def SystemSharedMemoryStatus(self, request: Any, record: RequestRecord) -> Any:
        result = pb.SystemSharedMemoryStatusResponse()
        for region in self._memory(record).status(request.name):
            result.regions[region["name"]].CopyFrom(pb.SystemSharedMemoryStatusResponse.RegionStatus(**region))
        return result

    @unary
    async def SystemSharedMemoryRegister(self, request: Any, record: RequestRecord) -> Any:
        self._memory(record).register(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    @unary
    async def SystemSharedMemoryUnregister(self, request: Any, record: RequestRecord) -> Any:
        self._memory(record).unregister(request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    @unary
    async def CudaSharedMemoryStatus(self, request: Any, record: RequestRecord) -> Any:
        return pb.CudaSharedMemoryStatusResponse()

    @unary
    async def CudaSharedMemoryRegister(self, request: Any, record: RequestRecord) -> Any:
        raise PenstockError(Code.UNSUPPORTED, NO_CUDA)

    @unary
    async def CudaSharedMemoryUnregister(self, request: Any, record: RequestRecord) -> Any:
        return pb.CudaSharedMemoryUnregisterResponse()  # there is none

    async def _responses(self, request: Any, record: RequestRecord, streamed: bool) -> AsyncGenerator[Any, None]:
        """The ``ModelInferResponse`` messages of a request."""
        _check_read(request)
        model = self._repository.find(request.model_name, request.model_version)
        memory = self._memory(record)
        infer_request = await self._repository.read_request(
            request.ByteSize(), lambda: messages.parse_infer_request(request, memory)
        )
        empty_last = bool(infer_request.parameters.get(messages.EMPTY_FINAL, False))
        with model.service.admit():
            async with aclosing(run_inference(self._repository, model, infer_request, record, streamed)) as stream:
                async for response in stream:
                    message = messages.build_infer_response(model, infer_request, response, memory)
                    if streamed:
                        message.parameters[messages.FINAL].bool_param = response.last and not empty_last
                    yield message
        if streamed and empty_last:
            last = pb.ModelInferResponse(model_name=model.name, id=infer_request.id)
            last.parameters[messages.FINAL].bool_param = True
            yield last

    def read(self, kind: Any, raw: bytes) -> Any:
        """The message in bytes, or a ``Failure`` where it is none, or too large to be parsed."""
        maximum = self._repository.served_models.max_body_size
        if len(raw) > maximum:
            message = f"body: has {len(raw)} bytes, and at most {maximum} are taken"
            return Failure(Code.TOO_LARGE, message, "body", maximum)
        try:
            return kind.FromString(raw)
        except DecodeError:
            return UNREADABLE

    def client_of(self, metadata: Iterable[tuple[str, str]] | None) -> Client | None:
        """The client of a call, as ``ApiKeys.client_of``."""
        return self._keys.client_of(dict(metadata or ()).get("authorization", "").encode())

    def _memory(self, record: RequestRecord) -> SharedMemory:
        """The regions of a call's client."""
        return self._repository.memory.of_client(record.tenant, lambda: None)

    @asynccontextmanager
    async def authorized_request(
        self, context: Any, method: str, model: str = "", quiet: bool = False
    ) -> AsyncIterator[RequestRecord]:
        """The record of a call whose API key is valid. Failures become the call's status, and the call is logged.

        Args:
            quiet: log failures only, unless at level debug.
        """
        try:
            async with self.request_record(context, method, model, quiet or method in PUBLIC_METHODS) as record:
                client = self.client_of(context.invocation_metadata())
                if client is None and method not in PUBLIC_METHODS:
                    raise PenstockError.of(NO_KEY)
                yield record
        except PenstockError as error:
            await context.abort(STATUS[error.failure.code], mask_values(error.failure.message))

    @asynccontextmanager
    async def request_record(
        self, context: Any, method: str, model: str, quiet: bool = False
    ) -> AsyncIterator[RequestRecord]:
        """A request's record; logs the request at the end. Unexpected exceptions become an internal error."""
        given = dict(context.invocation_metadata() or ()).get("x-request-id", "")
        unknown = UnknownFields(self._repository.served_models.options.strict_requests)
        given_id = given if REQUEST_ID.fullmatch(given) else uuid4().hex
        record = RequestRecord(given_id, client=context.peer(), unknown=unknown)
        if client := self.client_of(context.invocation_metadata()):
            client.enter(record)
        if (tracer := self._repository.served_models.tracer) and not quiet:
            attributes = {
                "rpc.system": "grpc",
                "rpc.service": SERVICE,
                "rpc.method": method,
                "client.address": record.client,
                "penstock.request_id": given_id,
            }
            metadata = dict(context.invocation_metadata() or ())
            record.span = tracer.server_span(f"{SERVICE}/{method}", metadata, record.arrived, attributes)
        with logged(record.span):
            try:
                yield record
            except PenstockError as error:
                record.failure = error.failure
                raise
            except (asyncio.CancelledError, GeneratorExit):
                record.failure = CLIENT_DISCONNECTED
                raise
            except Exception as error:
                record.failure = unexpected(error, record.request_id)
                raise PenstockError.of(record.failure) from error
            finally:
                self._log(record, f"{method} {model[:100]!r}" if model else method, quiet)
                if record.span:
                    status = STATUS[record.failure.code] if record.failure else grpc.StatusCode.OK
                    end_rpc(record.span, status.value[0], record.failure)

    def _log(self, record: RequestRecord, what: str, quiet: bool) -> None:
        failure = record.failure
        if record.unknown.places and not failure:
            self._unknown_field_log.log(record.request_id, record.client.rpartition(":")[0], record.unknown)
        facts = {"id": record.request_id, "seconds": time.monotonic() - record.arrived, **record.facts}
        level = logging.INFO
        if failure:
            self._repository.served_models.metrics.record_failure(failure)
            facts |= {"error": failure.code.value, "reason": failure.message}
            level = logging.ERROR if failure.code in (Code.INTERNAL, Code.UNAVAILABLE) else logging.INFO
        elif quiet:
            level = logging.DEBUG
        logger.log(level, "gRPC %s", what, extra={"facts": facts})


def _handlers(inference: Inference) -> grpc.GenericRpcHandler:
    """The service's methods as handlers; invalid messages get an error status instead of a traceback."""
    service = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    result = {}
    for method in service.methods:
        if method.name in PUBLIC_METHODS:  # anybody may call them, so nothing is read
            result[method.name] = grpc.stream_unary_rpc_method_handler(
                _unread(getattr(inference, method.name)),
                response_serializer=message_factory.GetMessageClass(method.output_type).SerializeToString,
            )
            continue
        kind = grpc.stream_stream_rpc_method_handler if method.client_streaming else grpc.unary_unary_rpc_method_handler
        request_class, response_class = (
            message_factory.GetMessageClass(kind) for kind in (method.input_type, method.output_type)
        )
        result[method.name] = kind(
            getattr(inference, method.name),
            request_deserializer=partial(inference.read, request_class),
            response_serializer=response_class.SerializeToString,
        )
    return grpc.method_handlers_generic_handler(service.full_name, result)


def _unread(method: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    """A method whose request has nothing to say."""

    async def called(requests: AsyncIterator[Any], context: Any) -> Any:
        return await method(None, context)

    return called


def _check_control(record: RequestRecord) -> None:
    """Raises ``PenstockError`` (``unauthorized``) where the client may not change the server for all clients."""
    if not record.may_control:
        raise PenstockError(Code.UNAUTHORIZED, NO_CONTROL)


def _check_read(request: Any) -> None:
    if isinstance(request, Failure):
        raise PenstockError.of(request)


def _trailing(unknown: UnknownFields) -> tuple[tuple[str, str], ...]:
    return (SERVER, (HEADER, names)) if (names := unknown.header) else (SERVER,)


def _succeeds(check: Callable[[], None]) -> bool:
    try:
        check()
    except PenstockError:
        return False
    return True
