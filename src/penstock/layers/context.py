"""The build context of layers: backend, rank, weights, and quantization scheme."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.core import PenstockError
from penstock.core.errors import invalid
from penstock.core.quantization import Format, Scheme
from penstock.ops import Ops
from penstock.parallel import SINGLE_RANK, Group, Shard
from penstock.quant import Matrix

from .lora import LoRALayer, LoRATarget
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

        Raises ``PenstockError`` (``invalid``) where the tensor is missing, damaged, or of another shape or kind.
        """
        ...

    def has(self, name: str) -> bool: ...


class PackedWeights(Protocol):
    """Packed matrices that an earlier start left on disk (``models.weights.cache``)."""

    mapped_bytes: int

    def find(self, name: str) -> dict[str, Tensor] | None: ...
    def add(self, name: str, tensors: dict[str, Tensor]) -> None: ...


@dataclass(frozen=True)
class BuildContext:
    """Shared by all layers while a model is built."""

    ops: Ops
    weights: Weights
    dtype: torch.dtype
    """Dtype of the computation."""
    device: torch.device
    max_len: int
    """Tokens that a sequence may have."""
    group: Group = SINGLE_RANK
    layers: range | None = None
    """Numbers of the layers of this pipeline stage; None for all."""
    scheme: Scheme = field(default_factory=Scheme)
    weight_cache: PackedWeights | None = None
    check_finite: bool = False
    """Whether weights with values that are not finite are refused, as those of a model that is in use should be."""
    max_loras: int = 0
    """Adapters that may be loaded at a time; 0 builds layers without LoRA."""
    max_lora_rank: int = 0
    """Largest rank of an adapter."""
    lora_targets: dict[str, LoRATarget] = field(default_factory=dict)
    """Filled by layers: the checkpoint's matrices that adapters may add to, by name."""
    _rope_tables: dict[str, Tensor] = field(default_factory=dict)

    def read_weight(
        self, name: str, *shape: int, rows: tuple[int, int] | None = None, as_stored: bool = False
    ) -> Tensor:
        """Read a tensor, or some of its rows, onto the device.

        Arguments as for ``Weights.read``. The result has the model's dtype or, with ``as_stored``, the checkpoint's.
        """
        tensor = self.weights.read(name, *shape, rows=rows, as_stored=as_stored)
        if self.check_finite and tensor.is_floating_point() and not is_finite(tensor):
            raise invalid("model", f"tensor {name} has values that are not finite numbers")
        if tensor.dim() == 1:  # vectors are used as they are: the file may be replaced meanwhile
            tensor = tensor.clone()
        return tensor.to(self.device) if as_stored else tensor.to(self.device, self.dtype)

    def rope_table(self, head_dim: int, parameters: Mapping[str, Any], max_position_embeddings: int) -> Tensor:
        """As ``layers.rope.rope_table``, for ``max_len`` positions; layers that ask for the same table share it."""
        key = repr((head_dim, sorted(parameters.items(), key=str), max_position_embeddings))
        if key not in self._rope_tables:
            self._rope_tables[key] = rope_table(
                head_dim, self.max_len, parameters, max_position_embeddings, self.device
            )
        return self._rope_tables[key]

    def lora(self, names: list[str], inputs: int, shards: list[Shard]) -> LoRALayer | None:
        """LoRA slots of a layer that multiplies these matrices as one; None where adapters are off."""
        if not self.max_loras:
            return None
        outputs, max_rank = sum(shard.size for shard in shards), len(names) * self.max_lora_rank
        slots = self.ops.new_lora_slots(self.max_loras, inputs, outputs, max_rank, self.dtype, self.device)
        layer, offset = LoRALayer(self.ops, slots), 0
        for name, shard in zip(names, shards, strict=True):
            self.lora_targets[name] = LoRATarget(layer, inputs, shard, offset)
            offset += shard.size
        return layer

    def matrix(
        self,
        name: str,
        inputs: int,
        outputs: int,
        format: Format,
        read: Callable[[], list[Tensor]],
        bias: Tensor | None = None,
    ) -> Matrix:
        """A packed matrix ``[outputs, inputs]``, from the weight cache if it is there.

        Args:
            name: key in the weight cache.
            read: reads the matrices to stack and pack, in the model's dtype; not called where the cache has them.
        """
        cache = self.weight_cache
        if cache and (cached := cache.find(name)):
            cached = {key: tensor.to(self.device) for key, tensor in cached.items()}
            try:
                return Matrix(self.ops, self.ops.from_packed(cached, inputs, outputs, self.dtype, bias, format))
            except PenstockError as error:
                logger.warning("%s is packed again: %s", name, error)
        matrix = self.ops.pack(read(), bias, format)
        if cache:
            cache.add(name, {key: tensor.cpu() for key, tensor in self.ops.packed_tensors(matrix).items()})
        return Matrix(self.ops, matrix)


def is_finite(tensor: Tensor) -> bool:
    """Whether all values of a tensor are finite."""
    if tensor.dtype.itemsize < 2:  # sums of 8-bit floating point are not implemented everywhere
        tensor = tensor.to(torch.float32)
    return bool(tensor.sum(dtype=torch.float32).isfinite()) or bool(tensor.isfinite().all())
