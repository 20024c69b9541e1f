"""Conversion of the KServe protocol's gRPC messages. Requires the extra ``grpc``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import json_format
from tritonclient.grpc import service_pb2 as pb

from penstock.core.errors import invalid

from .inference import InferenceRequest
from .model import VERSION, Model, ModelResponse
from .shared_memory import SharedMemory, in_memory
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
"""Datatype → field of ``InferTensorContents`` with the elements."""
FINAL = "triton_final_response"
EMPTY_FINAL = "triton_enable_empty_final_response"


def parameters(given: Any) -> dict[str, Any]:
    """Parameter name → value; parameters without a value are dropped."""
    return {name: getattr(value, one) for name, value in given.items() if (one := value.WhichOneof("parameter_choice"))}


def parse_infer_request(request: Any, memory: SharedMemory) -> InferenceRequest:
    """Parse a ``ModelInferRequest``. Raises ``PenstockError`` (``invalid``)."""
    options = [parameters(given.parameters) for given in request.inputs]
    shared = [in_memory(given.name, each) for given, each in zip(request.inputs, options, strict=True)]
    raw = list(request.raw_input_contents)
    if raw and len(raw) != shared.count(False):
        message = (
            f"has {len(raw)} elements; must have one for each of the {shared.count(False)} inputs not in shared memory"
        )
        raise invalid("raw_input_contents", message)
    inputs, contents = [], iter(raw)
    for index, given in enumerate(request.inputs):
        shape = tuple(given.shape)
        if shared[index]:
            inputs.append(from_bytes(given.name, given.datatype, shape, memory.read(given.name, options[index])))
        elif raw:
            inputs.append(from_bytes(given.name, given.datatype, shape, next(contents)))
        else:
            elements = getattr(given.contents, CONTENTS.get(given.datatype, ""), ())
            inputs.append(from_elements(given.name, given.datatype, shape, list(elements)))
    outputs = {output.name: parameters(output.parameters) for output in request.outputs}
    return InferenceRequest(inputs, request.id, outputs, parameters(request.parameters))


def build_infer_response(
    model: Model, infer_request: InferenceRequest, response: ModelResponse, memory: SharedMemory
) -> Any:
    """Build a ``ModelInferResponse``. Outputs requested in shared memory are written to their regions.

    Raises ``PenstockError`` (``invalid``) if a shared memory region is too small.
    """
    result = pb.ModelInferResponse(model_name=model.name, model_version=VERSION, id=infer_request.id)
    for tensor in response.outputs:
        output = result.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        raw, output_parameters = to_bytes(tensor), infer_request.outputs.get(tensor.name, {})
        if in_memory(tensor.name, output_parameters):
            for name, value in memory.write(tensor.name, output_parameters, raw).items():
                setattr(output.parameters[name], "string_param" if isinstance(value, str) else "int64_param", value)
            raw = b""  # keeps raw_output_contents aligned with outputs, which clients index together
        result.raw_output_contents.append(raw)
    return result


def metadata_of(model: Model) -> Any:
    return json_format.ParseDict(model.metadata(), pb.ModelMetadataResponse())


def config_of(model: Model) -> Any:
    return json_format.ParseDict({"config": model.config()}, pb.ModelConfigResponse())


def statistics_of(statistics: list[dict[str, Any]]) -> Any:
    return json_format.ParseDict({"model_stats": statistics}, pb.ModelStatisticsResponse())


def parse_trace_settings(request: Any) -> dict[str, Any]:
    """Name → value of the settings in a ``TraceSettingRequest``; None (no value) resets a setting."""
    settings = {name: list(setting.value) for name, setting in request.settings.items()}
    return {
        name: values if name == "trace_level" and values else next(iter(values), None)
        for name, values in settings.items()
    }


def build_trace_settings(current: Mapping[str, Any]) -> Any:
    result = pb.TraceSettingResponse()
    for name, value in current.items():
        result.settings[name].value.extend(value if isinstance(value, list) else [value])
    return result


def parse_log_settings(request: Any) -> dict[str, Any]:
    """Name → value of the settings in a ``LogSettingsRequest``."""
    return parameters(request.settings)


def build_log_settings(current: Mapping[str, Any]) -> Any:
    result = pb.LogSettingsResponse()
    for name, value in current.items():
        kind = {bool: "bool_param", int: "uint32_param", str: "string_param"}[type(value)]
        setattr(result.settings[name], kind, value)
    return result
