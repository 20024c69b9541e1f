"""Mixture of experts: a feed-forward layer in which each token is computed by a few experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from penstock.core.expert_placement import Ranks, places_of
from penstock.ops import Routing
from penstock.parallel import SINGLE_RANK, Shard, shard_outputs
from penstock.quant import ExpertMatrices

from .context import BuildContext
from .linear import ColumnParallelLinear
from .lora import ExpertLoRA
from .mlp import MLPLayer


class LatentProjections:
    """Projections from the hidden size to the smaller size of the experts, and back (Nemotron 3).

    Args:
        name: MLP module in the checkpoint with ``fc1_latent_proj`` and ``fc2_latent_proj``.
        size: size of the experts' input and output.
    """

    def __init__(self, context: BuildContext, name: str, hidden_size: int, size: int, bias: bool) -> None:
        self.size = size
        self.down, self.up = (
            ColumnParallelLinear(
                context, [f"{name}.{part}_latent_proj"], inputs, [shard_outputs(context.group, outputs)], bias, True
            )
            for part, inputs, outputs in (("fc1", hidden_size, size), ("fc2", size, hidden_size))
        )


class MixtureOfExperts:
    """An ``MLPLayer`` with MLPs as experts, usually gated. A router chooses ``routing.top_k`` experts for each token.

    Outputs of experts are added in the order of the router's choice, which depends on the token alone, so results have
    the same bits in every batch. Ranks split the outputs of each expert, or, with ``context.expert_parallel``, the
    experts. In both cases one rank computes the whole sum of an output.

    Args:
        name: MLP module in the checkpoint.
        intermediate_size: intermediate size of an expert.
        activation: activation of experts: a key of ``ops.activations.ACTIVATIONS`` or ``GATES``.
        bias: projections of experts have biases.
        router: name of the router's matrix, relative to ``name``.
        router_matrix_bias: the router's matrix has a bias.
        router_bias: ``[experts]`` float32, added to the scores to choose experts, but not to their weights.
        expert_factors: ``[experts]`` float32, factors of the experts' outputs; None: not scaled.
        table: experts of each token id, ``[vocabulary, top_k]`` int64; None: chosen by score.
        router_float32: compute the router's logits in float32, whatever the dtype of the model.
        projections: names of an expert's gate, up and down projections; without a gate, the first is "".
        layer: index of the layer in ``context.expert_load``.
        shared: shared expert, added for every token.
        shared_gate: name, relative to ``name``, of a matrix ``[1, hidden]``; the sigmoid of its output is the weight of
            ``shared``. "": weight 1.
        latent: projections around the experts; None: the experts' inputs have ``hidden_size`` elements.
        input_routing: routing with ``top_k`` 1 that gives a scale of the expert's input; None: not scaled.
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
        activation: str = "silu",
        bias: bool = False,
        router: str = "gate",
        router_matrix_bias: bool = False,
        router_bias: Tensor | None = None,
        expert_factors: Tensor | None = None,
        table: Tensor | None = None,
        router_float32: bool = False,
        projections: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
        layer: int = 0,
        shared: MLPLayer | None = None,
        shared_gate: str = "",
        input_routing: Routing | None = None,
        latent: LatentProjections | None = None,
    ) -> None:
        self._ops = context.ops
        self._group = context.group
        self._dtype = context.dtype
        self._activation = activation
        self._routing, self._input_routing = routing, input_routing
        all_experts = Shard(0, num_experts, num_experts)
        self._to_float32 = router_float32 and context.dtype != torch.float32
        router_context = replace(context, dtype=torch.float32) if self._to_float32 else context
        matrix = f"{name}.{router}"
        matrix_bias = router_context.read_weight(f"{matrix}.bias", num_experts) if router_matrix_bias else None
        self._router = router_context.unquantized_matrix(matrix, hidden_size, all_experts, matrix_bias)
        self._bias, self._factors, self._table = router_bias, expert_factors, table
        self._load = context.expert_load
        self._counts = self._load.of_layer(layer, num_experts, context.device) if self._load else None
        self._shared = shared
        self._shared_gate = (
            context.unquantized_matrix(f"{name}.{shared_gate}", hidden_size, Shard(0, 1, 1)) if shared_gate else None
        )
        self._expert_parallel = context.expert_parallel and context.group.size > 1
        numbers, self._experts, self._places = list(range(num_experts)), all_experts, None
        if self._expert_parallel:
            placement = context.experts_of_ranks(layer, num_experts)
            numbers = placement[context.group.rank]
            first = sum(map(len, placement[: context.group.rank]))
            self._experts = Shard(first, first + len(numbers), sum(map(len, placement)))
            self._places = _place_table(placement, num_experts, context.device)
        self._latent, size = latent, latent.size if latent else hidden_size
        group = SINGLE_RANK if self._expert_parallel else context.group
        self._shard, self._out_shard = (shard_outputs(group, each) for each in (intermediate_size, size))
        *gate_up, down = filter(None, projections)
        self._is_gated = len(gate_up) > 1

        def matrices(names: Sequence[str], inputs: int, shard: Shard) -> tuple[ExpertMatrices, ExpertLoRA | None]:
            def bias_of(members: Sequence[str]) -> Tensor | None:
                read = [context.read_weight(f"{each}.bias", shard.total, rows=shard.rows) for each in members if bias]
                return torch.cat(read) if read else None

            by_expert = [[f"{name}.experts.{number}.{each}" for each in names] for number in numbers]
            lora = context.expert_lora(by_expert, inputs, shard)
            biases = [bias_of(each) for each in by_expert]
            return context.expert_matrices(by_expert, inputs, shard, biases, self._experts.first), lora

        self._gate_up, self._gate_up_lora = matrices(gate_up, size, self._shard)
        self._down, self._down_lora = matrices([down], intermediate_size, self._out_shard)

    def __call__(
        self,
        x: Tensor,
        lora_slots: Tensor | None,
        router_input: Tensor | None = None,
        token_ids: Tensor | None = None,
    ) -> Tensor:
        """See ``MLPLayer``.

        Args:
            router_input: input of the router, ``[tokens, hidden]``; None: ``x``.
            token_ids: ``[tokens]`` int64, with ``table``.
        """
        router_input = x if router_input is None else router_input
        logits = self._router.linear(self._ops.to_float32(router_input) if self._to_float32 else router_input, True)
        ids, weights = self._ops.select_experts(
            logits, self._routing, self._bias, self._factors, token_ids, self._table
        )
        if self._load and self._counts is not None:
            self._ops.count_experts(ids, self._counts, self._load.num_tokens)
        shared = None if self._shared is None else self._shared(x, lora_slots)
        gate = None if self._shared_gate is None else self._shared_gate.linear(x, True)
        if self._latent is None:
            return self._combined(x, logits, ids, weights, shared, gate, lora_slots)
        combined = self._combined(self._latent.down(x, lora_slots), logits, ids, weights, None, None, lora_slots)
        result = self._latent.up(combined, lora_slots)
        return result if shared is None else self._ops.add_residual(shared, self._ops.clone(result))

    def _combined(
        self,
        x: Tensor,
        logits: Tensor,
        ids: Tensor,
        weights: Tensor,
        shared: Tensor | None,
        gate: Tensor | None,
        lora_slots: Tensor | None,
    ) -> Tensor:
        """Sum of the chosen experts and the shared expert."""
        if self._input_routing:
            _, factors = self._ops.select_experts(logits, self._input_routing)
            x = self._ops.combine_experts(x[:, None], factors, None, None)
        if self._expert_parallel:
            return self._split_by_experts(x, ids, weights, shared, gate)
        if self._gate_up_lora is None or self._ops.is_capturing():
            lora_slots = None  # captured steps are not used while adapters of experts are loaded
        return self._split_by_outputs(x, ids, weights, shared, gate, lora_slots)

    def _gated(self, x: Tensor, ids: Tensor, out: Tensor | None = None, lora_slots: Tensor | None = None) -> Tensor:
        if self._is_gated and (lora_slots is None or self._gate_up_lora is None):
            return self._gate_up.linear_activation_and_mul(x, ids, self._activation, out)
        products = self._gate_up.linear(x, ids)
        if lora_slots is not None and self._gate_up_lora is not None:
            products = self._gate_up_lora(products, x, lora_slots, ids)
        activate = self._ops.activation_and_mul if self._is_gated else self._ops.activation
        return activate(products, self._activation, out)

    def _split_by_experts(
        self, x: Tensor, ids: Tensor, weights: Tensor, shared: Tensor | None, gate: Tensor | None
    ) -> Tensor:
        """Output of the layer. Each rank computes its experts."""
        tokens, top_k = ids.shape
        if self._places is not None:
            ids = self._ops.place_experts(ids, self._places)

        def compute(out: Tensor | None) -> Tensor:
            by_token = None if out is None else out.unflatten(0, (tokens, top_k))
            return self._down.linear(self._gated(x, ids), ids, by_token).flatten(0, 1)

        def combine(rows: Tensor, columns: Shard) -> Tensor:
            shared_part = None if shared is None else shared[:, columns.first : columns.end]
            return self._ops.combine_experts(rows.unflatten(0, (tokens, top_k)), weights, shared_part, gate)

        width = self._out_shard.total
        return self._group.combine_rows(compute, ids.flatten(), self._experts, width, self._dtype, top_k, combine)

    def _split_by_outputs(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        shared: Tensor | None,
        gate: Tensor | None,
        lora_slots: Tensor | None,
    ) -> Tensor:
        """Output of the layer. Each rank computes some columns of every expert."""
        tokens, top_k = ids.shape

        def gate_up(out: Tensor | None) -> Tensor:
            by_token = None if out is None else out.unflatten(0, (tokens, top_k))
            return self._gated(x, ids, by_token, lora_slots).flatten(0, 1)

        activations = self._group.all_gather(gate_up, tokens * top_k, self._shard, self._dtype, top_k)

        def down(out: Tensor | None) -> Tensor:
            inputs = activations.unflatten(0, (tokens, top_k))
            outputs = self._down.linear(inputs, ids)
            if lora_slots is not None and self._down_lora is not None:
                outputs = self._down_lora(outputs, inputs, lora_slots, ids)
            shared_part = None if shared is None else shared[:, self._out_shard.first : self._out_shard.end]
            return self._ops.combine_experts(outputs, weights, shared_part, gate, out)

        return self._group.all_gather(down, tokens, self._out_shard, self._dtype)


def _place_table(placement: Ranks, num_experts: int, device: torch.device) -> Tensor | None:
    """Table for ``reference.place_experts``, ``[experts, 1 + max replicas]``: number of replicas of each expert, then
    their places (``places_of``), zero-padded. None if each expert has one replica, at its own index."""
    places = places_of(placement, num_experts)
    if places == [[expert] for expert in range(num_experts)]:
        return None
    width = max(map(len, places))
    return torch.tensor([[len(each), *each, *[0] * (width - len(each))] for each in places], device=device)
