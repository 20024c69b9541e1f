"""Source of the original tensors of an engine folder, for conversion back to a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from penstock import ops
from penstock.checkpoint.engine_config import EngineConfig
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.core.quantization import SCHEMES, Format
from penstock.layers import BuildContext
from penstock.parallel import Shard, SingleRank
from penstock.quant import Matrix, PackedMatrix, StackedMatrix

from .read_config import read_config
from .registry import find_family
from .weights import EngineWeights

CPU = torch.device("cpu")
Description = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of a tensor."""
Rows = Callable[[str, Shard, Description, Callable[[], Tensor]], None]
"""Receiver of tensors. Arguments: name, rows of the rank, description of the whole tensor, function that reads rows."""


class EngineSource:
    """A ``convert.Source``: builds the model of an engine folder, and unpacks its matrices.

    Raises ``PenstockError``: ``unsupported`` if weights were rounded to fewer bits or heads padded; ``invalid`` if
    weights were packed for kernels that are not available (a GPU).
    """

    def __init__(self, folder: Path, config: EngineConfig) -> None:
        self._folder = folder
        self._config = config
        self._model = read_config(folder)
        instead = f"convert the checkpoint that it was built from ({config.checkpoint})"
        if config.quantization != "none" or self._model.quantization_config is not None:
            message = f"{folder} has quantized weights, which cannot be converted back"
            raise PenstockError(Code.UNSUPPORTED, f"{message}: {instead}", "model")
        if self._model.stored_head_dim:
            message = f"{folder} has heads of {self._model.stored_head_dim} elements, which the build padded with zeros"
            raise PenstockError(Code.UNSUPPORTED, f"{message}: {instead}", "model")
        backends = [each for each in (ops.backend(CPU), ops.reference) if config.layout == each.LAYOUT]
        if not backends:
            message = f"{folder} was built for kernels with layout {config.layout}, which are not available here"
            raise invalid("model", f"{message}: {instead}")
        self._ops = backends[0]

    def describe(self) -> dict[str, Description]:
        described: dict[str, Description] = {}
        self._build(lambda name, shard, description, read: described.update({name: description}))
        return described

    def read(self, names: Collection[str], sink: Callable[[str, int, Tensor], None]) -> None:

        def pass_on(name: str, shard: Shard, description: Description, read: Callable[[], Tensor]) -> None:
            if name in names:
                sink(name, shard.first, read())

        self._build(pass_on)

    def _build(self, rows: Rows) -> None:
        config, model, first = self._config, self._model, 0
        for stage, count in enumerate(config.layers):
            for rank in range(config.tensor_parallel_size):
                weights = EngineWeights(self._folder, config, stage, rank)
                context = _UnpackContext(
                    self._ops,
                    weights,
                    getattr(torch, config.dtype),
                    CPU,
                    1,
                    group=SingleRank(rank, config.tensor_parallel_size),
                    layers=range(first, first + count),
                    scheme=SCHEMES[config.quantization],
                    weight_cache=weights,
                    rows=rows,
                )
                family = find_family(model.architecture)
                family.build(context, model, model.num_mtp_layers if config.mtp else 0)
            first += count


def _ignore(name: str, shard: Shard, description: Description, read: Callable[[], Tensor]) -> None:
    pass


@dataclass(frozen=True)
class _UnpackContext(BuildContext):
    """Build context that passes all weights used by layers to ``rows``."""

    rows: Rows = _ignore

    def read_weight(
        self, name: str, *shape: int, rows: tuple[int, int] | None = None, as_stored: bool = False
    ) -> Tensor:
        tensor = super().read_weight(name, *shape, rows=rows, as_stored=as_stored)
        self.rows(name, Shard(*(rows or (0, shape[0])), shape[0]), (tensor.dtype, shape), lambda: tensor)
        return tensor

    def matrix(
        self,
        names: list[str],
        inputs: int,
        shards: list[Shard],
        format: Format | None = None,
        bias: Tensor | None = None,
    ) -> Matrix:
        matrix = super().matrix(names, inputs, shards, format, bias)
        if isinstance(matrix, StackedMatrix):
            ends = [0, *accumulate(shard.size for shard in shards)]
            for part, (first, end) in zip(matrix.parts, matrix.output_ranges, strict=True):
                merged = slice(ends.index(first), ends.index(end))
                self._unpack(part, names[merged], inputs, shards[merged])
        else:
            assert isinstance(matrix, PackedMatrix)
            self._unpack(matrix, names, inputs, shards)
        return matrix

    def read_matrix(self, name: str, inputs: int, shard: Shard) -> Tensor:
        weight = super().read_matrix(name, inputs, shard)
        self.rows(f"{name}.weight", shard, (weight.dtype, (shard.total, inputs)), lambda: weight)
        return weight

    def vocabulary_matrix(self, name: str, inputs: int, shard: Shard) -> PackedMatrix:
        matrix = super().vocabulary_matrix(name, inputs, shard)
        self._unpack(matrix, [name], inputs, [shard])
        return matrix

    def _unpack(self, matrix: PackedMatrix, names: list[str], inputs: int, shards: list[Shard]) -> None:
        """Pass the rows of a packed matrix to ``rows``. They are unpacked by looking up their indices as token ids."""
        first = 0
        for name, shard in zip(names, shards, strict=True):
            indices = torch.arange(first, first + shard.size)
            description = self.dtype, (shard.total, inputs)
            self.rows(f"{name}.weight", shard, description, partial(matrix.embedding, indices))
            first += shard.size
