"""gRPC requests for fuzzing: valid messages for every method of KServe's service, and mutated messages and bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from fuzz_requests import FIELDS, PADDLE, PROMPT, REGION, damage
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from tritonclient.grpc import service_pb2 as pb

from penstock.core.errors import INTERNAL

FAULTS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
CLIENT_DEADLINE = "Internal error from Core"
"""Details of the error that gRPC's client reports if its deadline passes during a write."""
MODELS = ("ensemble", "tensorrt_llm_bls", "preprocessing", "tensorrt_llm", "postprocessing", "model")
METADATA = (("x-request-id", "same"), ("x-request-id", "\x7f"), ("authorization", "TOKEN"), ("x-api-key", "x" * 2000))


def tensor(name: str, datatype: str, *values: Any, shape: tuple[int, ...] = (1, 1)) -> dict[str, Any]:
    kinds = {"INT32": "int_contents", "FP32": "fp32_contents", "BOOL": "bool_contents", "BYTES": "bytes_contents"}
    return {"name": name, "datatype": datatype, "shape": list(shape), "contents": {kinds[datatype]: list(values)}}


def infer(model: str, *inputs: dict[str, Any], **more: Any) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model, **more)
    for each in inputs:
        contents = pb.InferTensorContents(**each["contents"])
        request.inputs.add(name=each["name"], datatype=each["datatype"], shape=each["shape"], contents=contents)
    return request


TEXT = (tensor("text_input", "BYTES", PROMPT.encode()), tensor("max_tokens", "INT32", 2))
IDS = (
    tensor("input_ids", "INT32", 5, 6, 7, shape=(1, 3)),
    tensor("input_lengths", "INT32", 3),
    tensor("request_output_len", "INT32", 2),
)
RAW = infer("ensemble", *TEXT, id="b")
for each in RAW.inputs:
    each.ClearField("contents")
RAW.raw_input_contents.extend([len(PROMPT).to_bytes(4, "little") + PROMPT.encode(), b"\2\0\0\0"])
ENDING = infer("ensemble", *TEXT, tensor("stop_words", "BYTES", b"a", b"b", shape=(1, 2)), id="c")
ENDING.parameters["triton_enable_empty_final_response"].bool_param = True
SHARED = infer("preprocessing", tensor("QUERY", "BYTES", b"x"), tensor("REQUEST_OUTPUT_LEN", "INT32"))
SHARED.inputs[1].ClearField("contents")
SHARED.inputs[1].parameters["shared_memory_region"].string_param = "r"
SHARED.inputs[1].parameters["shared_memory_byte_size"].int64_param = 4
ASKED = json.dumps([PADDLE | {"text": PROMPT}]).encode()
LOAD = pb.RepositoryModelLoadRequest(model_name="ensemble")
LOAD.parameters["config"].string_param = '{"max_batch_size": 8}'
UNLOAD = pb.RepositoryModelUnloadRequest(model_name="tensorrt_llm")
UNLOAD.parameters["unload_dependents"].bool_param = True

