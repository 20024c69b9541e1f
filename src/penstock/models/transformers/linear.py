"""Linear layers of a transformers module, computed by Penstock's kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor, nn

from penstock.core.errors import invalid
from penstock.core.quantization import UNQUANTIZED, Format
from penstock.layers import BuildContext, Weights
from penstock.ops import QuantizedWeight
from penstock.parallel import shard_outputs
from penstock.quant import Matrix

from .ranks import GatheredMatrix, group_of
from .sources import WeightSources


class ModuleWeights:
    """``layers.Weights`` by the names of a module: its parameters, and matrices of the checkpoint.

    Args:
        weights: the checkpoint's weights.
        sources: names of the matrices in the checkpoint of modules whose parameters are not loaded.
    """

    def __init__(self, module: nn.Module, weights: Weights, sources: Mapping[str, str]) -> None:
        self._module = module
        self._weights = weights
        self._sources = sources

    @property
    def version(self) -> str:
        return self._weights.version

    def read(self, name: str, *shape: int, rows: tuple[int, int] | None = None, as_stored: bool = False) -> Tensor:
        if source := self._sources.get(name.removesuffix(".weight")):
            return self._weights.read(f"{source}.weight", *shape, rows=rows, as_stored=as_stored)
        tensor = self._module.get_parameter(name).detach()
        if tensor.shape != shape:
            raise invalid("model", f"tensor {name} has shape {tuple(tensor.shape)}; it must be {shape}")
        return tensor if rows is None else tensor[rows[0] : rows[1]]

    def has(self, name: str) -> bool:
        return any(name == parameter for parameter, _ in self._module.named_parameters())

    def format_of(self, name: str) -> Format:
        return self._weights.format_of(self._sources[name]) if name in self._sources else UNQUANTIZED

    def read_quantized(self, name: str, outputs: int, inputs: int, rows: tuple[int, int]) -> QuantizedWeight | Tensor:
        return self._weights.read_quantized(self._sources[name], outputs, inputs, rows)


class PackedLinear(nn.Module):
    """Replacement of ``nn.Linear`` with a packed matrix, which includes the bias.

    Args:
        out_float32: return float32 (for logits).
    """

    def __init__(self, linear: nn.Linear, matrix: GatheredMatrix, out_float32: bool) -> None:
        super().__init__()
        self._matrix = matrix
        self._out_float32 = out_float32
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features

    @property
    def weight(self) -> Tensor:
        """The weight, ``[out, in]``, for modules that use it directly. It is unpacked at each access."""
        return self._matrix.whole()

    def forward(self, x: Tensor) -> Tensor:
        """Multiply ``[..., in]``. Returns ``[..., out]``."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self._matrix.linear(rows, self._out_float32).view(*x.shape[:-1], self.out_features)


class PackedEmbedding(nn.Module):
    """Replacement of ``nn.Embedding`` with a packed matrix."""

    def __init__(self, matrix: GatheredMatrix) -> None:
        super().__init__()
        self._matrix = matrix

    def forward(self, token_ids: Tensor) -> Tensor:
        """Embed ``[...]`` int64. Returns ``[..., hidden]``."""
        return self._matrix.rows(token_ids.flatten()).view(*token_ids.shape, -1)


def pack_linears(
    context: BuildContext,
    model: nn.Module,
    head: nn.Module | None,
    embedding: nn.Module | None,
    sources: WeightSources | None,
) -> None:
    """Replace each ``nn.Linear`` of a model by a ``PackedLinear``.

    Args:
        sources: matrices of the checkpoint for layers whose parameters are not loaded.
        head: language model head. It shares the packed matrix with ``embedding`` if the two are tied.
    """
    _convert_conv1d(model)
    linears = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    stored = {name: source for name, module in linears if sources and (source := sources.of(module))}
    context = replace(context, weights=ModuleWeights(model, context.weights, stored), weight_cache=None)
    for name, module in linears:
        inputs, outputs, is_head = module.in_features, module.out_features, module is head
        shard = shard_outputs(group_of(context.group, outputs), outputs)
        bias = None if module.bias is None else module.bias.detach()[shard.first : shard.end].clone()
        is_tied = type(embedding) is nn.Embedding and embedding.weight is module.weight
        if is_head and bias is None:
            packed: Matrix = context.vocabulary_matrix(name, inputs, shard)
        else:
            packed = context.matrix([name], inputs, [shard], context.scheme.head if is_head else None, bias)
        matrix = GatheredMatrix(context, packed, outputs, inputs)
        if is_tied and is_head and bias is None:
            at = next(name for name, module in model.named_modules() if module is embedding)
            model.set_submodule(at, PackedEmbedding(matrix))
        model.set_submodule(name, PackedLinear(module, matrix, out_float32=is_head))


def _convert_conv1d(model: nn.Module) -> None:
    """Replace the transposed linear layers of GPT-2 by ``nn.Linear``."""
    from transformers.pytorch_utils import Conv1D

    for name, module in [(name, module) for name, module in model.named_modules() if type(module) is Conv1D]:
        linear = nn.Linear(module.nx, module.nf, device="meta")
        linear.weight, linear.bias = nn.Parameter(module.weight.detach().T), module.bias
        model.set_submodule(name, linear)


def has_other_matrices(model: nn.Module) -> bool:
    """Whether a model with packed linear layers has matrices that are not packed, e.g. experts in one tensor."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return any(weight.dim() > 1 and id(weight) not in embeddings for weight in model.parameters())
