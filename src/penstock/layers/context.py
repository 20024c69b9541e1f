"""Build context of layers: backend, rank, weights, and quantization scheme."""

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
        """Digest of the contents, the same on every machine."""
        ...

    def read(self, name: str, *shape: int, rows: tuple[int, int] | None = None, as_stored: bool = False) -> Tensor:
        """Read a tensor in its stored dtype.

        Args:
            shape: shape of the whole tensor.
            rows: first and end of the rows to read; None: all.
            as_stored: accept any dtype; else the tensor must be floating-point.

        Raises ``PenstockError`` (``invalid``) if the tensor is missing, damaged, or has another shape or kind of dtype.
        """
        ...

    def has(self, name: str) -> bool: ...

    def format_of(self, name: str) -> Format:
        """Format of a quantized matrix (``name`` without ``.weight``); ``UNQUANTIZED`` for a matrix that ``read``
        returns."""
        ...

    def read_quantized(self, name: str, outputs: int, inputs: int, rows: tuple[int, int]) -> QuantizedWeight | Tensor:
        """Read the rows from ``rows[0]`` to ``rows[1]`` of a quantized matrix ``[outputs, inputs]``. 4-bit
        floating-point formats are returned dequantized, ``[rows, inputs]`` float32.

        Raises ``PenstockError`` (``invalid``) if a tensor of the matrix is missing, damaged, or has another shape or
        kind of dtype.
        """
        ...


class PackedWeights(Protocol):
    """Packed matrices on disk: those of an earlier start (``models.weights.cache``), or of an engine folder."""

    mapped_bytes: int

    def find(self, name: str) -> dict[str, Tensor] | None: ...
    def add(self, name: str, tensors: dict[str, Tensor]) -> None: ...


class PackedOutput(Protocol):
    """Receiver of all weights that layers use. It allows building the model later without its checkpoint
    (``models.weights.engine_output``)."""

    def has(self, name: str) -> bool:
        """Whether a matrix or tensor of this name was added."""
        ...

    def add(self, name: str, tensors: dict[str, Tensor]) -> None: ...
    def add_tensor(self, name: str, tensor: Tensor) -> None:
        """Add this rank's rows of an unpacked tensor, for ``Weights.read``."""
        ...


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Options for building a model, or one rank's part of it."""

    group: Group = SINGLE_RANK
    """Tensor-parallel group; the part of its ``rank`` is built."""
    layers: range | None = None
    """Indices of the layers of the pipeline stage; None: all."""
    expert_parallel: bool = False
    """True: each rank has some complete experts; False: each rank has a part of every expert."""
    expert_placement: Mapping[int, Ranks] = field(default_factory=dict)
    """Experts of each rank by layer, with ``expert_parallel``; layers without an entry use ``even_placement``."""
    num_redundant_experts: int = 0
    """Number of redundant experts in layers without a placement."""
    expert_load: ExpertLoad | None = None
    """Counters of tokens per expert; None: not counted."""
    check_finite: bool = False
    """Refuse weights with NaN or infinite values (set for a weight update)."""
    max_loras: int = 0
    """Maximum number of loaded adapters; 0: layers without LoRA."""
    max_lora_rank: int = 0
    """Maximum rank of an adapter."""
    max_step_tokens: int = 0
    """Maximum number of tokens in a step."""
    threads: int = 0
    """Number of threads of this rank; 0: one for each usable core."""


