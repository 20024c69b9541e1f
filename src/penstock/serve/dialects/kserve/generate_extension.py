"""Triton's generate extension: inputs and outputs as fields of one JSON object."""

from __future__ import annotations

from typing import Any

from penstock.core.errors import invalid
from penstock.serve.http.unknown_fields import UnknownFields

from .inference import InferenceRequest
from .model import VERSION, Model, ModelResponse
from .tensors import Tensor, from_json, in_json, to_json


def from_fields(model: Model, document: dict[str, Any], unknown: UnknownFields) -> InferenceRequest:
    """Parse a JSON object with one field per input. Inputs may also be in the field ``parameters``.

    Args:
        unknown: collects fields that are not inputs. Triton passes them to the model; Penstock's models ignore them.

    Raises ``PenstockError`` (``invalid``) for wrong types or values.
    """
    fields = dict(document)
    parameters = fields.pop("parameters", None) or {}
    if not isinstance(parameters, dict):
        raise invalid("parameters", f"must be a JSON object, is {str(parameters)[:50]!r}")
    if both := fields.keys() & parameters.keys():
        raise invalid(min(both), "is given both as a field and in parameters; leave one out")
    fields |= parameters
    request_id = fields.pop("id", "")
    if not isinstance(request_id, str | int):
        raise invalid("id", f"must be a string or an integer, is {str(request_id)[:50]!r}")
    types = {spec.name: spec.datatype for spec in model.inputs}
    inputs: list[Tensor] = []
    for name, value in fields.items():
        if name in model.unsupported_inputs:
            model.check_supported_input(name, bool(value))
            continue
        if (input_name := model.aliases.get(name, name)) not in types:
            unknown.ignore("", name, types, value=value)
        elif value is not None:
            shape = [len(value)] if isinstance(value, list) else [1]
            inputs.append(from_json(name, types[input_name], shape, value))
    return InferenceRequest(inputs, str(request_id))


async def to_fields(model: Model, infer_request: InferenceRequest, response: ModelResponse) -> dict[str, Any]:
    """Convert the outputs of a response to fields. The field of an output with one element is a value, not a list."""
    result: dict[str, Any] = {"id": infer_request.id} if infer_request.id else {}
    result |= {"model_name": model.name, "model_version": VERSION}
    result |= {"sequence_id": 0, "sequence_start": False, "sequence_end": False}
    for tensor in response.outputs:
        result[tensor.name] = to_json(tensor)[0] if len(tensor.elements) == 1 else await in_json(tensor)
    return result
