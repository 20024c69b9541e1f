"""Execution of a single layer, as a pipeline stage, on the hidden states of samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from penstock.core.quantization import UNQUANTIZED, Format
from penstock.layers import BuildContext, new_state_cache
from penstock.models import ModelConfig
from penstock.models.adapted import adapt, stored_matrix
from penstock.models.model import Model
from penstock.models.registry import find_family
from penstock.models.weights import Checkpoint
from penstock.ops import AttentionMetadata, Batch, Ops, QuantizedWeight, StateBatch
from penstock.parallel import Shard
from penstock.quant import ExpertMatrices, Matrix

from .statistics import InputObserver

BLOCK = 64
"""Number of tokens per KV block."""
BATCH_TOKENS = 4096
"""Maximum number of tokens per forward pass; a longer sample is still computed at once."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class ChangedWeights:
    """``layers.Weights`` of a checkpoint with some tensors replaced. Names are those of the checkpoint."""

    base: Checkpoint
    tensors: Mapping[str, Tensor]
    """Replaced tensors by full name, such as ``<name>.weight``."""
    quantized: Mapping[str, QuantizedWeight]
    """Quantized matrices by name, without ``.weight``."""

    @property
    def version(self) -> str:
        return self.base.version

    def read(self, name: str, *shape: int, rows: tuple[int, int] | None = None, as_stored: bool = False) -> Tensor:
        if name not in self.tensors:
            return self.base.read(name, *shape, rows=rows, as_stored=as_stored)
        tensor = self.tensors[name]
        return tensor if rows is None else tensor[rows[0] : rows[1]]

    def has(self, name: str) -> bool:
        return name in self.tensors or self.base.has(name)

    def format_of(self, name: str) -> Format:
        return self.quantized[name].format if name in self.quantized else UNQUANTIZED

    def read_quantized(self, name: str, outputs: int, inputs: int, rows: tuple[int, int]) -> QuantizedWeight:
        return self.quantized[name].rows(*rows)


@dataclass(frozen=True)
class ObservedMatrix:
    """A ``Matrix`` that passes its inputs to an observer."""

    matrix: Matrix
    names: tuple[str, ...]
    observer: InputObserver

    def linear(self, x: Tensor, out_float32: bool = False, out: Tensor | None = None) -> Tensor:
        self.observer.observe(self.names, x)
        return self.matrix.linear(x, out_float32, out)

    def linear_activation_and_mul(self, x: Tensor, function: str, out: Tensor | None = None) -> Tensor:
        self.observer.observe(self.names, x)
        return self.matrix.linear_activation_and_mul(x, function, out)


class ObservedExperts(ExpertMatrices):
    """``ExpertMatrices`` that pass the inputs of each expert to an observer.

    Args:
        base: the observed matrices.
        names: names of each expert's matrices.
    """

    def __init__(self, base: ExpertMatrices, names: Sequence[tuple[str, ...]], observer: InputObserver) -> None:
        self._base = base
        self._names = names
        self._observer = observer

    def linear(self, x: Tensor, ids: Tensor, out: Tensor | None = None) -> Tensor:
        self._observe(x, ids)
        return self._base.linear(x, ids, out)

    def linear_activation_and_mul(self, x: Tensor, ids: Tensor, function: str, out: Tensor | None = None) -> Tensor:
        self._observe(x, ids)
        return self._base.linear_activation_and_mul(x, ids, function, out)

    def _observe(self, x: Tensor, ids: Tensor) -> None:
        for expert, names in enumerate(self._names):
            selected = ids == expert
            self._observer.observe(names, x[selected] if x.dim() == 3 else x[selected.any(1)])


@dataclass(frozen=True)
class ObservingContext(BuildContext):
    """A ``BuildContext`` whose matrices pass their inputs to an observer, except those that are never quantized."""

    observer: InputObserver = field(kw_only=True)

    def matrix(
        self,
        names: list[str],
        inputs: int,
        shards: list[Shard],
        format: Format | None = None,
        bias: Tensor | None = None,
    ) -> Matrix:
        matrix = super().matrix(names, inputs, shards, format, bias)
        if format == UNQUANTIZED:
            return matrix
        self.observer.register(tuple(names), inputs)
        return ObservedMatrix(matrix, tuple(names), self.observer)

    def unquantized_matrix(self, name: str, inputs: int, shard: Shard, bias: Tensor | None = None) -> Matrix:
        return super().matrix([name], inputs, [shard], UNQUANTIZED, bias)

    def expert_matrices(
        self, names: Sequence[Sequence[str]], inputs: int, shard: Shard, biases: Sequence[Tensor | None], first: int
    ) -> ExpertMatrices:
        shards, keys = [shard] * len(names[0]), [tuple(expert_names) for expert_names in names]
        packed = [
            super(ObservingContext, self).matrix(list(key), inputs, shards, bias=bias)
            for key, bias in zip(keys, biases, strict=True)
        ]
        for key in keys:
            self.observer.register(key, inputs)
        return ObservedExperts(ExpertMatrices(self.ops, packed, first, self.dtype), keys, self.observer)


