"""Base class of KServe models: named input tensors, and one or several responses with named output tensors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.core.spelling import did_you_mean
from penstock.serve.http.request_record import RequestRecord
from penstock.serve.models.served_models import ServedModel

from .tensors import BYTES, FLOAT_CODES, INTEGER_CODES, MAX_VALUES, Spec, Tensor, kind

VERSION = "1"
"""Version that every model has."""
MAX_BATCH_SIZE = 256
"""Maximum number of rows in a request."""


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One request to a model, with validated inputs."""

    record: RequestRecord
    inputs: Mapping[str, Tensor]
    """Input name → tensor. The first dimension is the batch dimension if ``batch`` is not None."""
    batch: int | None
    """Batch size; None without a batch dimension."""
    streamed: bool
    """True: any number of responses may be sent (decoupled); False: exactly one."""
    priority: int = 0
    id: str = ""
    """Request id chosen by the client."""

    @property
    def rows(self) -> int:
        """Number of rows: the batch size, or 1 without a batch dimension."""
        return 1 if self.batch is None else self.batch

    def row(self, name: str, index: int) -> Sequence[Any] | None:
        """The elements of one row of an input; None if the input is absent."""
        if (tensor := self.inputs.get(name)) is None:
            return None
        size = len(tensor.elements) // self.rows
        return tensor.elements[index * size : (index + 1) * size]

    def shape(self, *sizes: int) -> tuple[int, ...]:
        """The shape of an output whose rows have the shape ``sizes``."""
        return sizes if self.batch is None else (self.batch, *sizes)


@dataclass(frozen=True, slots=True)
class ModelResponse:
    outputs: list[Tensor]
    last: bool = True
    """True for the last response."""


class Model(ABC):
    """A model of the KServe model repository."""

    name: str
    platform: ClassVar[str] = "python"
    inputs: ClassVar[tuple[Spec, ...]]
    outputs: ClassVar[tuple[Spec, ...]]
    aliases: ClassVar[Mapping[str, str]] = {}
    """Alternative input name → input name."""
    unsupported_inputs: ClassVar[Mapping[str, str]] = {}
    """Unsupported input → reason, for the error message."""
    neutral_inputs: ClassVar[Mapping[str, tuple[float, ...]]] = {}
    """Unsupported input → values that have no effect and are accepted, in addition to zero and false."""
    max_batch_size: int = MAX_BATCH_SIZE
    """Maximum number of rows; 0: no batch dimension."""
    decoupled: ClassVar[bool] = False
    """True: a request may have any number of responses; False: exactly one."""
    _service: ServedModel

    @property
    def service(self) -> ServedModel:
        """The served model that computes requests. Raises ``PenstockError`` (``unavailable``) if no model is loaded."""
        return self._service

    def check(self) -> None:
        """Raise ``PenstockError`` (``unavailable``) if the model cannot serve requests."""
        self.service.gateway.engine_pool.require_engine()

    @abstractmethod
    def infer(self, call: ModelCall) -> AsyncGenerator[ModelResponse, None]:
        """Yield the responses to a request. Raises ``PenstockError`` if the request is invalid or fails."""

    def parameters(self) -> Mapping[str, str]:
        """The ``parameters`` of the model's configuration."""
        return {}

    def metadata(self) -> dict[str, Any]:
        """The metadata that ``/v2/models/NAME`` returns."""
        head = [-1] if self.max_batch_size else []

        def describe(specs: Iterable[Spec]) -> list[dict[str, Any]]:
            return [{"name": s.name, "datatype": s.datatype, "shape": [*head, *s.shape]} for s in specs]

        return {
            "name": self.name,
            "versions": [VERSION],
            "platform": self.platform,
            "inputs": describe(self.inputs),
            "outputs": describe(self.outputs),
        }

    def config(self) -> dict[str, Any]:
        """The configuration that ``/v2/models/NAME/config`` returns: Triton's ``ModelConfig`` as JSON."""
        return {
            "name": self.name,
            "platform": "",
            "backend": self.platform,
            "version_policy": {"latest": {"num_versions": 1}},
            "max_batch_size": self.max_batch_size,
            "input": [
                {"name": s.name, "data_type": _in_config(s), "dims": list(s.shape), "optional": s.optional}
                for s in self.inputs
            ],
            "output": [{"name": s.name, "data_type": _in_config(s), "dims": list(s.shape)} for s in self.outputs],
            "model_transaction_policy": {"decoupled": self.decoupled},
            "parameters": {name: {"string_value": value} for name, value in self.parameters().items()},
        }

    def prepare_call(
        self, record: RequestRecord, given: Iterable[Tensor], streamed: bool, priority: int = 0, request_id: str = ""
    ) -> ModelCall:
        """Validate the inputs of a request.

        Raises ``PenstockError``: ``invalid`` for unknown or missing inputs and wrong types or shapes; ``unsupported``
        for ``unsupported_inputs``.
        """
        specs = {spec.name: spec for spec in self.inputs}
        result: dict[str, Tensor] = {}
        batches = set()
        for tensor in given:
            if (canonical_name := self.aliases.get(tensor.name)) is not None:
                tensor = replace(tensor, name=canonical_name)
            if tensor.name in self.unsupported_inputs:
                neutral = self.neutral_inputs.get(tensor.name, ())
                self.check_supported_input(
                    tensor.name, any(each and not _near(each, neutral) for each in tensor.elements)
                )
                continue
            if (spec := specs.get(tensor.name)) is None:
                message = f"unexpected inference input for model '{self.name}'{did_you_mean(tensor.name, specs)}"
                raise invalid(tensor.name[:100], message)
            if tensor.name in result:
                raise invalid(tensor.name, "is given twice; give each input once")
            batches.add(self._rows(spec, tensor))
            result[tensor.name] = _of_type(spec, tensor)
        if missing := [name for name, spec in specs.items() if not spec.optional and name not in result]:
            raise invalid(missing[0], f"is missing; model '{self.name}' requires it")
        if len(batches) > 1:
            sizes = ", ".join(sorted(["none" if rows is None else str(rows) for rows in batches]))
            raise invalid("shape", f"all inputs must have the same batch size; their batch sizes are {sizes}")
        return ModelCall(record, result, batches.pop() if batches else None, streamed, priority, request_id)

    def check_supported_input(self, name: str, given: bool) -> None:
        """Raise ``PenstockError`` (``unsupported``) if an unsupported input is given with an effective value."""
        if given:
            raise PenstockError(Code.UNSUPPORTED, f"{name}: {self.unsupported_inputs[name]}", name)

    def _rows(self, spec: Spec, tensor: Tensor) -> int | None:
        """The batch size of an input; None without a batch dimension."""
        shape = tensor.shape
        if len(shape) == len(spec.shape) + 1 and self.max_batch_size:
            if not 1 <= shape[0] <= self.max_batch_size:
                message = f"has {shape[0]} rows; model '{self.name}' accepts 1 to {self.max_batch_size}"
                raise invalid(tensor.name, message, self.max_batch_size)
            rows, shape = shape[0], shape[1:]
        else:
            rows = None
        if len(shape) != len(spec.shape) or any(w not in (-1, s) for w, s in zip(spec.shape, shape, strict=True)):
            expected = f"{[-1, *spec.shape] if self.max_batch_size else list(spec.shape)}"
            raise invalid(tensor.name, f"has the shape {list(tensor.shape)}; model '{self.name}' expects {expected}")
        return rows


