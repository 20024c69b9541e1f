"""Formats of quantized checkpoints: how the matrices of each lie in a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from penstock.core import Code, PenstockError
from penstock.core.quantization import Format
from penstock.ops import QuantizedWeight


class TensorSource(Protocol):
    """Tensors of a checkpoint by name; ``layers.Weights`` documents them."""

    def read(self, name: str, *shape: int, rows: tuple[int, int] | None = None, as_stored: bool = False) -> Tensor: ...
    def has(self, name: str) -> bool: ...


class CheckpointFormat(Protocol):
    """Reads the matrices of a quantized checkpoint. Each module of ``quant/`` that has one makes it of the
    checkpoint's ``quantization_config``."""

    def format_of(self, source: TensorSource, name: str) -> Format:
        """The format of a matrix; ``UNQUANTIZED`` where the checkpoint has it as a tensor ``<name>.weight`` of
        floating-point numbers. Reads nothing but the names of tensors.

        Args:
            name: without ``.weight``.
        """
        ...

    def read(
        self, source: TensorSource, name: str, outputs: int, inputs: int, rows: tuple[int, int]
    ) -> QuantizedWeight:
        """Outputs from ``rows[0]`` to ``rows[1]`` of a matrix ``[outputs, inputs]`` that is quantized.

        Raises ``PenstockError`` (``invalid``) where its tensors are missing, damaged, or of other shapes or kinds.
        """
        ...


def read_quantization_config(config: Mapping[str, Any]) -> CheckpointFormat:
    """The format that a ``quantization_config`` describes.

    Raises ``PenstockError``: ``unsupported`` for a format, or a variant of it, that is not read; ``invalid`` where the
    description is broken.
    """
    method = config.get("quant_method")
    raise PenstockError(Code.UNSUPPORTED, f"quantized weights of {method!r} are not read", "model")
