"""Experts of a transformers module, computed by Penstock's kernels.

transformers has one class of experts per family, with the parameters ``gate_up_proj`` (or ``up_proj``) and
``down_proj`` of all experts, and a decorator (``use_experts_implementation``) that describes their layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.core.errors import invalid
from penstock.core.quantization import UNQUANTIZED, Format
from penstock.layers import BuildContext, Weights
from penstock.ops import QuantizedWeight
from penstock.parallel import Shard, shard_outputs
from penstock.quant import ExpertMatrices

from .conversions import DOWN, GATE, GATE_UP, UP, ExpertNames, expert_modules
from .ranks import gather, group_of

ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu2",
    "Tanh": "tanh",
}
"""Class of an activation in transformers or PyTorch → key of ``ops.activations.ACTIVATIONS``."""


class ExpertWeights:
    """``layers.Weights`` of a module of experts, by the names ``<module>.<expert>.<projection>``.

    Args:
        weights: the checkpoint's weights.
        stored: names in the checkpoint of matrices whose parameters are not loaded.
    """

    def __init__(self, module: Any, weights: Weights, stored: ExpertNames) -> None:
        self._module, self._weights, self._stored = module, weights, stored

    @property
    def version(self) -> str:
        return self._weights.version

    def _source(self, name: str) -> str:
        """The name in the checkpoint; "" for a loaded parameter."""
        expert, projection = name.split(".")[-2:]
        return self._stored[projection][int(expert)] if projection in self._stored else ""

    def read(self, name: str, *shape: int, rows: tuple[int, int] | None = None, as_stored: bool = False) -> Tensor:
        name = name.removesuffix(".weight")
        if source := self._source(name):
            return self._weights.read(f"{source}.weight", *shape, rows=rows, as_stored=as_stored)
        expert, projection = name.split(".")[-2:]
        matrix = self._matrix(int(expert), projection)
        if matrix.shape != shape:
            raise invalid("model", f"matrix {name} has shape {tuple(matrix.shape)}; it must be {shape}")
        return matrix if rows is None else matrix[rows[0] : rows[1]]

    def _matrix(self, expert: int, projection: str) -> Tensor:
        is_half = projection in (GATE, UP) and self._module.has_gate
        parameter = getattr(self._module, GATE_UP if is_half else projection).detach()[expert]
        matrix: Tensor = parameter.T if self._module.is_transposed else parameter
        if not is_half:
            return matrix
        return matrix.chunk(2)[projection == UP]

    def has(self, name: str) -> bool:
        return True

    def format_of(self, name: str) -> Format:
        source = self._source(name)
        return self._weights.format_of(source) if source else UNQUANTIZED

    def read_quantized(self, name: str, outputs: int, inputs: int, rows: tuple[int, int]) -> QuantizedWeight | Tensor:
        return self._weights.read_quantized(self._source(name), outputs, inputs, rows)


class PackedExperts:
    """Replacement of the ``forward`` of a module of experts. Each rank has some outputs of every expert.

    Args:
        context: build context with ``ExpertWeights``.
        name: name of the module.
    """

    def __init__(self, context: BuildContext, name: str, module: Any) -> None:
        self._ops, self._dtype, self._module = context.ops, context.dtype, module
        _, first_size, second_size = module.down_proj.shape
        size, width = (first_size, second_size) if module.is_transposed else (second_size, first_size)
        self._group = group_of(context.group, min(size, width))
        self._shard, self._out_shard = (shard_outputs(self._group, each) for each in (size, width))
        inputs = getattr(module, GATE_UP if module.has_gate else UP).shape[1 if module.is_transposed else 2]
        if not module.has_gate:
            first, shard = [UP], self._shard
        elif module.is_concatenated:
            first, shard = [GATE, UP], self._shard
        else:  # outputs of gate and up alternate
            first, shard = [GATE_UP], self._shard * 2
        self._gate_up = _matrices(context, name, module, first, inputs, shard)
        self._down = _matrices(context, name, module, [DOWN], size, self._out_shard)
        from transformers.integrations.moe import _default_apply_gate

        known = ACTIVATIONS.get(type(module.act_fn).__name__) if hasattr(module, "act_fn") else None
        is_plain = not module.has_gate or (first == [GATE, UP] and type(module)._apply_gate is _default_apply_gate)
        self._activation = known if is_plain else None
        for parameter in (GATE_UP, UP, DOWN):
            if hasattr(module, parameter):
                delattr(module, parameter)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Sum of the chosen experts' outputs, ``[tokens, hidden]`` to ``[tokens, hidden]``."""
        x, ids = hidden_states.to(self._dtype).contiguous(), top_k_index.long().contiguous()
        weights = top_k_weights.float().reshape(ids.shape).contiguous()
        (tokens, top_k), group = ids.shape, self._group

        def gate_up(out: Tensor | None) -> Tensor:
            return self._gated(x, ids, None if out is None else out.unflatten(0, (tokens, top_k))).flatten(0, 1)

        gated = group.all_gather(gate_up, tokens * top_k, self._shard, self._dtype, top_k)
        inputs = gated.unflatten(0, (tokens, top_k))

        def down(out: Tensor | None) -> Tensor:
            return self._ops.combine_experts(self._down.linear(inputs, ids), weights, None, None, out)

        if not self._module.has_post_expert_norm:
            return gather(group, down, tokens, self._out_shard, self._dtype).to(hidden_states.dtype)

        def each(out: Tensor | None) -> Tensor:
            by_token = None if out is None else out.unflatten(0, (tokens, top_k))
            return self._down.linear(inputs, ids, by_token).flatten(0, 1)

        outputs = gather(group, each, tokens * top_k, self._out_shard, self._dtype)
        normed = self._module.post_expert_norm(outputs).to(self._dtype).contiguous()
        combined = self._ops.combine_experts(normed.unflatten(0, (tokens, top_k)), weights, None, None)
        return combined.to(hidden_states.dtype)

    def _gated(self, x: Tensor, ids: Tensor, out: Tensor | None) -> Tensor:
        """Input of the down projections, this rank's columns, ``[tokens, top_k, columns]``."""
        if self._activation and self._module.has_gate:
            return self._gate_up.linear_activation_and_mul(x, ids, self._activation, out)
        products = self._gate_up.linear(x, ids)
        if self._activation:
            return self._ops.activation(products, self._activation, out)
        function = self._module._apply_gate if self._module.has_gate else self._module.act_fn
        gated: Tensor = function(products.flatten(0, 1)).to(self._dtype).view(*ids.shape, -1)
        return gated if out is None else out.copy_(gated)


def _matrices(
    context: BuildContext, name: str, module: Any, projections: Sequence[str], inputs: int, shard: Shard
) -> ExpertMatrices:
    """The matrices of some projections of all experts, the rows of this rank of each."""
    experts = len(module.down_proj)
    names = [[f"{name}.{expert}.{projection}" for projection in projections] for expert in range(experts)]
    biases: list[Tensor | None] = [None] * experts
    if module.has_bias:
        stored = getattr(module, f"{DOWN if projections == [DOWN] else GATE_UP if module.has_gate else UP}_bias")
        parts = stored.detach().chunk(len(projections), -1)
        biases = list(torch.cat([part[:, shard.first : shard.end] for part in parts], -1))
    return context.expert_matrices(names, inputs, shard, biases, 0)


def pack_experts(context: BuildContext, model: nn.Module, stored: Mapping[str, ExpertNames]) -> None:
    """Compute the experts of a model with ``PackedExperts``.

    Args:
        stored: names in the checkpoint, by module, of experts whose parameters are not loaded.
    """
    for name, module in list(expert_modules(model)):
        weights = ExpertWeights(module, context.weights, stored.get(name, {}))
        module.forward = PackedExperts(replace(context, weights=weights, weight_cache=None), name, module)