BASES: list[tuple[str, Any]] = [
    *(("ServerLive", pb.ServerLiveRequest()), ("ServerReady", pb.ServerReadyRequest())),
    *(("ServerMetadata", pb.ServerMetadataRequest()), ("RepositoryIndex", pb.RepositoryIndexRequest(ready=True))),
    ("ModelReady", pb.ModelReadyRequest(name="ensemble", version="1")),
    ("ModelMetadata", pb.ModelMetadataRequest(name="ensemble")),
    ("ModelConfig", pb.ModelConfigRequest(name="ensemble")),
    ("ModelStatistics", pb.ModelStatisticsRequest(name="ensemble")),
    ("RepositoryModelLoad", LOAD),
    ("RepositoryModelUnload", UNLOAD),
    ("TraceSetting", json_format.ParseDict({"settings": {"trace_rate": {"value": ["9"]}}}, pb.TraceSettingRequest())),
    ("LogSettings", json_format.ParseDict({"settings": {"log_info": {"boolParam": True}}}, pb.LogSettingsRequest())),
    ("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest()),
    ("SystemSharedMemoryRegister", pb.SystemSharedMemoryRegisterRequest(name="g", key=REGION, byte_size=64)),
    ("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(name="g")),
    ("CudaSharedMemoryStatus", pb.CudaSharedMemoryStatusRequest()),
    ("CudaSharedMemoryRegister", pb.CudaSharedMemoryRegisterRequest(name="g", raw_handle=b"x", byte_size=4)),
    ("CudaSharedMemoryUnregister", pb.CudaSharedMemoryUnregisterRequest()),
    *(
        ("ModelInfer", request)
        for request in (infer("ensemble", *TEXT, id="a"), RAW, SHARED, infer("tensorrt_llm", *IDS))
    ),
    ("ModelInfer", infer("model", tensor("IN", "BYTES", ASKED, shape=(1,)))),
    (
        "ModelInfer",
        infer(
            "postprocessing",
            tensor("TOKENS_BATCH", "INT32", 5, 6, shape=(1, 1, 2)),
            tensor("SEQUENCE_LENGTH", "INT32", 2),
        ),
    ),
    *(("ModelStreamInfer", request) for request in (infer("tensorrt_llm_bls", *TEXT, id="a"), ENDING)),
    ("ModelStreamInfer", infer("model", tensor("IN", "BYTES", ASKED, shape=(1,)))),
]
SETTINGS = ("RepositoryModelLoad", "TraceSetting", "LogSettings")
"""Methods that change settings: the valid request is sent after each mutated one to restore them."""

INTEGERS = (0, 1, -1, 2, 7, 100, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63), 2**64 - 1)
TEXTS = (
    *MODELS,
    *FIELDS,
    "",
    "x",
    "0",
    "1",
    "null",
    "\0",
    "🦊",
    "../../etc/passwd",
    "{",
    "[]",
    "x" * 5000,
    "INT32",
    "FP32",
)
TEXTS += ("BYTES", "BOOL", "UINT64", "config", "file:a", "sequence_id", "priority", "trace_level", "OFF", "r", REGION)
BYTES = (
    b"",
    b"x",
    b"\xff" * 9,
    b"\0" * 64,
    b"\xff\xff\xff\x7f",
    ASKED,
    b"[{}]",
    b"[" * 5000,
    b"x" * 5000,
    "é🦊".encode(),
)
VALUES: dict[int, tuple[Any, ...]] = {
    **dict.fromkeys((FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT), (0.0, -1.0, 1e30, float("nan"))),
    FieldDescriptor.CPPTYPE_BOOL: (True, False),
    FieldDescriptor.CPPTYPE_STRING: TEXTS,
}
BITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64),
}
"""Smallest value, and smallest value that is too large, by field type."""


def value(field: FieldDescriptor, rng: random.Random) -> Any:
    """A random value that the field can hold."""
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.choice(BYTES)
    if field.cpp_type in BITS:
        least, end = BITS[field.cpp_type]
        return rng.choice([number for number in INTEGERS if least <= number < end])
    return rng.choice(VALUES[field.cpp_type])


def parts(message: Any) -> Iterator[Any]:
    """A message and all messages nested in it."""
    yield message
    for field, held in message.ListFields():
        if field.cpp_type != FieldDescriptor.CPPTYPE_MESSAGE:
            continue
        if field.message_type.GetOptions().map_entry:
            kind = field.message_type.fields_by_name["value"].cpp_type
            inner = list(held.values()) if kind == FieldDescriptor.CPPTYPE_MESSAGE else []
        else:
            inner = list(held) if isinstance(held, list) or hasattr(held, "add") else [held]
        for each in inner:
            yield from parts(each)


