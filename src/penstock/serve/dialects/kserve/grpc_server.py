"""``GRPCInferenceService``: the KServe protocol over gRPC. Requires the extra ``grpc``."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing, asynccontextmanager, nullcontext
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
from penstock.frontend.fair_queue import FairQueue
from penstock.serve.http.access import NO_CONTROL
from penstock.serve.http.body_memory import UNCOUNTED_SIZE, Reservation
from penstock.serve.http.middleware import REQUEST_ID, RESUMED_HEADER, ApiKeys, Client
from penstock.serve.http.reply import CLIENT_DISCONNECTED
from penstock.serve.http.request_record import RequestRecord
from penstock.serve.http.unexpected import unexpected
from penstock.serve.http.unknown_fields import HEADER, UnknownFieldLog, UnknownFields
from penstock.serve.spans import end_rpc, log_trace
from penstock.version import __version__

from . import grpc_messages as messages
from . import server_state as state
from .inference import InferenceRequest, run_inference
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
UNREADABLE = Failure(Code.INVALID, "body: is not a valid message of this method", "body")
SLACK = 2**20
"""Bytes added to gRPC's message size limit: messages up to 1 MiB above the limit get this server's error message."""
MAX_STREAM_REQUESTS = 256
"""Maximum number of open requests of a stream; the next request is read when one of them has finished."""
MAX_QUEUED_RESPONSES = 16
"""Maximum number of unsent responses of a stream; at the maximum, the requests of the stream pause."""
NO_KEY = Failure(Code.UNAUTHORIZED, "the API key is missing or wrong: send the metadata authorization: Bearer KEY")
SERVICE = "inference.GRPCInferenceService"
"""Name of the gRPC service in trace spans."""
PUBLIC_METHODS = ("ServerLive", "ServerReady")
"""Methods that need no API key; their requests are empty."""
SERVICE_DESCRIPTOR = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
REQUESTS = {method.name: message_factory.GetMessageClass(method.input_type) for method in SERVICE_DESCRIPTOR.methods}
"""Method → class of its request messages."""
MAX_CONTROL_MESSAGE = 2**16
"""Maximum size of a request of any method except ``ModelInfer``, bytes."""
MEMORY_FACTOR = 4
"""Bytes of memory per byte of a parsed message."""
LONGEST_CALL = 86_400.0
"""Time limit in seconds for calls that are open when the message size limit is raised."""
SERVER = ("server", f"penstock/{__version__}")
"""Trailing metadata of every response: the name and version of this server (``ServerMetadata`` returns ``triton``).
Unknown fields of a request, and engines on which it has continued although their results may differ, are also reported
in the trailing metadata, under the names of the HTTP headers."""


class GrpcServer:
    """The gRPC server of one API process.

    Args:
        address: host and port to listen on, shared by several processes (``SO_REUSEPORT``).
        options: API keys and TLS certificate.
    """

    def __init__(self, repository: ModelRepository, address: str, options: ServerOptions) -> None:
        self._address = address
        self._options = options
        self._stopping = asyncio.Event()
        self._stopped: list[asyncio.Task[None]] = []
        self._inference = Inference(repository, ApiKeys(options.api_key, options.admin_api_key), self._stopping)
        self._starting = asyncio.Lock()
        self._max_size = 0
        self._servers: list[Any] = []
        """gRPC servers. The last one listens; the others finish calls that were open when the size limit was raised."""
        repository.served_models.ready_hooks.append(self.start)

    async def start(self) -> None:
        """Start listening. Called again when a model with a longer context is ready: gRPC cannot change the message
        size limit of a listening port, so a new server replaces the old one."""
        async with self._starting:
            if not self._stopping.is_set() and (largest := self._inference.max_size) > self._max_size:
                await self._listen(largest)

    async def _listen(self, largest: int) -> None:
        """Start a server for messages of at most ``largest`` bytes, and stop the previous server."""
        limits = [("grpc.max_receive_message_length", largest + SLACK), ("grpc.max_send_message_length", -1)]
        server = grpc.aio.server(
            interceptors=[Authorization(self._inference)], options=[("grpc.so_reuseport", 1), *limits]
        )
        server.add_generic_rpc_handlers((_handlers(self._inference),))
        options, address = self._options, self._address
        try:
            if options.ssl_certfile:
                certificate = Path(options.ssl_certfile).read_bytes()
                key = Path(options.ssl_keyfile).read_bytes() if options.ssl_keyfile else certificate
                server.add_secure_port(address, grpc.ssl_server_credentials([(key, certificate)]))
            else:
                server.add_insecure_port(address)
        except RuntimeError as error:
            if self._servers:
                message = "cannot raise the gRPC message size limit from %d to %d bytes: %s"
                logger.warning(message, self._max_size, largest, error)
                return
            raise invalid("grpc_port", f"cannot listen on {address}: {error}") from error
        self._max_size = largest
        await server.start()
        if self._servers:
            self._stopped.append(asyncio.create_task(self._servers[-1].stop(LONGEST_CALL)))
        self._servers.append(server)

    def stop(self, patience: float) -> None:
        """Refuse new requests, and abort open requests after ``patience`` seconds."""
        self._stopping.set()
        self._stopped += [asyncio.create_task(server.stop(patience)) for server in self._servers]

    async def stopped(self) -> None:
        """Wait until the server has stopped. Returns at once if ``stop`` was not called."""
        if self._stopping.is_set():
            await asyncio.gather(*self._stopped)


class Authorization(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Interceptor that refuses calls without a valid API key, before reading any message."""

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
    """Adapt a unary method to gRPC as a streaming method, so that ``Inference.receive`` can wait for memory before it
    reads the request. gRPC's unary methods would read the requests of any number of calls at once."""

    async def called(self: Inference, requests: AsyncIterator[bytes], context: Any) -> Any:
        context.set_trailing_metadata((SERVER,))
        async with self.authorized_request(context, method.__name__) as record:
            request = None
            if method.__name__ not in PUBLIC_METHODS:
                request = await self.receive(method.__name__, requests, record)
            try:
                return await method(self, request, record)
            finally:
                context.set_trailing_metadata(_trailing(record))

    return called


