"""Mixture of experts: a feed-forward layer of which each token takes a few parts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from penstock.core.quantization import UNQUANTIZED
from penstock.ops import Routing
from penstock.parallel import Shard, shard_outputs
from penstock.quant import ExpertMatrices

from .context import BuildContext
from .mlp import MLPLayer


class MixtureOfExperts:
    """An ``MLPLayer``: SwiGLU experts (``GatedMLP``), of which a router chooses ``routing.top_k`` for each token.

    Outputs of experts are added in the order of the router's choice, which depends on the token alone, so that results
    have the same bits in every batch. Ranks split the outputs of each expert.

    Args:
        name: of the checkpoint's module.
        intermediate_size: of each expert.
        router: name of the router's matrix, below ``name``.
        router_bias: ``[experts]`` float32, as of ``reference.select_experts``.
        projections: names of an expert's gate, up and down projections.
        shared: an expert that every token has, besides.
        shared_gate: name of the matrix ``[1, hidden]`` whose output's sigmoid is the weight of ``shared``, below
            ``name``; "" is a weight of 1.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        hidden_size: int,
        num_experts: int,
        intermediate_size: int,
        routing: Routing,
        *,
        router: str = "gate",
        router_bias: Tensor | None = None,
        projections: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
        shared: MLPLayer | None = None,
        shared_gate: str = "",
    ) -> None:
        self._ops = context.ops
        self._group = context.group
        self._dtype = context.dtype
        self._routing = routing
        all_experts = Shard(0, num_experts, num_experts)
        self._router = context.matrix([f"{name}.{router}"], hidden_size, [all_experts], UNQUANTIZED)
        self._bias = router_bias
        self._shared = shared
        self._shared_gate = (
            context.matrix([f"{name}.{shared_gate}"], hidden_size, [Shard(0, 1, 1)], UNQUANTIZED)
            if shared_gate
            else None
        )
        self._shard = shard_outputs(context.group, intermediate_size)
        self._out_shard = shard_outputs(context.group, hidden_size)
        gate, up, down = projections

        def matrices(names: Sequence[str], inputs: int, shard: Shard) -> ExpertMatrices:
            experts = [[f"{name}.experts.{number}.{each}" for each in names] for number in range(num_experts)]
            packed = [context.matrix(own, inputs, [shard] * len(own), context.scheme.layers) for own in experts]
            return ExpertMatrices(context.ops, packed, 0, context.dtype)

        self._gate_up = matrices([gate, up], hidden_size, self._shard)
        self._down = matrices([down], intermediate_size, self._out_shard)

    def __call__(self, x: Tensor, lora_slots: Tensor | None) -> Tensor:
        tokens, top_k = x.shape[0], self._routing.top_k
        ids, weights = self._ops.select_experts(self._router.linear(x, True), self._routing, self._bias)
        shared = None if self._shared is None else self._shared(x, lora_slots)
        gate = None if self._shared_gate is None else self._shared_gate.linear(x, True)

        def gate_up(out: Tensor | None) -> Tensor:
            own = None if out is None else out.unflatten(0, (tokens, top_k))
            return self._gate_up.linear_silu_and_mul(x, ids, own).flatten(0, 1)

        activations = self._group.all_gather(gate_up, tokens * top_k, self._shard, self._dtype, top_k)

        def down(out: Tensor | None) -> Tensor:
            outputs = self._down.linear(activations.unflatten(0, (tokens, top_k)), ids)
            own = None if shared is None else shared[:, self._out_shard.first : self._out_shard.end]
            return self._ops.combine_experts(outputs, weights, own, gate, out)

        return self._group.all_gather(down, tokens, self._out_shard, self._dtype)