def build_stage(
    config: ModelConfig,
    ops: Ops,
    weights: ChangedWeights,
    layer: int,
    dtype: torch.dtype,
    max_len: int,
    observer: InputObserver | None = None,
) -> Model:
    """Build the model with a single layer. Layer 0 includes the embedding; the last layer the final norm and head."""
    family = find_family(config.architecture)
    layers, adapted = range(layer, layer + 1), adapt(weights, weights.base, config)
    kind = partial(ObservingContext, observer=observer) if observer else BuildContext
    model: Model = family.build(kind(ops, adapted, dtype, CPU, max_len, layers=layers), config, 0)
    return model


class _NoOutput:
    """A ``PackedOutput`` that has all matrices already, so that building a model reads none."""

    def has(self, name: str) -> bool:
        return True

    def add(self, name: str, tensors: dict[str, Tensor]) -> None:
        raise AssertionError(name)

    def add_tensor(self, name: str, tensor: Tensor) -> None:
        pass


def matrix_names(config: ModelConfig, ops: Ops, checkpoint: Checkpoint, dtype: torch.dtype) -> list[str]:
    """Names in the checkpoint of the tensors with the layers' matrices, except those that are never quantized."""
    observer, family = InputObserver(ops, 0, False), find_family(config.architecture)
    weights = adapt(checkpoint, checkpoint, config)
    family.build(ObservingContext(ops, weights, dtype, CPU, 1, output=_NoOutput(), observer=observer), config, 0)
    names = (stored_matrix(checkpoint, config, name) for each in observer.statistics for name in each)
    return list(dict.fromkeys(names))


def hidden_states(path: Path, shape: Sequence[int], dtype: torch.dtype, new: bool) -> Tensor:
    """Map a file of the hidden states of samples after a layer, ``[samples, tokens, hidden]``.

    Args:
        new: create the file, and map it for writing.
    """
    size = torch.Size(shape).numel()
    if not size:
        return torch.empty(*shape, dtype=dtype)
    return torch.from_file(str(path), shared=new, size=size, dtype=dtype).view(*shape)


def run_stage(
    stage: Model,
    ops: Ops,
    inputs: Tensor,
    outputs: Tensor | None,
    kv_quantization: str = "",
    progress: Callable[[int], object] = lambda samples: None,
) -> None:
    """Compute a stage for samples.

    Args:
        inputs: token ids ``[samples, tokens]`` for the first layer, hidden states ``[samples, tokens, hidden]`` for
            all later layers.
        outputs: destination of the hidden states, ``[samples, tokens, hidden]``; None: they are discarded.
        kv_quantization: quantization of the KV cache, as in ``KVSpec``.
        progress: called after each forward pass with its number of samples.
    """
    count, tokens = inputs.shape[:2]
    if not count:
        return
    blocks = -(-tokens // BLOCK)
    size = min(count, max(1, BATCH_TOKENS // tokens))
    cache = ops.new_kv_cache(stage.kv_specs(BLOCK, kv_quantization), size * blocks, CPU)
    for first in range(0, count, size):
        chunk = inputs[first : first + size]
        states = new_state_cache(stage.state_specs(), len(chunk), len(chunk), 0, CPU)
        hidden = stage.forward(_batch(chunk, blocks, states), cache)
        if outputs is not None:
            outputs[first : first + size] = hidden.view(*chunk.shape[:2], -1)
        progress(len(chunk))


def _batch(inputs: Tensor, blocks: int, states: list[dict[str, Tensor]]) -> Batch:
    sequences, tokens = inputs.shape[:2]
    positions = torch.arange(tokens)
    slots = torch.arange(sequences)[:, None] * (blocks * BLOCK) + positions
    queries = AttentionMetadata(
        torch.arange(sequences + 1, dtype=torch.int32) * tokens,
        torch.full((sequences,), tokens, dtype=torch.int32),
        torch.arange(sequences * blocks, dtype=torch.int32).view(sequences, blocks),
    )
    is_text = inputs.dim() == 2
    return Batch(
        token_ids=inputs.flatten() if is_text else torch.zeros(sequences * tokens, dtype=torch.int64),
        positions=positions.repeat(sequences),
        slot_mapping=slots.flatten(),
        attention=queries,
        logits_indices=torch.arange(sequences * tokens),
        logits_attention=queries,
        hidden_states=None if is_text else inputs.flatten(0, 1).clone(),
        states=_states(states, sequences) if states else None,
    )


def _states(cache: list[dict[str, Tensor]], sequences: int) -> StateBatch:
    """States of sequences that begin."""

    def zeros(count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32)

    slots = torch.arange(sequences, dtype=torch.int32)
    return StateBatch(cache, slots, zeros(sequences), zeros(sequences), zeros(sequences + 1), zeros(0), zeros(0))
