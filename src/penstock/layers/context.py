"""The build context of layers: backend, rank, weights, and quantization scheme."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.core import PenstockError
from penstock.core.errors import invalid
from penstock.core.expert_placement import Ranks, even_placement
from penstock.core.quantization import UNQUANTIZED, Format, Scheme
from penstock.ops import Ops, QuantizedWeight
from penstock.parallel import SINGLE_RANK, Group, Shard
from penstock.quant import ExpertMatrices, Matrix, PackedMatrix, StackedMatrix

from .expert_load import ExpertLoad
from .lora import ExpertLoRA, LoRALayer, LoRATarget
from .rope import rope_table

logger = logging.getLogger(__name__)


class Weights(Protocol):
    """Tensors of a checkpoint, by name."""

    @property
    def version(self) -> str:
        """Identifies the contents on any machine: other weights have another version."""
        ...

    def read(self, name: str, *shape: int, rows: tuple[int, int] | None = None, as_stored: bool = False) -> Tensor:
        """Read a tensor, in the dtype that it is stored in.

        Args:
            shape: of the whole tensor.
            rows: first and end of the rows to read; None is all.
            as_stored: accept any dtype; otherwise the tensor must be floating-point.

        Raises ``PenstockError`` (``invalid``) if the tensor is missing, damaged, or of another shape or kind.
        """
        ...

    def has(self, name: str) -> bool: ...

    def format_of(self, name: str) -> Format:
        """The format that a matrix, without ``.weight``, is quantized in; ``UNQUANTIZED`` where ``read`` reads it."""
        ...

    def read_quantized(self, name: str, outputs: int, inputs: int, rows: tuple[int, int]) -> QuantizedWeight | Tensor:
        """Outputs from ``rows[0]`` to ``rows[1]`` of a quantized matrix ``[outputs, inputs]``; in a format of 4-bit
        floating-point numbers dequantized, ``[rows, inputs]`` float32.

        Raises ``PenstockError`` (``invalid``) if its tensors are missing, damaged, or of other shapes or kinds.
        """
        ...


class PackedWeights(Protocol):
    """Packed matrices that an earlier start left on disk (``models.weights.cache``)."""

    mapped_bytes: int

    def find(self, name: str) -> dict[str, Tensor] | None: ...
    def add(self, name: str, tensors: dict[str, Tensor]) -> None: ...


class PackedOutput(Protocol):
    """Takes all weights that layers use, so that a model can be built of them without its checkpoint
    (``models.weights.engine_output``)."""

    def has(self, name: str) -> bool:
        """Whether a matrix or tensor of this name was added."""
        ...

    def add(self, name: str, tensors: dict[str, Tensor]) -> None: ...
    def add_tensor(self, name: str, tensor: Tensor) -> None:
        """Add a tensor that ``Weights.read`` is to read: this rank's rows."""
        ...


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Which part of a model is built, and what for."""

    group: Group = SINGLE_RANK
    """The rank whose part of the model is built."""
    layers: range | None = None
    """Numbers of the layers of the pipeline stage that is built; None for all."""
    expert_parallel: bool = False
    """Whether ranks have whole experts, not shares of each."""
    expert_placement: Mapping[int, Ranks] = field(default_factory=dict)
    """The experts of each rank, by layer; others are as ``even_placement`` says. With ``expert_parallel``."""
    num_redundant_experts: int = 0
    """Number of redundant experts of layers without a placement."""
    expert_load: ExpertLoad | None = None
    """Counts the tokens of experts; None does not."""
    check_finite: bool = False
    """Whether weights with values that are not finite are refused, as those of a model that is in use should be."""
    max_loras: int = 0
    """Adapters that may be loaded at a time; 0 builds layers without LoRA."""
    max_lora_rank: int = 0
    """Largest rank of an adapter."""
    max_step_tokens: int = 0
    """Tokens of a step, at most."""
    threads: int = 0
    """Threads of this rank; 0 is one for each usable core."""


@dataclass(frozen=True)
class BuildContext(BuildOptions):
    """Shared by all layers while a model is built."""

    ops: Ops
    weights: Weights
    dtype: torch.dtype
    """Dtype of the computation."""
    device: torch.device
    max_len: int
    """Tokens that a sequence may have."""
    scheme: Scheme = field(default_factory=Scheme)
    weight_cache: PackedWeights | None = None
    output: PackedOutput | None = None
    """Gets all weights. Layers then keep no matrices: the model is built to be written, and cannot compute."""
    lora_targets: dict[str, LoRATarget] = field(default_factory=dict)
    """Filled by layers: the checkpoint's matrices that adapters may add to, by name."""
    dequantized_bytes: Counter[tuple[Format, Format]] = field(default_factory=Counter)
    """Filled by layers: bytes of the matrices that were dequantized, by their format in the checkpoint and the one that
    they were quantized to then."""
    _tables: dict[str, Tensor] = field(default_factory=dict)

    def read_weight(
        self, name: str, *shape: int, rows: tuple[int, int] | None = None, as_stored: bool = False
    ) -> Tensor:
        """Read a tensor, or some of its rows, onto the device.

        Arguments as for ``Weights.read``. The result has the model's dtype or, with ``as_stored``, the checkpoint's.
        """
        tensor = self._read_tensor(name, *shape, rows=rows, as_stored=as_stored)
        if self.output:
            self.output.add_tensor(name, tensor)
        if tensor.dim() == 1:  # vectors are used as they are: the file may be replaced meanwhile
            tensor = tensor.clone()
        return tensor.to(self.device) if as_stored else tensor.to(self.device, self.dtype)

    def _read_tensor(self, name: str, *shape: int, rows: tuple[int, int] | None, as_stored: bool = False) -> Tensor:
        tensor = self.weights.read(name, *shape, rows=rows, as_stored=as_stored)
        if self.check_finite and tensor.is_floating_point() and not is_finite(tensor):
            raise invalid("model", f"tensor {name} has values that are not finite numbers")
        return tensor

    def experts_of_ranks(self, layer: int, num_experts: int) -> Ranks:
        """The experts that each rank has of a layer, with ``expert_parallel``."""
        placed = self.expert_placement.get(layer)
        return placed or even_placement(num_experts, self.group.size, self.num_redundant_experts)

    def rope_table(self, head_dim: int, parameters: Mapping[str, Any], max_position_embeddings: int) -> Tensor:
        """See ``layers.rope.rope_table``, for ``max_len`` positions; layers that ask for the same table share it. With
        M-RoPE, it has a row more for each token of a step (``layers.mrope``)."""

        def make() -> Tensor:
            table = rope_table(head_dim, self.max_len, parameters, max_position_embeddings, self.device)
            rows = self.max_step_tokens if "mrope_section" in parameters else 0
            return torch.nn.functional.pad(table, (0, 0, 0, rows)) if rows else table

        return self.shared_table(repr((head_dim, sorted(parameters.items(), key=str), max_position_embeddings)), make)

    def shared_table(self, key: str, make: Callable[[], Tensor]) -> Tensor:
        """A tensor that layers share: made for the first layer that asks for it by this key."""
        if key not in self._tables:
            self._tables[key] = make()
        return self._tables[key]

    def lora(self, names: list[str], inputs: int, shards: list[Shard]) -> LoRALayer | None:
        """LoRA slots of a layer that multiplies these matrices as one; None if adapters are off."""
        if not self.max_loras:
            return None
        outputs, max_rank = sum(shard.size for shard in shards), len(names) * self.max_lora_rank
        slots = self.ops.new_lora_slots(self.max_loras, inputs, outputs, max_rank, self.dtype, self.device)
        layer, offset = LoRALayer(self.ops, slots), 0
        for name, shard in zip(names, shards, strict=True):
            self.lora_targets[name] = LoRATarget(layer, inputs, shard, offset)
            offset += shard.size
        return layer

    def expert_lora(self, names: Sequence[Sequence[str]], inputs: int, shard: Shard) -> ExpertLoRA | None:
        """LoRA slots of the matrices of all experts, as of ``expert_matrices``; None if experts cannot have
        adapters: on GPUs, and where ranks have whole experts."""
        if not self.max_loras or self.device.type != "cpu" or (self.expert_parallel and self.group.size > 1):
            return None
        outputs, max_rank = len(names[0]) * shard.size, len(names[0]) * self.max_lora_rank
        slots = self.max_loras * len(names)
        lora = ExpertLoRA(
            self.ops, self.ops.new_lora_slots(slots, inputs, outputs, max_rank, self.dtype, self.device), len(names)
        )
        for layer, own in zip(lora.experts, names, strict=True):
            for number, name in enumerate(own):
                self.lora_targets[name] = LoRATarget(layer, inputs, shard, number * shard.size)
        return lora

    def matrix(
        self,
        names: list[str],
        inputs: int,
        shards: list[Shard],
        format: Format | None = None,
        bias: Tensor | None = None,
    ) -> Matrix:
        """Matrices of one input, stacked: this rank's outputs of each.

        Those that the checkpoint has quantized are multiplied as they are, with activations as ``format`` says where
        it has the same number of bits. What the backend has no kernels for is dequantized first, and ``format`` may
        ask for another number of bits.

        Args:
            names: of the checkpoint's matrices, without ``.weight``.
            format: to quantize the others to; None is as the scheme says.
        """
        wanted = [format or self.scheme.format_of(name) for name in names]
        formats = [self._format(*each) for each in zip(names, shards, wanted, strict=True)]
        parts, outputs, end = list[PackedMatrix](), list[int](), 0
        for (chosen, as_stored), run in groupby(zip(names, shards, formats, strict=True), lambda each: each[2]):
            of_run = list(run)
            own_names, own_shards = [name for name, _, _ in of_run], [shard for _, shard, _ in of_run]
            sizes = [shard.size for shard in own_shards]
            first, end = end, end + sum(sizes)
            biases = None if bias is None else bias[first:end]
            if packed := self._pack(own_names, inputs, own_shards, chosen, as_stored, biases):
                parts, outputs = [*parts, packed], [*outputs, sum(sizes)]
                continue
            each_bias = [None] * len(sizes) if biases is None else biases.split(sizes)
            for name, shard, own_bias in zip(own_names, own_shards, each_bias, strict=True):
                single = self._pack([name], inputs, [shard], chosen, as_stored, own_bias)
                assert single
                parts, outputs = [*parts, single], [*outputs, shard.size]
        return parts[0] if len(parts) == 1 else StackedMatrix(self.ops, parts, outputs, self.dtype)

    def unquantized_matrix(self, name: str, inputs: int, shard: Shard, bias: Tensor | None = None) -> Matrix:
        """A matrix that no format quantizes, as a router's."""
        return self.matrix([name], inputs, [shard], UNQUANTIZED, bias)

    def expert_matrices(
        self, names: Sequence[Sequence[str]], inputs: int, shard: Shard, biases: Sequence[Tensor | None], first: int
    ) -> ExpertMatrices:
        """Matrices of a layer's experts, in the format of the layers.

        Args:
            names: of each expert's, which are stacked.
            shard: this rank's outputs of each matrix.
            biases: of each expert.
            first: the first expert's place.
        """
        shards = [shard] * len(names[0])
        packed = [self.matrix(list(own), inputs, shards, bias=bias) for own, bias in zip(names, biases, strict=True)]
        return ExpertMatrices(self.ops, packed, first, self.dtype)

    def read_matrix(self, name: str, inputs: int, shard: Shard) -> Tensor:
        """This rank's outputs of a matrix that is not multiplied as it is stored, ``[outputs, inputs]`` in the model's
        dtype: dequantized where the checkpoint has quantized it.

        Args:
            name: without ``.weight``.
        """
        if self._is_packed:
            weight = self._read_tensor(f"{name}.weight", shard.total, inputs, rows=shard.rows)
            return weight.to(self.device, self.dtype)
        weight = self._read(name, inputs, shard, UNQUANTIZED)
        if self.output:
            self.output.add_tensor(f"{name}.weight", weight.cpu())
        return weight

    def vocabulary_matrix(self, name: str, inputs: int, shard: Shard) -> PackedMatrix:
        """The matrix of an embedding or a language model head."""
        packed = self._pack([name], inputs, [shard], *self._format(name, shard, self.scheme.head), None)
        assert packed
        return packed

    def _format(self, name: str, shard: Shard, wanted: Format) -> tuple[Format, bool]:
        """The format that a matrix is packed in, and whether it is the checkpoint's own."""
        stored = self.weights.format_of(name)
        if not stored.bits:
            return wanted, False
        kept = self.scheme.kept(wanted, stored)
        if kept.bits and (kept.bits, kept.floating) != (stored.bits, stored.floating):
            return wanted, False
        if kept.bits:
            stored = replace(stored, activation_bits=kept.activation_bits)
            grouped = bool(stored.activation_bits and stored.group_size and not stored.floating)
            by_groups = replace(stored, activation_groups=grouped)
            stored = by_groups if self.ops.supports(by_groups, self.dtype) else stored
        if not self.ops.supports(stored, self.dtype):
            return wanted, False
        if stored.rows_per_scale > 1 and shard.first % stored.rows_per_scale:
            words = f"cuts {name} within blocks of {stored.rows_per_scale} outputs that share scales: use fewer ranks"
            raise invalid("tensor_parallel_size", words)
        return stored, True

    def _pack(
        self,
        names: list[str],
        inputs: int,
        shards: list[Shard],
        format: Format,
        as_stored: bool,
        bias: Tensor | None,
    ) -> PackedMatrix | None:
        """A packed matrix, from the weight cache if it is there; None if matrices of a checkpoint cannot be
        stacked."""
        cache, key = self.weight_cache, "+".join(names)
        if self.output and (self.output.has(key) or all(self.output.has(f"{name}.weight") for name in names)):
            return PackedMatrix(self.ops, None)
        if cache and (cached := cache.find(key)):
            cached = {name: tensor.to(self.device) for name, tensor in cached.items()}
            outputs = sum(shard.size for shard in shards)
            try:
                return PackedMatrix(self.ops, self.ops.from_packed(cached, inputs, outputs, self.dtype, bias, format))
            except PenstockError as error:
                logger.warning("%s is packed again: %s", key, error)
        matrices: list[Tensor] = []
        if as_stored:
            if names[1:] and self._is_packed:  # one by one, as they could not be stacked
                return None
            weights = [
                self._read_quantized(name, inputs, shard, format) for name, shard in zip(names, shards, strict=True)
            ]
            if not _can_stack(weights):
                return None
            packed = self.ops.pack_quantized(weights, self.dtype, bias)
        else:
            matrices = [self._read(name, inputs, shard, format) for name, shard in zip(names, shards, strict=True)]
            packed = self.ops.pack(matrices, bias, format)
        tensors = self.ops.packed_tensors(packed) if cache or self.output else {}
        tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
        if self.output and tensors:
            self.output.add(key, tensors)
        elif self.output:  # this backend uses matrices as they are
            for name, matrix in zip(names, matrices, strict=True):
                self.output.add_tensor(f"{name}.weight", matrix.cpu())
        elif cache:
            cache.add(key, tensors)
        return PackedMatrix(self.ops, None if self.output else packed)

    @property
    def _is_packed(self) -> bool:
        """Whether the weights are those of an engine folder, packed already."""
        weights: object = self.weights
        return weights is self.weight_cache

    def _read(self, name: str, inputs: int, shard: Shard, format: Format) -> Tensor:
        """A rank's outputs of a matrix in the model's dtype, dequantized if need be, to be quantized to ``format``."""
        stored = self.weights.format_of(name)
        if not stored.bits:
            return self._read_tensor(f"{name}.weight", shard.total, inputs, rows=shard.rows).to(self.device, self.dtype)
        weight = self.weights.read_quantized(name, shard.total, inputs, shard.rows)
        if isinstance(weight, QuantizedWeight):
            weight = self._on_device(weight, name, UNQUANTIZED).dequantize()
        if not is_finite(weight):
            raise invalid("model", f"{name} has values that are not finite numbers")
        weight = weight.to(self.device, self.dtype)
        self.dequantized_bytes[stored, format] += weight.nbytes
        return weight

    def _read_quantized(self, name: str, inputs: int, shard: Shard, format: Format) -> QuantizedWeight:
        """A rank's outputs of a quantized matrix, on the device, in the checkpoint's format or in one with other
        activations."""
        weight = self.weights.read_quantized(name, shard.total, inputs, shard.rows)
        assert isinstance(weight, QuantizedWeight)
        return self._on_device(weight, name, format)

    def _on_device(self, weight: QuantizedWeight, name: str, activations: Format) -> QuantizedWeight:
        scales = (weight.scales,) if weight.offsets is None else (weight.scales, weight.offsets)
        if not all(map(is_finite, scales)):
            raise invalid("model", f"the scales of {name} have values that are not finite numbers")
        return weight.to(self.device, activations)


def _can_stack(weights: Sequence[QuantizedWeight]) -> bool:
    """Whether inputs are in the same order, and no outputs of two matrices would share a scale."""
    first, rows = weights[0].order, weights[0].format.rows_per_scale
    return all(len(weight.values) % rows == 0 for weight in weights[:-1] if rows) and all(
        weight.order is first or (weight.order is not None and first is not None and torch.equal(weight.order, first))
        for weight in weights
    )


def is_finite(tensor: Tensor) -> bool:
    """Whether all values of a tensor are finite."""
    if tensor.dtype.itemsize < 2:  # sums of 8-bit floating point are not implemented everywhere
        tensor = tensor.to(torch.float32)
    return bool(tensor.sum(dtype=torch.float32).isfinite()) or bool(tensor.isfinite().all())
