"""Quantization of the matrices of one layer, based on statistics of their inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial

from torch import Tensor

from penstock.core.errors import invalid
from penstock.core.quantization import Format
from penstock.models import ModelConfig
from penstock.ops import Ops, QuantizedWeight

from . import awq, gptq
from .fold import SCALING, Producer, producer_of
from .options import QuantizeOptions
from .rounding import round_to_nearest
from .smoothquant import smoothing_scales
from .statistics import InputStatistics
from .threads import map_in_threads, torch_threads

UNCLIPPED = ("q_proj", "k_proj")
"""Matrices that AWQ does not clip: the error of their outputs does not measure the error of the attention scores."""
PACKED_OUTPUTS = {"awq": 8, "gptq": 8}
"""File format → number that must divide the number of outputs of a matrix."""

Observations = Mapping[tuple[str, ...], InputStatistics]
"""Names of the matrices that share an input → statistics of the input, in the order of the computation."""


@dataclass(frozen=True)
class QuantizedLayer:
    """Result of the quantization of a layer."""

    quantized: dict[str, QuantizedWeight] = field(default_factory=dict)
    """Quantized matrices by name, without ``.weight``."""
    changed: dict[str, Tensor] = field(default_factory=dict)
    """Changed tensors that are not quantized (norms, biases), in their original dtype, by full name."""
    errors: dict[str, float] = field(default_factory=dict)
    """Matrix name → relative squared error of its products due to rounding."""


def is_ignored(name: str, patterns: Sequence[str]) -> bool:
    """True if a pattern matches a matrix's name, or a suffix of it that begins after a dot."""
    parts = name.split(".")
    suffixes = [".".join(parts[first:]) for first in range(len(parts))]
    return any(fnmatchcase(suffix, pattern) for pattern in patterns for suffix in suffixes)


def check_shape(name: str, outputs: int, inputs: int, format: Format, file_format: str) -> None:
    """Raise ``PenstockError`` (``invalid``) for a matrix that cannot be written in this format and file format."""
    advice = "or exclude the matrix with --ignore"
    if format.group_size and inputs % format.group_size:
        message = f"is {format.group_size}; it must divide the {inputs} inputs of {name}: choose another size, {advice}"
        raise invalid("--group-size", message)
    multiple = PACKED_OUTPUTS.get(file_format, 1)
    if outputs % multiple:
        message = f"{file_format} requires multiples of {multiple} outputs; {name} has {outputs}: choose another method"
        raise invalid("--method", f"{message}, {advice}")


@dataclass
class LayerQuantizer:
    """Quantizer of one layer. It modifies the statistics in ``observed``."""

    ops: Ops
    config: ModelConfig
    options: QuantizeOptions
    prefix: str
    """Prefix of the layer's tensor names."""
    stored: Mapping[str, Tensor]
    """Tensors of the layer as stored in the checkpoint, by full name."""
    observed: Observations
    threads: int = 1
    """Number of threads for the searches of scales."""

    def __post_init__(self) -> None:
        self._original = {name: tensor.float() for name, tensor in self.stored.items() if tensor.is_floating_point()}
        self.tensors = dict(self._original)
        """Current tensors of the layer, float32, by full name."""

    def quantize(self) -> QuantizedLayer:
        """Quantize the layer's matrices."""
        if self.options.method in SCALING:
            self.scale()
        return self.round()

    def scale(self) -> None:
        """Scale the inputs of matrices to reduce the rounding error, and the outputs of their producers inversely.
        Apart from rounding, the layer's function does not change."""
        for names, statistics in self.observed.items():
            weights = [self.tensors[f"{name}.weight"] for name in self._chosen(names)]
            producer = producer_of(names, self.prefix, self.tensors, self.config)
            if not weights or producer is None:
                continue
            scales = self._search(weights, statistics, producer)
            if scales is None:
                continue
            scales = producer.divide(self.tensors, scales, self.stored[f"{producer.name}.weight"].dtype)
            input_scales = producer.expand(scales)
            for name in names:
                self.tensors[f"{name}.weight"] = self.tensors[f"{name}.weight"] * input_scales
            statistics.divide(input_scales)

    def _search(self, weights: list[Tensor], statistics: InputStatistics, producer: Producer) -> Tensor | None:
        if self.options.method == "awq":
            return awq.search_scales(self.ops, weights, statistics, producer, self.options.format, self.threads)
        if not producer.is_norm:
            return None  # as in the paper, only inputs produced by norms are smoothed
        return smoothing_scales(weights, statistics, self.options.smoothing_strength)

    def round(self) -> QuantizedLayer:
        """Quantize the current matrices."""
        layer = QuantizedLayer()
        for names, statistics in self.observed.items():
            chosen, factor = self._chosen(names), None
            if chosen and statistics.hessian is not None and statistics.seen:
                with torch_threads(self.threads):  # few large operations; sums depend on the number of threads
                    hessian = gptq.rotated_hessian(statistics.hessian, self.options.format)
                    factor = gptq.factorize(hessian, self.options.act_order, self.options.format.group_size)
            rounding = partial(self._round, statistics, factor)
            for name, rounded in zip(chosen, map_in_threads(rounding, chosen, self.threads), strict=True):
                weight = self.tensors[f"{name}.weight"]
                layer.quantized[name] = rounded
                if not statistics.seen:  # the router sent no token to this expert
                    layer.errors[name] = 0.0
                    continue
                error = awq.squared_products(self.ops, statistics.samples, rounded.dequantize() - weight)
                layer.errors[name] = error / max(awq.squared_products(self.ops, statistics.samples, weight), 1e-30)
        for name, tensor in self.tensors.items():
            if tensor is not self._original[name] and name.removesuffix(".weight") not in layer.quantized:
                layer.changed[name] = tensor.to(self.stored[name].dtype)
        return layer

    def _round(self, statistics: InputStatistics, factor: gptq.Factor | None, name: str) -> QuantizedWeight:
        weight, format = self.tensors[f"{name}.weight"], self.options.scheme.format_of(name)
        match self.options.method:
            case "awq":
                return awq.round_clipped(weight, statistics, format, not name.endswith(UNCLIPPED))
            case "gptq" if factor:
                return gptq.round_compensating(weight, factor, format, self.options.act_order)
            case _:
                return round_to_nearest(weight, format)

    def _chosen(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if not is_ignored(name, self.options.ignore)]
