"""The protocol's gRPC messages, to and from what the rest of this package speaks. Needs the extra ``grpc``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import json_format
from tritonclient.grpc import service_pb2 as pb

from penstock.core.errors import invalid

from .inference import Asked, check_memory
from .model import VERSION, Answer, Model
from .tensors import from_bytes, from_elements, to_bytes

CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""By datatype, where elements stand that are not sent in bytes."""
FINAL = "triton_final_response"
EMPTY_FINAL = "triton_enable_empty_final_response"


def parameters(given: Any) -> dict[str, Any]:
    """Values by name; a parameter that holds none is none."""
    return {name: getattr(value, one) for name, value in given.items() if (one := value.WhichOneof("parameter_choice"))}


def asked_of(request: Any) -> Asked:
    """A ``ModelInferRequest``'s parts. Raises ``PenstockError`` (``invalid``) where they are wrong."""
    raw = list(request.raw_input_contents)
    if raw and len(raw) != len(request.inputs):
        raise invalid("raw_input_contents", f"has {len(raw)} elements, and there are {len(request.inputs)} inputs")
    inputs = []
    for index, given in enumerate(request.inputs):
        check_memory(given.name, parameters(given.parameters))
        shape = tuple(given.shape)
        if raw:
            inputs.append(from_bytes(given.name, given.datatype, shape, raw[index]))
        else:
            elements = getattr(given.contents, CONTENTS.get(given.datatype, ""), ())
            inputs.append(from_elements(given.name, given.datatype, shape, list(elements)))
    outputs = {output.name: parameters(output.parameters) for output in request.outputs}
    for name, found in outputs.items():
        check_memory(name, found)
    return Asked(inputs, request.id, outputs, parameters(request.parameters))


def response_of(model: Model, asked: Asked, answer: Answer) -> Any:
    """A ``ModelInferResponse``."""
    found = pb.ModelInferResponse(model_name=model.name, model_version=VERSION, id=asked.id)
    for tensor in answer.outputs:
        found.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        found.raw_output_contents.append(to_bytes(tensor))
    return found


def metadata_of(model: Model) -> Any:
    return json_format.ParseDict(model.metadata(), pb.ModelMetadataResponse())


def config_of(model: Model) -> Any:
    return json_format.ParseDict({"config": model.config()}, pb.ModelConfigResponse())


def statistics_of(found: list[dict[str, Any]]) -> Any:
    return json_format.ParseDict({"model_stats": found}, pb.ModelStatisticsResponse())


def wanted_trace(request: Any, current: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a ``TraceSettingRequest``: lists where ``current`` has lists."""
    found = {name: list(setting.value) for name, setting in request.settings.items()}
    return {
        name: values if isinstance(current.get(name), list) else values[0] for name, values in found.items() if values
    }


def trace_of(current: Mapping[str, Any]) -> Any:
    found = pb.TraceSettingResponse()
    for name, value in current.items():
        found.settings[name].value.extend(value if isinstance(value, list) else [value])
    return found


def wanted_log(request: Any) -> dict[str, Any]:
    """The settings of a ``LogSettingsRequest``."""
    return parameters(request.settings)


def log_of(current: Mapping[str, Any]) -> Any:
    found = pb.LogSettingsResponse()
    for name, value in current.items():
        kind = {bool: "bool_param", int: "uint32_param", str: "string_param"}[type(value)]
        setattr(found.settings[name], kind, value)
    return found