def mutate(message: Any, rng: random.Random) -> None:
    """Change one random field of a message or of a nested message."""
    part = rng.choice([part for part in parts(message) if part.DESCRIPTOR.fields] or [message])
    if not part.DESCRIPTOR.fields:
        return
    field = rng.choice(part.DESCRIPTOR.fields)
    is_message = field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE
    held = getattr(part, field.name)
    if is_message and field.message_type.GetOptions().map_entry:
        map_value = field.message_type.fields_by_name["value"]
        key = rng.choice((*held, *TEXTS)) if held else rng.choice(TEXTS)
        if map_value.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            entry = held[key]
            inner = rng.choice(map_value.message_type.fields)
            new = value(inner, rng)
            if hasattr(getattr(entry, inner.name), "extend"):
                getattr(entry, inner.name).extend([new] * rng.choice((1, 2)))
            else:
                setattr(entry, inner.name, new)
        else:
            held[key] = value(map_value, rng)
    elif hasattr(held, "extend"):  # a repeated field
        if held and rng.random() < 0.4:
            del held[rng.randrange(len(held))]
        elif held and rng.random() < 0.4:
            held.extend([held[rng.randrange(len(held))]] * rng.choice((1, 1, 300)))
        elif is_message:
            held.add()
        else:
            held.append(value(field, rng))
    elif is_message or rng.random() < 0.2:
        part.ClearField(field.name)
    else:
        setattr(part, field.name, value(field, rng))


@dataclass
class Call:
    """A call to send: its method, and the serialized messages of its request (several only for a stream)."""

    method: str
    messages: list[bytes]
    metadata: tuple[tuple[str, str], ...] = ()
    timeout: float | None = None
    """Seconds after which the client disconnects; None: it waits for the response."""

    def __str__(self) -> str:
        return f"gRPC {self.method} {self.metadata} {[message[:600] for message in self.messages]}"


def draw_call(seed: int, number: int) -> Call:
    """Call number ``number`` of the random sequence of a seed."""
    rng = random.Random(f"gRPC {seed} {number}")
    method, base = rng.choice(BASES)
    call = Call(method, [])
    for _ in range(rng.choice((1, 2, 5)) if method == "ModelStreamInfer" else 1):
        message = type(base)()
        message.CopyFrom(base)
        for _ in range(rng.choice((0, 1, 1, 2, 4))):
            mutate(message, rng)
        raw = message.SerializeToString()
        call.messages.append(damage(raw, rng) if rng.random() < 0.15 else raw)
    if rng.random() < 0.1:
        call.metadata = (rng.choice(METADATA[:1] + METADATA[2:]),)
    if rng.random() < 0.04:
        call.timeout = rng.uniform(0, 0.05)
    return call


async def check(channel: grpc.aio.Channel, deadline: float) -> None:
    """Assert that every method has a base request, and that the base requests are answered as expected."""
    methods = {method.name for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods}
    assert methods == {method for method, _ in BASES}
    for method, base in BASES:
        status, fault = await send(channel, Call(method, [base.SerializeToString()]), deadline)
        expected = "UNIMPLEMENTED" if method in ("RepositoryModelUnload", "CudaSharedMemoryRegister") else "OK"
        assert (status, fault) == (f"gRPC {expected}", ""), (method, base, status, fault)


async def send(channel: grpc.aio.Channel, call: Call, deadline: float) -> tuple[str, str]:
    """Send a call; return its status, and its fault (empty: no fault)."""
    kind = channel.stream_stream if call.method == "ModelStreamInfer" else channel.unary_unary
    method: Callable[..., Any] = kind(f"/inference.GRPCInferenceService/{call.method}")  # without serializers: bytes
    options = {"timeout": call.timeout or deadline, "metadata": call.metadata}
    fault = ""
    try:
        if call.method == "ModelStreamInfer":
            async for response in method(iter(call.messages), **options):
                failed = pb.ModelStreamInferResponse.FromString(response).error_message
                if failed == INTERNAL.message:
                    fault = f"the stream has the error {failed}"
        else:
            await method(call.messages[0], **options)
    except grpc.aio.AioRpcError as error:
        code = error.code()
        if call.timeout and error.details() == CLIENT_DEADLINE:
            return "gRPC left", ""
        if code in FAULTS or (code is grpc.StatusCode.DEADLINE_EXCEEDED and not call.timeout):
            fault = f"{code.name} {error.details()}"
        return f"gRPC {'left' if call.timeout else code.name}", fault
    return "gRPC OK", fault
