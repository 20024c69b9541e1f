"""One request of the protocol, be it over HTTP or gRPC: from its parts to a model's answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from penstock.core.errors import invalid
from penstock.core.settings import nearest
from penstock.serve.record import Record

from .model import Answer, Model
from .registry import Registry
from .tensors import Tensor

NO_MEMORY = "shared memory is not supported yet; send tensors in requests"
SHARED = ("shared_memory_region", "shared_memory_byte_size", "shared_memory_offset")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request's parts."""

    inputs: list[Tensor]
    id: str = ""
    outputs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Parameters of the outputs that are wanted, by name; none are all."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Those of the protocol act; others are the model's in Triton, and these models have none."""


async def answers(
    registry: Registry, model: Model, asked: Asked, record: Record, streamed: bool
) -> AsyncGenerator[Answer, None]:
    """A model's answers to a request, one unless it is ``streamed``, with the outputs that are wanted.

    Raises ``PenstockError`` where the request is wrong or fails.
    """
    names = [spec.name for spec in model.outputs]
    for name in asked.outputs:
        if name not in names:
            words = f"unexpected inference output for model '{model.name}'{nearest(name, names)}"
            raise invalid(name[:100], words)
    if asked.parameters.get("sequence_id"):
        raise invalid("sequence_id", f"model '{model.name}' keeps no state between requests")
    priority = asked.parameters.get("priority", 0)
    if type(priority) is not int or not 0 <= priority < 2**31:
        raise invalid("priority", "must be a whole number from 0 on")
    call = model.call(record, asked.inputs, streamed, priority, asked.id)
    with registry.counts.counted(model, record, call):
        async with aclosing(model.answers(call)) as found:
            async for answer in found:
                if asked.outputs:
                    wanted = [tensor for tensor in answer.outputs if tensor.name in asked.outputs]
                    answer = Answer(wanted, answer.last)
                yield answer


def check_memory(name: str, parameters: Mapping[str, Any]) -> None:
    """Raises ``PenstockError`` (``invalid``) for a tensor in shared memory."""
    if any(key in parameters for key in SHARED):
        raise invalid(name, "is in shared memory, which is not supported yet; send it in the request")
