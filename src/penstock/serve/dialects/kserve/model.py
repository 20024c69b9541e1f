"""What a model is to the protocol: named tensors in, named tensors out, once or as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from penstock.config.settings import did_you_mean
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.serve.http.request_record import RequestRecord
from penstock.serve.models.service import ModelService

from .tensors import BYTES, LARGEST, REAL, WHOLE, Spec, Tensor, kind

VERSION = "1"
"""That of every model."""
MAX_BATCH = 256
"""Rows of one request."""


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One request to a model, its inputs checked against the model's."""

    record: RequestRecord
    inputs: Mapping[str, Tensor]
    """By name. With a batch, each has its dimension first."""
    batch: int | None
    """Rows; None where inputs have no dimension for them."""
    streamed: bool
    """Whether any number of answers is right; otherwise it is one."""
    priority: int = 0
    id: str = ""
    """What its client calls it."""

    @property
    def rows(self) -> int:
        return 1 if self.batch is None else self.batch

    def row(self, name: str, index: int) -> Sequence[Any] | None:
        """The elements that a row has of an input; None where that was not given."""
        if (tensor := self.inputs.get(name)) is None:
            return None
        size = len(tensor.elements) // self.rows
        return tensor.elements[index * size : (index + 1) * size]

    def shape(self, *sizes: int) -> tuple[int, ...]:
        """Of an output that has ``sizes`` in each row."""
        return sizes if self.batch is None else (self.batch, *sizes)


@dataclass(frozen=True, slots=True)
class ModelResponse:
    outputs: list[Tensor]
    last: bool = True
    """Whether no other follows."""