@dataclass(frozen=True)
class BuildContext(BuildOptions):
    """Context that all layers of a model are built with."""

    ops: Ops
    weights: Weights
    dtype: torch.dtype
    """Dtype of the computation."""
    device: torch.device
    max_len: int
    """Maximum sequence length in tokens."""
    scheme: Scheme = field(default_factory=Scheme)
    weight_cache: PackedWeights | None = None
    output: PackedOutput | None = None
    """Receives all weights. Layers then keep no matrices: the model is only written, and cannot compute."""
    lora_targets: dict[str, LoRATarget] = field(default_factory=dict)
    """Matrices that adapters may change, by name in the checkpoint. Filled by layers."""
    dequantized_bytes: Counter[tuple[Format, Format]] = field(default_factory=Counter)
    """Bytes of dequantized matrices, by format in the checkpoint and format after requantization. Filled by layers."""
    _tables: dict[str, Tensor] = field(default_factory=dict)

    def read_weight(
        self, name: str, *shape: int, rows: tuple[int, int] | None = None, as_stored: bool = False
    ) -> Tensor:
        """Read a tensor, or some of its rows, onto the device (arguments: see ``Weights.read``).

        The result has the model's dtype, or, with ``as_stored``, the checkpoint's.
        """
        tensor = self._read_tensor(name, *shape, rows=rows, as_stored=as_stored)
        if self.output:
            self.output.add_tensor(name, tensor)
        if tensor.dim() == 1:  # a vector may be a view of the mapped file, which can be replaced later
            tensor = tensor.clone()
        return tensor.to(self.device) if as_stored else tensor.to(self.device, self.dtype)

    def _read_tensor(self, name: str, *shape: int, rows: tuple[int, int] | None, as_stored: bool = False) -> Tensor:
        tensor = self.weights.read(name, *shape, rows=rows, as_stored=as_stored)
        if self.check_finite and tensor.is_floating_point() and not is_finite(tensor):
            raise invalid("model", f"tensor {name} has values that are not finite (NaN or infinity); check the weights")
        return tensor

    def experts_of_ranks(self, layer: int, num_experts: int) -> Ranks:
        """Experts of a layer by rank for ``expert_parallel``: ``expert_placement``, else ``even_placement``."""
        placed = self.expert_placement.get(layer)
        return placed or even_placement(num_experts, self.group.size, self.num_redundant_experts)

    def rope_table(self, head_dim: int, parameters: Mapping[str, Any], max_position_embeddings: int) -> Tensor:
        """Rotary table for ``max_len`` positions (see ``layers.rope.rope_table``), shared by layers with the same
        parameters. With M-RoPE it has an additional row for each token of a step (``layers.mrope``)."""

        def make() -> Tensor:
            table = rope_table(head_dim, self.max_len, parameters, max_position_embeddings, self.device)
            rows = self.max_step_tokens if "mrope_section" in parameters else 0
            return torch.nn.functional.pad(table, (0, 0, 0, rows)) if rows else table

        return self.shared_table(repr((head_dim, sorted(parameters.items(), key=str), max_position_embeddings)), make)

    def shared_table(self, key: str, make: Callable[[], Tensor]) -> Tensor:
        """A tensor shared by layers: the first layer that requests this key creates it with ``make``."""
        if key not in self._tables:
            self._tables[key] = make()
        return self._tables[key]

    def lora(self, names: list[str], inputs: int, shards: list[Shard]) -> LoRALayer | None:
        """LoRA slots of a layer with these merged matrices; None without LoRA."""
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
        """LoRA slots of one projection of all experts (arguments: see ``expert_matrices``). None if experts cannot have
        adapters: without LoRA, on GPUs, and with expert parallelism."""
        if not self.max_loras or self.device.type != "cpu" or (self.expert_parallel and self.group.size > 1):
            return None
        outputs, max_rank = len(names[0]) * shard.size, len(names[0]) * self.max_lora_rank
        slots = self.max_loras * len(names)
        lora = ExpertLoRA(
            self.ops, self.ops.new_lora_slots(slots, inputs, outputs, max_rank, self.dtype, self.device), len(names)
        )
        for layer, expert_names in zip(lora.experts, names, strict=True):
            for number, name in enumerate(expert_names):
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
        """Merge matrices with the same input, each with the rows of this rank.

        Matrices that are quantized in the checkpoint keep their format, with the activations of ``format`` if it has
        the same number of bits. They are dequantized and requantized if the backend has no kernel for their format, or
        ``format`` has another number of bits.

        Args:
            names: names in the checkpoint, without ``.weight``.
            format: format of matrices that the checkpoint does not quantize; None: as in the scheme.
        """
        wanted = [format or self.scheme.format_of(name) for name in names]
        formats = [self._format(*each) for each in zip(names, shards, wanted, strict=True)]
        parts, outputs, end = list[PackedMatrix](), list[int](), 0
        for (chosen, as_stored), run in groupby(zip(names, shards, formats, strict=True), lambda each: each[2]):
            same_format = list(run)
            run_names, run_shards = [name for name, _, _ in same_format], [shard for _, shard, _ in same_format]
            sizes = [shard.size for shard in run_shards]
            first, end = end, end + sum(sizes)
            run_bias = None if bias is None else bias[first:end]
            if packed := self._pack(run_names, inputs, run_shards, chosen, as_stored, run_bias):
                parts, outputs = [*parts, packed], [*outputs, sum(sizes)]
                continue
            biases = [None] * len(sizes) if run_bias is None else run_bias.split(sizes)
            for name, shard, single_bias in zip(run_names, run_shards, biases, strict=True):
                single = self._pack([name], inputs, [shard], chosen, as_stored, single_bias)
                assert single
                parts, outputs = [*parts, single], [*outputs, shard.size]
        return parts[0] if len(parts) == 1 else StackedMatrix(self.ops, parts, outputs, self.dtype)

    def unquantized_matrix(self, name: str, inputs: int, shard: Shard, bias: Tensor | None = None) -> Matrix:
        """A matrix that is never quantized, such as a router's."""
        return self.matrix([name], inputs, [shard], UNQUANTIZED, bias)

    def expert_matrices(
        self, names: Sequence[Sequence[str]], inputs: int, shard: Shard, biases: Sequence[Tensor | None], first: int
    ) -> ExpertMatrices:
        """One projection of all experts of a layer, in the formats of the scheme.

        Args:
            names: for each expert, the names of the matrices to merge.
            shard: rows of each matrix on this rank.
            biases: bias of each expert.
            first: place of the first expert (``core.expert_placement``).
        """
        shards = [shard] * len(names[0])
        packed = [self.matrix(list(each), inputs, shards, bias=bias) for each, bias in zip(names, biases, strict=True)]
        return ExpertMatrices(self.ops, packed, first, self.dtype)

    def read_matrix(self, name: str, inputs: int, shard: Shard) -> Tensor:
        """Read this rank's rows of a matrix, ``[outputs, inputs]`` in the model's dtype, dequantized if necessary, for
        a layer that transforms it.

        Args:
            name: name in the checkpoint, without ``.weight``.
        """
        if self._is_packed:
            weight = self._read_tensor(f"{name}.weight", shard.total, inputs, rows=shard.rows)
            return weight.to(self.device, self.dtype)
        weight = self._read(name, inputs, shard, UNQUANTIZED)
        if self.output:
            self.output.add_tensor(f"{name}.weight", weight.cpu())
        return weight

    def vocabulary_matrix(self, name: str, inputs: int, shard: Shard) -> PackedMatrix:
        """The packed matrix of an embedding or a language model head."""
        packed = self._pack([name], inputs, [shard], *self._format(name, shard, self.scheme.head), None)
        assert packed
        return packed

    def _format(self, name: str, shard: Shard, wanted: Format) -> tuple[Format, bool]:
        """The format that a matrix is packed in, and whether it keeps the values of the checkpoint."""
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
            message = f"splits {name} within blocks of {stored.rows_per_scale} outputs with one scale: use fewer ranks"
            raise invalid("tensor_parallel_size", message)
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
        """A packed matrix of merged matrices, from the weight cache if possible; None if they cannot be merged."""
        cache, key = self.weight_cache, "+".join(names)
        if self.output and (self.output.has(key) or all(self.output.has(f"{name}.weight") for name in names)):
            return PackedMatrix(self.ops, None)
        if cache and (cached := cache.find(key)):
            cached = {name: tensor.to(self.device) for name, tensor in cached.items()}
            outputs = sum(shard.size for shard in shards)
            try:
                return PackedMatrix(self.ops, self.ops.from_packed(cached, inputs, outputs, self.dtype, bias, format))
            except PenstockError as error:
                logger.warning("the packed weights of %s cannot be used (%s); packing them again", key, error)
        matrices: list[Tensor] = []
        if as_stored:
            if names[1:] and self._is_packed:  # the engine folder has them packed separately: they cannot be merged
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
        elif self.output:  # a backend that does not pack matrices
            for name, matrix in zip(names, matrices, strict=True):
                self.output.add_tensor(f"{name}.weight", matrix.cpu())
        elif cache:
            cache.add(key, tensors)
        return PackedMatrix(self.ops, None if self.output else packed)

    @property
    def _is_packed(self) -> bool:
        """True if the weights come from an engine folder, in which they are already packed."""
        weights: object = self.weights
        return weights is self.weight_cache

    def _read(self, name: str, inputs: int, shard: Shard, format: Format) -> Tensor:
        """This rank's rows of a matrix in the model's dtype, dequantized if necessary. ``format``, the format that the
        caller quantizes them to, is only a key of ``dequantized_bytes``."""
        stored = self.weights.format_of(name)
        if not stored.bits:
            return self._read_tensor(f"{name}.weight", shard.total, inputs, rows=shard.rows).to(self.device, self.dtype)
        weight = self.weights.read_quantized(name, shard.total, inputs, shard.rows)
        if isinstance(weight, QuantizedWeight):
            weight = self._on_device(weight, name, UNQUANTIZED).dequantize()
        if not is_finite(weight):
            raise invalid("model", f"{name} has values that are not finite (NaN or infinity); check the weights")
        weight = weight.to(self.device, self.dtype)
        self.dequantized_bytes[stored, format] += weight.nbytes
        return weight

    def _read_quantized(self, name: str, inputs: int, shard: Shard, format: Format) -> QuantizedWeight:
        """This rank's rows of a quantized matrix, on the device, with the activations of ``format``."""
        weight = self.weights.read_quantized(name, shard.total, inputs, shard.rows)
        assert isinstance(weight, QuantizedWeight)
        return self._on_device(weight, name, format)

    def _on_device(self, weight: QuantizedWeight, name: str, activations: Format) -> QuantizedWeight:
        scales = (weight.scales,) if weight.offsets is None else (weight.scales, weight.offsets)
        if not all(map(is_finite, scales)):
            message = f"the scales of {name} have values that are not finite (NaN or infinity); check the weights"
            raise invalid("model", message)
        return weight.to(self.device, activations)


def _can_stack(weights: Sequence[QuantizedWeight]) -> bool:
    """Whether matrices can be merged: they have the same order of inputs, and no scale would span two of them."""
    first, rows = weights[0].order, weights[0].format.rows_per_scale
    return all(len(weight.values) % rows == 0 for weight in weights[:-1] if rows) and all(
        weight.order is first or (weight.order is not None and first is not None and torch.equal(weight.order, first))
        for weight in weights
    )


def is_finite(tensor: Tensor) -> bool:
    """Whether all values of a tensor are finite."""
    if tensor.dtype.itemsize < 2:  # PyTorch cannot sum 8-bit floating point on all devices
        tensor = tensor.to(torch.float32)
    return bool(tensor.sum(dtype=torch.float32).isfinite()) or bool(tensor.isfinite().all())
