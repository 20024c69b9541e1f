"""Quantizes the matrices of one layer, by what was fed to them."""

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
"""Matrices that AWQ does not clip, as it cannot tell what their errors do to the products of queries and keys."""
PACKED_OUTPUTS = {"awq": 8, "gptq": 8}
"""Outputs that a word of the file format holds; their number is a multiple of it."""

Observations = Mapping[tuple[str, ...], InputStatistics]
"""Statistics of each input of a layer by the matrices that share it, in the order of the computation."""


@dataclass(frozen=True)
class QuantizedLayer:
    """What a layer becomes."""

    quantized: dict[str, QuantizedWeight] = field(default_factory=dict)
    """By name, without ``.weight``."""
    changed: dict[str, Tensor] = field(default_factory=dict)
    """Other tensors that are not what they were, in their dtype, by their whole name."""
    errors: dict[str, float] = field(default_factory=dict)
    """The squares of what rounding changes in each matrix's products, as a share of the products' squares."""


def is_ignored(name: str, patterns: Sequence[str]) -> bool:
    """Whether a matrix is left unquantized: its name, or an end of it from a dot on, matches a pattern."""
    parts = name.split(".")
    ends = [".".join(parts[first:]) for first in range(len(parts))]
    return any(fnmatchcase(end, pattern) for pattern in patterns for end in ends)


def check_shape(name: str, outputs: int, inputs: int, format: Format, file_format: str) -> None:
    """Raises ``PenstockError`` (``invalid``) for a matrix that the file format cannot hold in this format."""
    advice = "or leave the matrix out with --ignore"
    if format.group_size and inputs % format.group_size:
        message = f"{format.group_size} does not divide the {inputs} inputs of {name}: name another, {advice}"
        raise invalid("--group-size", message)
    multiple = PACKED_OUTPUTS.get(file_format, 1)
    if outputs % multiple:
        message = f"{file_format} packs outputs by {multiple}, and {name} has {outputs}: take another method, {advice}"
        raise invalid("--method", message)


@dataclass
class LayerQuantizer:
    """A layer while it is quantized."""

    ops: Ops
    config: ModelConfig
    options: QuantizeOptions
    prefix: str
    """Of the names of its tensors."""
    stored: Mapping[str, Tensor]
    """Its tensors as the checkpoint has them."""
    observed: Observations
    """Statistics, which are changed."""
    threads: int = 1
    """To search with."""

    def __post_init__(self) -> None:
        self._original = {name: tensor.float() for name, tensor in self.stored.items() if tensor.is_floating_point()}
        self.tensors = dict(self._original)
        """All its tensors in float32."""

    def quantize(self) -> QuantizedLayer:
        """Quantize the layer's matrices."""
        if self.options.method in SCALING:
            self.scale()
        return self.round()

    def scale(self) -> None:
        """Scale the inputs of matrices, and the outputs of the modules before them, where that makes rounding better.
        Without rounding, the layer computes what it did."""
        for names, statistics in self.observed.items():
            weights = [self.tensors[f"{name}.weight"] for name in self._chosen(names)]
            producer = producer_of(names, self.prefix, self.tensors, self.config)
            if not weights or producer is None:
                continue
            scales = self._search(weights, statistics, producer)
            if scales is None:
                continue
            wide = producer.expand(producer.divide(self.tensors, scales, self.stored[f"{producer.name}.weight"].dtype))
            for name in names:
                self.tensors[f"{name}.weight"] = self.tensors[f"{name}.weight"] * wide
            statistics.divide(wide)

    def _search(self, weights: list[Tensor], statistics: InputStatistics, producer: Producer) -> Tensor | None:
        if self.options.method == "awq":
            return awq.search_scales(self.ops, weights, statistics, producer, self.options.format, self.threads)
        if not producer.is_norm:
            return None  # the paper smooths behind norms alone
        return smoothing_scales(weights, statistics, self.options.smoothing_strength)

    def round(self) -> QuantizedLayer:
        """Quantize the matrices as they are now."""
        layer = QuantizedLayer()
        for names, statistics in self.observed.items():
            chosen, factor = self._chosen(names), None
            if chosen and statistics.hessian is not None and statistics.seen:
                with torch_threads(self.threads):  # a few large operations, whose sums depend on their number
                    hessian = gptq.rotated_hessian(statistics.hessian, self.options.format)
                    factor = gptq.factorize(hessian, self.options.act_order, self.options.format.group_size)
            rounding = partial(self._round, statistics, factor)
            for name, rounded in zip(chosen, map_in_threads(rounding, chosen, self.threads), strict=True):
                weight = self.tensors[f"{name}.weight"]
                layer.quantized[name] = rounded
                if not statistics.seen:  # an expert that no token has chosen
                    layer.errors[name] = 0.0
                    continue
                change = awq.squared_products(self.ops, statistics.samples, rounded.dequantize() - weight)
                layer.errors[name] = change / max(awq.squared_products(self.ops, statistics.samples, weight), 1e-30)
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
