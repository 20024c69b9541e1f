"""Matrices of a checkpoint that linear layers of a transformers module are packed from, without loading the parameters
of the module."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from penstock.config.progress import track
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.core.quantization import UNQUANTIZED
from penstock.layers import BuildContext
from penstock.layers.context import is_finite
from penstock.ops import QuantizedWeight

from ..weights import Checkpoint
from .conversions import Conversions, ExpertNames, stored_experts

logger = logging.getLogger(__name__)

PARTS = ("weight", "weight_packed", "qweight")
"""Suffixes of the tensors with the numbers of a quantized matrix."""
BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of the tensors of an mxfp4 matrix, which follow its name without a dot."""


class WeightSources:
    """The state dict that ``from_pretrained`` loads, and the checkpoint's matrix of each linear layer.

    Parameters of linear layers that the checkpoint stores as one matrix are loaded as placeholders, which take no
    memory. Other quantized matrices, such as parts of a merged projection, are dequantized when transformers reads
    them.

    Args:
        model: the model on the meta device.
    """

    def __init__(self, context: BuildContext, checkpoint: Checkpoint, model: Any) -> None:
        self._context, self._checkpoint = context, checkpoint
        self._stored: dict[int, tuple[str, Tensor]] = {}
        """Address of a placeholder → name in the checkpoint, and the placeholder."""
        self._conversions = Conversions(model)
        self._parameters: dict[str, Tensor] = model.state_dict(keep_vars=True)
        self._linears = dict(_linears(model))
        tied = model.get_expanded_tied_weights_keys(all_submodels=True)
        self._tied = {*tied, *tied.values()}
        self.experts: dict[str, ExpertNames] = {}
        """Names in the checkpoint, by module, of experts whose parameters are placeholders."""
        self.state = self._read(model)

    def of(self, linear: nn.Module) -> str | None:
        """The name in the checkpoint, without ``.weight``, of the matrix of a linear layer whose parameter is a
        placeholder."""
        weight: Any = linear.weight
        return self._stored[weight.data_ptr()][0] if self._is_placeholder(weight) else None

    def move(self, model: nn.Module, device: torch.device) -> None:
        """Move a model to a device, except for placeholders."""
        for weight in model.parameters():
            if not self._is_placeholder(weight):
                weight.data = weight.data.to(device)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)

    def check(self, model: nn.Module) -> None:
        """Raise ``AssertionError`` if a parameter of a model with packed linear layers is a placeholder."""
        left = [name for name, weight in model.named_parameters() if self._is_placeholder(weight)]
        assert not left, f"{left[0]} has no weights"

    def _is_placeholder(self, weight: Tensor) -> bool:
        return weight.device.type == "cpu" and weight.data_ptr() in self._stored

    def _read(self, model: nn.Module) -> dict[str, Any]:
        checkpoint, state = self._checkpoint, dict[str, Any]()
        known = dict.fromkeys(quantized_matrices(checkpoint))
        left = [name for name in checkpoint.names if name.endswith(".bias") or known.keys().isdisjoint(_modules(name))]
        keys = {checkpoint.stored_name(self._tensor_of(name)): name for name in known}
        plain = {checkpoint.stored_name(name): name for name in left}
        weights = {key: name.removesuffix(".weight") for key, name in plain.items() if name.endswith(".weight")}
        loaded = set[str]()
        for stored in stored_experts(model, self._conversions, keys | weights, self._shape_of):
            self.experts.setdefault(stored.module, {}).update(stored.names)
            state[stored.parameter] = self._placeholder("", self._parameters[stored.parameter].shape)
            loaded |= stored.keys
        for key in keys.keys() - loaded:
            state[key] = self._quantized(keys[key], self._conversions.parameter_of(key))
        left = [key for key in plain if key not in loaded]
        for key in track("loading weights", left, len(left), "tensor", logger):
            state[key] = self._unquantized(plain[key], self._conversions.parameter_of(key))
        return state

    def _tensor_of(self, name: str) -> str:
        """The tensor that transformers would load a quantized matrix from if it were not quantized."""
        return name if self._checkpoint.has(f"{name}{BLOCKS}") else f"{name}.weight"

    def _quantized(self, name: str, target: str) -> Tensor | _Dequantized:
        """A quantized matrix in the state dict. ``target`` is the parameter that it is loaded into."""
        outputs, inputs = self._shape_of(name)
        linear, parameter = self._linears.get(target), self._parameters.get(target)
        if linear and parameter is not None:
            shape = (outputs, inputs) if type(linear) is nn.Linear else (inputs, outputs)
            if parameter.shape == shape:
                return self._placeholder(name, shape)
        return _Dequantized(self._context, self._checkpoint, name, (outputs, inputs), parameter)

    def _unquantized(self, name: str, target: str) -> Tensor:
        """A tensor in the state dict. ``target`` is the parameter that it is loaded into."""
        shape = self._checkpoint.shape(name)
        tensor = self._checkpoint.read(name, *shape, as_stored=True)
        self._check_dtype(name, tensor, target)
        is_linear = type(self._linears.get(target)) is nn.Linear and target not in self._tied
        if is_linear and name.endswith(".weight") and self._parameters[target].shape == shape:
            return self._placeholder(name.removesuffix(".weight"), shape)
        return tensor

    def _placeholder(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor with a single number in memory, which is recognized by its address."""
        tensor = torch.zeros((), dtype=self._context.dtype).expand(shape)
        self._stored[tensor.data_ptr()] = name, tensor
        return tensor

    def _shape_of(self, name: str) -> tuple[int, ...]:
        """Shape of a matrix of the checkpoint."""
        if not self._checkpoint.format_of(name).bits:
            return self._checkpoint.shape(f"{name}.weight")
        try:
            return self._checkpoint.matrix_shape(name)
        except ValueError as error:
            raise invalid("model", f"the tensors of the quantized matrix {name} have unexpected shapes") from error

    def _check_dtype(self, name: str, tensor: Tensor, target: str) -> None:
        """Raise ``PenstockError`` (``unsupported``) for numbers that need scales to become a floating-point
        parameter."""
        parameter = self._parameters.get(target)
        if parameter is None or not parameter.is_floating_point():
            return
        if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
            dtype = str(tensor.dtype).removeprefix("torch.")
            message = (
                f"tensor {name} is stored in {dtype}, in a layout that the modules of transformers cannot load: use a "
                "checkpoint whose quantized matrices are stored one by one, or an unquantized one with --quantization"
            )
            raise PenstockError(Code.UNSUPPORTED, message, "model")


def quantized_matrices(checkpoint: Checkpoint) -> list[str]:
    """Names of the quantized matrices of a checkpoint."""
    modules = {name: None for each in checkpoint.names for name in _modules(each)}
    return [
        name
        for name in modules
        if (checkpoint.has(f"{name}{BLOCKS}") or any(checkpoint.has(f"{name}.{part}") for part in PARTS))
        and checkpoint.format_of(name).bits
    ]


def _modules(tensor: str) -> Iterator[str]:
    """Matrices that a tensor may belong to. A tensor of bitsandbytes is named ``<matrix>.weight.absmax``, one of mxfp4
    ``<matrix>_blocks``."""
    for suffix in (BLOCKS, SCALES):
        if tensor.endswith(suffix):
            yield tensor.removesuffix(suffix)
    module = tensor.rpartition(".")[0]
    yield module
    if module.endswith(".weight"):
        yield module.removesuffix(".weight")


class _Dequantized:
    """A quantized matrix that is dequantized when transformers reads it.

    Args:
        shape: number of outputs and inputs. Experts that are stored together are one matrix.
        parameter: parameter of transformers with the same name; None: absent.
    """

    def __init__(
        self,
        context: BuildContext,
        checkpoint: Checkpoint,
        name: str,
        shape: tuple[int, int],
        parameter: Tensor | None,
    ) -> None:
        self._context, self._checkpoint, self._name, self._shape = context, checkpoint, name, shape
        self._parameter = parameter

    def __getitem__(self, index: Any) -> Tensor:
        """The dequantized matrix; transformers reads all of it."""
        name, (outputs, inputs) = self._name, self._shape
        weight = self._checkpoint.read_quantized(name, outputs, inputs, (0, outputs))
        weight = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight
        if not is_finite(weight):
            raise invalid("model", f"{name} has values that are not finite (NaN or infinity); check the weights")
        weight = weight.to(self._context.dtype)
        self._context.dequantized_bytes[self._checkpoint.format_of(name), UNQUANTIZED] += weight.nbytes
        tensors = [each for each in (f"{name}{BLOCKS}", f"{name}.weight") if self._checkpoint.has(each)]
        stored = self._checkpoint.shape(tensors[0]) if tensors else ()
        if len(stored) < 3:
            return weight
        weight = weight.view(stored[0], -1, inputs)
        is_transposed = self._parameter is not None and weight.shape != self._parameter.shape
        return weight.transpose(1, 2).contiguous() if is_transposed else weight


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Linear layers by the name of their weight."""
    from transformers.pytorch_utils import Conv1D

    for name, module in model.named_modules(remove_duplicate=False):
        if type(module) in (nn.Linear, Conv1D):
            yield f"{name}.weight", module