def _near(value: Any, neutral: Iterable[float]) -> bool:
    """True if a value equals one of ``neutral`` up to the precision of FP32."""
    return any(isinstance(value, int | float) and math.isclose(value, each, rel_tol=1e-6) for each in neutral)


def _of_type(spec: Spec, tensor: Tensor) -> Tensor:
    """Convert a tensor to the datatype of the input."""
    if tensor.datatype == spec.datatype:
        return _in_range(tensor)
    if kind(tensor.datatype) != kind(spec.datatype):
        message = f"has the data-type '{tensor.datatype}'; the model expects '{spec.datatype}'"
        raise invalid(spec.name, message)
    return _in_range(Tensor(tensor.name, spec.datatype, tensor.shape, tensor.elements))


def _in_range(tensor: Tensor) -> Tensor:
    """Raise ``PenstockError`` (``invalid``) for numbers that are not finite or out of the range of the datatype."""
    if tensor.datatype in FLOAT_CODES:
        maximum = MAX_VALUES[tensor.datatype]
        if (wrong := next((value for value in tensor.elements if not -maximum <= value <= maximum), None)) is not None:
            message = f"must be finite numbers from {-maximum:g} to {maximum:g} ({tensor.datatype}), has {wrong}"
            raise invalid(tensor.name, message)
    if tensor.datatype in INTEGER_CODES and tensor.elements:
        bits = int(tensor.datatype.lstrip("UINT"))
        low, high = (0, 2**bits - 1) if tensor.datatype.startswith("U") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        if (minimum := min(tensor.elements)) < low:
            raise invalid(tensor.name, f"must be at least {low}, is {minimum}", low)
        if (maximum := max(tensor.elements)) > high:
            raise invalid(tensor.name, f"must be at most {high}, is {maximum}", high)
    return tensor


def _in_config(spec: Spec) -> str:
    return "TYPE_STRING" if spec.datatype == BYTES else f"TYPE_{spec.datatype}"