class Inference(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """The methods of ``GRPCInferenceService``.

    Args:
        keys: valid API keys.
        stopping: set when the server stops; streams then read no further requests.
    """

    def __init__(self, repository: ModelRepository, keys: ApiKeys, stopping: asyncio.Event) -> None:
        self._repository = repository
        self._keys = keys
        self._stopping = stopping
        self._memory = repository.served_models.body_memory
        self._fair_queue = FairQueue()
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
        return messages.statistics_of(await self._repository.counts.statistics(models))

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

    async def ModelStreamInfer(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Process the requests of a stream concurrently; clients match responses by request id.

        Responses are written rather than yielded, as gRPC does not close a generator whose client has disconnected.
        """
        context.set_trailing_metadata((SERVER,))
        patience = self._repository.served_models.options.client_timeout
        async with self.authorized_request(context, "ModelStreamInfer", quiet=True) as stream_record:
            queue: asyncio.Queue[Any] = asyncio.Queue(MAX_QUEUED_RESPONSES)
            slots = asyncio.Semaphore(MAX_STREAM_REQUESTS)
            tasks: set[asyncio.Task[None]] = set()

            async def answer(raw: bytes, memory: Reservation | None) -> None:
                request = pb.ModelInferRequest()
                try:
                    async with self.request_record(context, "ModelStreamInfer", memory=memory) as record:
                        request = await self._parse(pb.ModelInferRequest, raw, record, self.max_size)
                        async with aclosing(self._responses(request, record, streamed=True)) as responses:
                            async for response in responses:
                                await queue.put(pb.ModelStreamInferResponse(infer_response=response))
                        stream_record.unknown.join(record.unknown)
                        stream_record.changed_engines |= record.changed_engines
                except PenstockError as error:
                    failed = pb.ModelInferResponse(model_name=request.model_name, id=request.id)
                    await queue.put(
                        pb.ModelStreamInferResponse(error_message=error.failure.message, infer_response=failed)
                    )

            def finished(memory: Reservation | None, task: asyncio.Task[None]) -> None:
                tasks.discard(task)
                slots.release()
                if memory:
                    memory.release()

            async def read() -> None:
                async for raw in requests:
                    await slots.acquire()
                    memory = None
                    if UNCOUNTED_SIZE < len(raw) <= self.max_size:
                        try:
                            memory = await self._memory.reserve(stream_record.sender, len(raw), patience)
                        except PenstockError as error:
                            await queue.put(pb.ModelStreamInferResponse(error_message=error.failure.message))
                            slots.release()
                            continue
                    task = asyncio.create_task(answer(raw, memory))
                    tasks.add(task)
                    task.add_done_callback(partial(finished, memory))

            async def run() -> None:
                reading, stopping = asyncio.create_task(read()), asyncio.create_task(self._stopping.wait())
                try:
                    await asyncio.wait((reading, stopping), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    reading.cancel()
                    stopping.cancel()
                    await asyncio.gather(reading, stopping, return_exceptions=True)
                await asyncio.gather(*tasks)
                await queue.put(None)

            running = asyncio.create_task(run())
            try:
                while (response := await queue.get()) is not None:
                    async with asyncio.timeout(patience):
                        await context.write(response)
                context.set_trailing_metadata(_trailing(stream_record))
            except TimeoutError as error:
                raise PenstockError(Code.TIMEOUT, f"the client read nothing for {patience:g} seconds") from error
            finally:
                for task in (running, *tasks):
                    task.cancel()
                await asyncio.gather(running, *tasks, return_exceptions=True)

    @unary
    async def SystemSharedMemoryStatus(self, request: Any, record: RequestRecord) -> Any:
        result = pb.SystemSharedMemoryStatusResponse()
        for region in self._regions(record).status(request.name):
            result.regions[region["name"]].CopyFrom(pb.SystemSharedMemoryStatusResponse.RegionStatus(**region))
        return result

    @unary
    async def SystemSharedMemoryRegister(self, request: Any, record: RequestRecord) -> Any:
        self._regions(record).register(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    @unary
    async def SystemSharedMemoryUnregister(self, request: Any, record: RequestRecord) -> Any:
        self._regions(record).unregister(request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    @unary
    async def CudaSharedMemoryStatus(self, request: Any, record: RequestRecord) -> Any:
        return pb.CudaSharedMemoryStatusResponse()

    @unary
    async def CudaSharedMemoryRegister(self, request: Any, record: RequestRecord) -> Any:
        raise PenstockError(Code.UNSUPPORTED, NO_CUDA)

    @unary
    async def CudaSharedMemoryUnregister(self, request: Any, record: RequestRecord) -> Any:
        return pb.CudaSharedMemoryUnregisterResponse()  # nothing to do: CUDA regions cannot be registered

    async def _responses(self, request: Any, record: RequestRecord, streamed: bool) -> AsyncGenerator[Any, None]:
        """Run a ``ModelInferRequest``, and yield its ``ModelInferResponse`` messages."""
        model = self._repository.find(request.model_name, request.model_version)
        size, regions = request.ByteSize(), self._regions(record)

        def parse() -> tuple[int, InferenceRequest]:
            return size, messages.parse_infer_request(request, regions)

        infer_request = await self._repository.served_models.parse(record, size, parse)
        empty_last = bool(infer_request.parameters.get(messages.EMPTY_FINAL, False))
        with model.service.admit():
            async with aclosing(run_inference(self._repository, model, infer_request, record, streamed)) as stream:
                async for response in stream:
                    message = messages.build_infer_response(model, infer_request, response, regions)
                    if streamed:
                        message.parameters[messages.FINAL].bool_param = response.last and not empty_last
                    yield message
        if streamed and empty_last:
            last = pb.ModelInferResponse(model_name=model.name, id=infer_request.id)
            last.parameters[messages.FINAL].bool_param = True
            yield last

    @property
    def max_size(self) -> int:
        """Maximum message size, bytes."""
        return self._repository.served_models.max_text_size

    async def receive(self, method: str, requests: AsyncIterator[bytes], record: RequestRecord) -> Any:
        """Read and parse the message of a unary call. A message of ``ModelInfer`` is read once there is memory for the
        largest message. Messages of other methods are small and read at once, so that probes work when memory is short.

        Raises ``PenstockError``: as ``BodyMemory.reserve`` and ``_parse`` do; ``timeout`` if no message arrives.
        """
        patience, maximum = self._repository.served_models.options.client_timeout, MAX_CONTROL_MESSAGE
        if method == "ModelInfer":
            maximum = self.max_size
            record.memory = await self._memory.reserve(record.sender, maximum, patience)
        try:
            async with asyncio.timeout(patience):
                raw = await anext(aiter(requests), None)
        except TimeoutError as error:
            raise PenstockError(Code.TIMEOUT, f"body: no message arrived for {patience:g} seconds") from error
        if raw is None:
            raise PenstockError.of(UNREADABLE)
        if record.memory:
            record.memory.resize(len(raw) if UNCOUNTED_SIZE < len(raw) <= maximum else 0)
        return await self._parse(REQUESTS[method], raw, record, maximum)

    async def _parse(self, kind: Any, raw: bytes, record: RequestRecord, maximum: int) -> Any:
        """Parse a message of the class ``kind``. Raises ``PenstockError``: ``too_large`` beyond ``maximum`` bytes,
        ``invalid`` if ``raw`` is not such a message."""
        if len(raw) > maximum:
            message = f"body: has {len(raw)} bytes; the maximum is {maximum}"
            raise PenstockError(Code.TOO_LARGE, message, "body", maximum)
        try:
            request = await self._repository.served_models.parse(
                record, len(raw), lambda: (MEMORY_FACTOR * len(raw), kind.FromString(raw))
            )
        except DecodeError as error:
            raise PenstockError.of(UNREADABLE) from error
        record.path += f" {model[:100]!r}" if (model := _model_of(request)) else ""
        return request

    def client_of(self, metadata: Iterable[tuple[str, str]] | None) -> Client | None:
        """The client of a call, identified by the API key; None if a required key is missing or wrong."""
        return self._keys.client_of(dict(metadata or ()).get("authorization", "").encode())

    def _regions(self, record: RequestRecord) -> SharedMemory:
        """The shared memory regions of a call's client."""
        return self._repository.memory.of_client(record.tenant, lambda: None)

    @asynccontextmanager
    async def authorized_request(self, context: Any, method: str, quiet: bool = False) -> AsyncIterator[RequestRecord]:
        """Check the API key of a call, yield its record, and log it. A ``PenstockError`` sets the status of the call.

        Args:
            quiet: log successful calls at level debug.
        """
        try:
            async with self.request_record(context, method, quiet or method in PUBLIC_METHODS) as record:
                await self._fair_queue.wait_turn(record.address)
                client = self.client_of(context.invocation_metadata())
                if client is None and method not in PUBLIC_METHODS:
                    raise PenstockError.of(NO_KEY)
                yield record
        except PenstockError as error:
            await context.abort(STATUS[error.failure.code], mask_values(error.failure.message))

    @asynccontextmanager
    async def request_record(
        self, context: Any, method: str, quiet: bool = False, memory: Reservation | None = None
    ) -> AsyncIterator[RequestRecord]:
        """Yield the record of a request; at the end, free the memory of the request and log it. Unexpected exceptions
        are converted to internal errors."""
        metadata = dict(context.invocation_metadata() or ())
        client_id = metadata.get("x-request-id", "")
        request_id = client_id if REQUEST_ID.fullmatch(client_id) else uuid4().hex
        unknown = UnknownFields(self._repository.served_models.options.strict_requests)
        peer = context.peer()
        record = RequestRecord(
            request_id, method, address=peer.rpartition(":")[0], client=peer, memory=memory, unknown=unknown
        )
        if client := self.client_of(context.invocation_metadata()):
            client.enter(record)
        if (tracer := self._repository.served_models.tracer) and not quiet:
            attributes = {
                "rpc.system": "grpc",
                "rpc.service": SERVICE,
                "rpc.method": method,
                "client.address": record.client,
                "penstock.request_id": request_id,
            }
            record.span = tracer.server_span(f"{SERVICE}/{method}", metadata, record.arrived, attributes)
        with log_trace(record.span) if record.span else nullcontext():
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
                record.release_memory()
                self._log(record, quiet)
                if record.span:
                    status = STATUS[record.failure.code] if record.failure else grpc.StatusCode.OK
                    end_rpc(record.span, status.value[0], record.failure)

    def _log(self, record: RequestRecord, quiet: bool) -> None:
        failure = record.failure
        if record.unknown.places and not failure:
            self._unknown_field_log.log(record.request_id, record.address, record.unknown)
        fields = {"id": record.request_id, "seconds": time.monotonic() - record.arrived, **record.log_fields}
        level = logging.INFO
        if failure:
            self._repository.served_models.metrics.record_failure(failure)
            fields |= {"error": failure.code.value, "reason": failure.message}
            level = logging.ERROR if failure.code in (Code.INTERNAL, Code.UNAVAILABLE) else logging.INFO
        elif quiet:
            level = logging.DEBUG
        logger.log(level, "gRPC %s", record.path, extra={"fields": fields})


def _handlers(inference: Inference) -> grpc.GenericRpcHandler:
    """The gRPC handlers of the service's methods. The methods receive messages as bytes."""
    result = {}
    for method in SERVICE_DESCRIPTOR.methods:
        kind = (
            grpc.stream_stream_rpc_method_handler if method.client_streaming else grpc.stream_unary_rpc_method_handler
        )
        response_class = message_factory.GetMessageClass(method.output_type)
        result[method.name] = kind(
            getattr(inference, method.name), response_serializer=response_class.SerializeToString
        )
    return grpc.method_handlers_generic_handler(SERVICE_DESCRIPTOR.full_name, result)


def _check_control(record: RequestRecord) -> None:
    """Raise ``PenstockError`` (``unauthorized``) if the client may not change settings that affect all clients."""
    if not record.may_control:
        raise PenstockError(Code.UNAUTHORIZED, NO_CONTROL)


def _model_of(request: Any) -> str:
    return getattr(request, "model_name", "") or getattr(request, "name", "")


def _trailing(record: RequestRecord) -> tuple[tuple[str, str], ...]:
    fields = (HEADER, record.unknown.header), (RESUMED_HEADER, "; ".join(record.changed_engines))
    return (SERVER, *((name, value) for name, value in fields if value))


def _succeeds(check: Callable[[], None]) -> bool:
    try:
        check()
    except PenstockError:
        return False
    return True
