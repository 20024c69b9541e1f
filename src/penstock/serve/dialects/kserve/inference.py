"""Inference requests, over HTTP or gRPC."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from penstock.core.errors import invalid
from penstock.core.spelling import did_you_mean
from penstock.serve.http.request_record import RequestRecord

from .model import Model, ModelResponse
from .repository import ModelRepository
from .tensors import Tensor

PARAMETERS = frozenset(
    "sequence_id sequence_start sequence_end priority timeout binary_data_output "
    "triton_enable_empty_final_response triton_final_response".split()
)
"""Request parameters defined by the protocol or Triton. The models define no other parameters."""


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    inputs: list[Tensor]
    id: str = ""
    outputs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Requested output → its parameters; empty: all outputs."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Request parameters; names that are not in ``PARAMETERS`` are ignored and reported."""


async def run_inference(
    repository: ModelRepository, model: Model, infer_request: InferenceRequest, record: RequestRecord, streamed: bool
) -> AsyncGenerator[ModelResponse, None]:
    """Run a request, and yield responses with the requested outputs: exactly one unless ``streamed``.

    Raises ``PenstockError`` if the request is invalid or fails.
    """
    names = [spec.name for spec in model.outputs]
    for name in infer_request.outputs:
        if name not in names:
            message = f"unexpected inference output for model '{model.name}'{did_you_mean(name, names)}"
            raise invalid(name[:100], message)
    if infer_request.parameters.get("sequence_id"):
        raise invalid("sequence_id", f"model '{model.name}' keeps no state between requests; leave sequence_id out")
    priority = infer_request.parameters.get("priority", 0)
    if type(priority) is not int or not 0 <= priority < 2**31:
        raise invalid("priority", f"must be an integer from 0 to 2147483647, is {str(priority)[:50]}")
    for name in infer_request.parameters.keys() - PARAMETERS:
        record.unknown.ignore("parameters.", name, PARAMETERS, value=infer_request.parameters[name])
    call = model.prepare_call(record, infer_request.inputs, streamed, priority, infer_request.id)
    with repository.counts.count_request(model, record, call):
        async with aclosing(model.infer(call)) as stream:
            async for response in stream:
                if infer_request.outputs:
                    requested = [tensor for tensor in response.outputs if tensor.name in infer_request.outputs]
                    response = ModelResponse(requested, response.last)
                yield response