class Model:
    """One model. Others than those here derive from it and are put into the registry."""

    name: str
    platform: ClassVar[str] = "python"
    inputs: ClassVar[tuple[Spec, ...]]
    outputs: ClassVar[tuple[Spec, ...]]
    aliases: ClassVar[Mapping[str, str]] = {}
    """Other names of its inputs."""
    not_yet: ClassVar[Mapping[str, str]] = {}
    """Inputs that are known and refused, with the reason."""
    most_batch: int = MAX_BATCH
    """Rows that a request may have; 0 where inputs have no dimension for them."""
    decoupled: ClassVar[bool] = False
    """Whether a request may have other than one answer."""
    _service: ModelService

    @property
    def service(self) -> ModelService:
        """The model of ours that it is over. Raises ``PenstockError`` (``unavailable``) where there is none."""
        return self._service

    def check(self) -> None:
        """Raises ``PenstockError`` (``unavailable``) where it cannot answer."""
        self.service.gateway.engine.check()

    def answers(self, call: ModelCall) -> AsyncGenerator[ModelResponse, None]:
        """Answer a request. Raises ``PenstockError`` where it is wrong or fails."""
        raise NotImplementedError

    def parameters(self) -> Mapping[str, str]:
        """What its configuration says of it in words."""
        return {}

    def metadata(self) -> dict[str, Any]:
        """As ``/v2/models/NAME`` tells it."""
        head = [-1] if self.most_batch else []

        def told(specs: Iterable[Spec]) -> list[dict[str, Any]]:
            return [{"name": s.name, "datatype": s.datatype, "shape": [*head, *s.shape]} for s in specs]

        return {
            "name": self.name,
            "versions": [VERSION],
            "platform": self.platform,
            "inputs": told(self.inputs),
            "outputs": told(self.outputs),
        }

    def config(self) -> dict[str, Any]:
        """As ``/v2/models/NAME/config`` tells it: Triton's ``ModelConfig`` in JSON."""
        return {
            "name": self.name,
            "platform": "",
            "backend": self.platform,
            "version_policy": {"latest": {"num_versions": 1}},
            "max_batch_size": self.most_batch,
            "input": [
                {"name": s.name, "data_type": _in_config(s), "dims": list(s.shape), "optional": s.optional}
                for s in self.inputs
            ],
            "output": [{"name": s.name, "data_type": _in_config(s), "dims": list(s.shape)} for s in self.outputs],
            "model_transaction_policy": {"decoupled": self.decoupled},
            "parameters": {name: {"string_value": value} for name, value in self.parameters().items()},
        }

    def call(
        self, record: RequestRecord, given: Iterable[Tensor], streamed: bool, priority: int = 0, asked_as: str = ""
    ) -> ModelCall:
        """A request with these inputs.

        Raises ``PenstockError``: ``invalid`` for inputs that are unknown, missing, or of a wrong type or shape,
        ``unsupported`` for those that are not there yet.
        """
        specs = {spec.name: spec for spec in self.inputs}
        found: dict[str, Tensor] = {}
        batches = set()
        for tensor in given:
            if (own := self.aliases.get(tensor.name)) is not None:
                tensor = replace(tensor, name=own)
            if tensor.name in self.not_yet:
                self.check_not_yet(tensor.name, any(tensor.elements))
                continue
            if (spec := specs.get(tensor.name)) is None:
                words = f"unexpected inference input for model '{self.name}'{did_you_mean(tensor.name, specs)}"
                raise invalid(tensor.name[:100], words)
            if tensor.name in found:
                raise invalid(tensor.name, "is given twice")
            batches.add(self._rows(spec, tensor))
            found[tensor.name] = _of_type(spec, tensor)
        if missing := [name for name, spec in specs.items() if not spec.optional and name not in found]:
            raise invalid(missing[0], f"is missing, and model '{self.name}' needs it")
        if len(batches) > 1:
            told = ", ".join(sorted(["none" if rows is None else str(rows) for rows in batches]))
            raise invalid("shape", f"inputs differ in their batch's dimension: {told}")
        return ModelCall(record, found, batches.pop() if batches else None, streamed, priority, asked_as)

    def check_not_yet(self, name: str, asked: bool) -> None:
        """Raise ``PenstockError`` (``unsupported``) where an input that is not there yet is more than zeros."""
        if asked:
            raise PenstockError(Code.UNSUPPORTED, f"{name}: {self.not_yet[name]}", name)

    def _rows(self, spec: Spec, tensor: Tensor) -> int | None:
        """The batch's dimension of an input; None where there is none."""
        shape = tensor.shape
        if len(shape) == len(spec.shape) + 1 and self.most_batch:
            if not 1 <= shape[0] <= self.most_batch:
                words = f"has {shape[0]} rows; model '{self.name}' takes from 1 to {self.most_batch}"
                raise invalid(tensor.name, words, self.most_batch)
            rows, shape = shape[0], shape[1:]
        else:
            rows = None
        if len(shape) != len(spec.shape) or any(w not in (-1, s) for w, s in zip(spec.shape, shape, strict=True)):
            wanted = f"{[-1, *spec.shape] if self.most_batch else list(spec.shape)}"
            raise invalid(tensor.name, f"has the shape {list(tensor.shape)}, and model '{self.name}' expects {wanted}")
        return rows


def _of_type(spec: Spec, tensor: Tensor) -> Tensor:
    """The tensor in its input's own type."""
    if tensor.datatype == spec.datatype:
        return _in_range(tensor)
    if kind(tensor.datatype) != kind(spec.datatype):
        words = f"has the data-type '{tensor.datatype}', and the model expects '{spec.datatype}'"
        raise invalid(spec.name, words)
    return _in_range(Tensor(tensor.name, spec.datatype, tensor.shape, tensor.elements))


def _in_range(tensor: Tensor) -> Tensor:
    """Raises ``PenstockError`` (``invalid``) for numbers that its type does not have, and those that are not finite."""
    if tensor.datatype in REAL:
        most = LARGEST[tensor.datatype]
        if (wrong := next((value for value in tensor.elements if not -most <= value <= most), None)) is not None:
            raise invalid(tensor.name, f"must be a finite number of {tensor.datatype}, is {wrong}")
    if tensor.datatype in WHOLE and tensor.elements:
        bits = int(tensor.datatype.lstrip("UINT"))
        low, high = (0, 2**bits - 1) if tensor.datatype.startswith("U") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        if (least := min(tensor.elements)) < low:
            raise invalid(tensor.name, f"must be at least {low}, is {least}", low)
        if (most := max(tensor.elements)) > high:
            raise invalid(tensor.name, f"must be at most {high}, is {most}", high)
    return tensor


def _in_config(spec: Spec) -> str:
    return "TYPE_STRING" if spec.datatype == BYTES else f"TYPE_{spec.datatype}"
