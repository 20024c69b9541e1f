"""Gemma 3n: AltUp, Laurel, sparse activations, and what Gemma 4 has."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.model_config import ModelConfig
from penstock.layers import BuildContext, ColumnParallelLinear, GatedMLP, MLPLayer
from penstock.ops import Batch, LayerExport
from penstock.parallel import Shard, shard_outputs

from .families.gemma3n import intermediate_size, sparsity
from .families.gemma4 import layer_input_size
from .gemma4 import Gemma4, LayerInput, LayerInputs, RouterNorm
from .layer import AttentionFactory, DecoderLayer, MLPFactory, make_norm

MIN_SQUARE = 1e-5
"""Least mean square by which streams are divided."""


def whole_linear(context: BuildContext, name: str, inputs: int, outputs: int) -> ColumnParallelLinear:
    """A linear layer without bias, whose outputs all ranks have."""
    return ColumnParallelLinear(context, [name], inputs, [shard_outputs(context.group, outputs)], gather_output=True)


class SparseGatedMLP:
    """Gated MLP, an ``MLPLayer``, whose gates are first set to zero, except the largest.

    Args:
        name: module in the checkpoint.
        fraction: fraction of the gates that are set to zero, if they are normally distributed.
    """

    def __init__(
        self, context: BuildContext, name: str, hidden_size: int, size: int, activation: str, fraction: float
    ) -> None:
        self._ops, self._group, self._dtype = context.ops, context.group, context.dtype
        self._activation, self._multiplier = activation, NormalDist().inv_cdf(fraction)
        self._shard = shard_outputs(context.group, size)
        self._gate = whole_linear(context, f"{name}.gate_proj", hidden_size, size)
        self._up = ColumnParallelLinear(context, [f"{name}.up_proj"], hidden_size, [self._shard])
        self._down = whole_linear(context, f"{name}.down_proj", size, hidden_size)

    def __call__(self, x: Tensor, lora_slots: Tensor | None) -> Tensor:
        gates = self._ops.gaussian_topk(self._gate(x, lora_slots), self._multiplier)
        gates, up = gates[:, self._shard.first : self._shard.end], self._up(x, lora_slots)
        activations = self._group.all_gather(
            lambda out: self._ops.multiply(up, gates, self._activation, out), x.shape[0], self._shard, self._dtype
        )
        return self._down(activations, lora_slots)


def make_mlp(context: BuildContext, config: ModelConfig, layer: int, name: str) -> MLPLayer:
    """``MLPFactory`` of Gemma 3n."""
    size, fraction, activation = intermediate_size(config, layer), sparsity(config, layer), config.options.activation
    if fraction:
        return SparseGatedMLP(context, name, config.hidden_size, size, activation, fraction)
    return GatedMLP(context, name, config.hidden_size, size, activation=activation)


class Laurel:
    """Learned augmented residual layer (Menghani et al., 2024): ``x`` plus the norm of a low-rank product.

    Args:
        name: module in the checkpoint.
    """

    def __init__(self, context: BuildContext, config: ModelConfig, name: str) -> None:
        self._ops, hidden, rank = context.ops, config.hidden_size, int(config.raw["laurel_rank"])
        self._left = whole_linear(context, f"{name}.linear_left", hidden, rank)
        self._right = whole_linear(context, f"{name}.linear_right", rank, hidden)
        self._norm = make_norm(context, config, f"{name}.post_laurel_norm", hidden)

    def __call__(self, x: Tensor, lora_slots: Tensor | None) -> Tensor:
        """Compute ``[tokens, hidden]``. ``x`` may be changed."""
        return self._ops.add_residual(self._norm(self._right(self._left(x, lora_slots), lora_slots)), x)


class AltUp:
    """Alternating updates (Baykal et al., 2023): all residual streams are predicted from those before the layer; the
    layer computes the active one, and the difference corrects the others.

    Both are products of the streams and a matrix for each token, ``ops.mix_streams``. Its elements are linear functions
    of a few numbers, the modalities of the active stream.

    Args:
        name: module in the checkpoint.
    """

    def __init__(self, context: BuildContext, config: ModelConfig, name: str) -> None:
        self._ops, self._hidden, streams = context.ops, config.hidden_size, config.residual_streams
        self._streams, self._active = streams, active = streams, int(config.raw["altup_active_idx"])
        norm = f"{name}.router_norm.weight"
        self._norm = RouterNorm(context, norm, self._hidden, config.rms_norm_eps, 1 / self._hidden)
        every = Shard(0, streams, streams)
        self._router = context.unquantized_matrix(f"{name}.modality_router", self._hidden, every)

        def read(part: str, outputs: int) -> Tensor:
            return context.read_matrix(f"{name}.{part}", streams, Shard(0, outputs, outputs)).float()

        same = torch.eye(streams, device=context.device)
        predict, correct = read("prediction_coefs", streams**2), read("correction_coefs", streams)
        predict = predict.unflatten(0, (streams, streams)).transpose(0, 1)
        self._predict = self._pack(torch.zeros_like(correct), predict, torch.zeros(streams), same)
        # Stream k + coefficient of k * (activated - active), where the coefficient has 1 added.
        minus = torch.zeros(streams, streams, streams, device=context.device)
        minus[active] = -correct
        ones = torch.ones(streams, device=context.device)
        self._correct = self._pack(correct, minus, ones, same - same[:, active, None] * ones)

    def _pack(self, expand: Tensor, mix: Tensor, expand_bias: Tensor, mix_bias: Tensor) -> Any:
        """A matrix from modalities to weights of ``ops.mix_streams``."""
        unused = torch.zeros_like(expand)
        bias = torch.cat((unused[0], expand_bias.to(unused.device), mix_bias.flatten()))
        return self._ops.pack([torch.cat((unused, expand, mix.flatten(0, 1))).contiguous()], bias)

    def active(self, streams: Tensor) -> Tensor:
        """The active stream, ``[tokens, hidden]``: a view of ``[tokens, streams * hidden]``."""
        first = self._active * self._hidden
        return streams[:, first : first + self._hidden]

    def predict(self, streams: Tensor) -> Tensor:
        """Predict the streams after the layer, ``[tokens, streams * hidden]``. ``streams`` may be changed."""
        normed = self._norm(self.active(streams))
        return self._ops.mix_streams(normed, streams, self._weights(normed, self._predict), self._streams)

    def correct(self, predicted: Tensor, activated: Tensor) -> Tensor:
        """Correct predicted streams, which may be changed, by the output of the layer, ``[tokens, hidden]``."""
        weights = self._weights(self._norm(activated), self._correct)
        return self._ops.mix_streams(activated, predicted, weights, self._streams)

    def _weights(self, normed: Tensor, matrix: Any) -> Tensor:
        modalities = self._ops.scale(self._router.linear(normed, True), 1.0, 1.0)  # tanh
        return self._ops.linear(modalities, matrix, True)


class Gemma3nLayer(DecoderLayer):
    """A decoder layer on several residual streams, which are the first result.

    Args:
        number: index of the layer.
    """

    def __init__(
        self,
        context: BuildContext,
        config: ModelConfig,
        number: int,
        attention: AttentionFactory,
        mlp: MLPFactory,
        inputs: LayerInputs,
    ) -> None:
        super().__init__(context, config, number, attention, mlp)
        name, hidden, streams = f"model.layers.{number}", config.hidden_size, config.residual_streams
        self._streams = streams
        self._altup, self._laurel = (
            AltUp(context, config, f"{name}.altup"),
            Laurel(context, config, f"{name}.laurel"),
        )
        self._input = LayerInput(context, config, name, number, inputs, layer_input_size(config))
        self._input_scale = (
            context.read_weight(f"{name}.altup.correct_output_scale", hidden)
            if config.raw["altup_correct_scale"]
            else torch.ones(hidden, dtype=context.dtype, device=context.device)
        )

        def weights() -> Tensor:
            """Weights of ``mix_streams`` that add to all streams but the first."""
            expand, same = torch.ones(streams), torch.eye(streams)
            expand[0] = 0
            return torch.cat((torch.zeros(streams), expand, same.flatten()))[None].to(context.device)

        self._add_weights = context.shared_table(f"add to streams {streams}", weights)

    def __call__(
        self, x: Tensor, residual: Tensor | None, cache: Any, batch: Batch, export: LayerExport | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See ``DecoderLayer``. ``x`` are the residual streams, ``[tokens, streams * hidden]``."""
        ops, altup, rows = self._ops, self._altup, batch.logits_indices if self._last else None
        assert self.attention and self._mlp and self._before_attention and self._before_mlp
        streams = altup.predict(x)
        normed = self._before_attention(altup.active(streams))
        attended = self._output(self.attention(normed, cache, batch, self._last, export), self._after_attention, None)
        if rows is not None:
            streams, normed = ops.index_select(streams, rows), ops.index_select(normed, rows)
        slots = batch.lora_slots if rows is None else batch.logits_lora_slots
        total = ops.add_residual(altup.active(streams), attended)
        total = ops.scale(ops.add_residual(self._laurel(normed, slots), total), 2**-0.5)
        computed = self._output(self._mlp(self._before_mlp(total), slots), self._after_mlp, None)
        streams = altup.correct(streams, ops.add_residual(computed, total))
        active = altup.active(streams)
        scaled = ops.multiply(active, self._input_scale.expand(active.shape[0], -1))
        return ops.mix_streams(self._input(scaled, slots, rows), streams, self._add_weights, self._streams), None


class Gemma3n(Gemma4):
    """A ``Decoder`` of Gemma 3n."""

    def __init__(self, context: BuildContext, config: ModelConfig, num_mtp_heads: int = 0) -> None:
        self._streams, hidden = config.residual_streams, config.hidden_size
        layers, numbers = context.layers or range(config.num_layers), range(self._streams - 1)

        def projections(part: str, exist: bool) -> list[ColumnParallelLinear]:
            names = [f"model.{part}.{number}" for number in numbers] if exist else []
            return [whole_linear(context, name, hidden, hidden) for name in names]

        self._projections = projections("altup_projections", layers.start == 0)
        self._unembed_projections = projections("altup_unembed_projections", layers.stop == config.num_layers)
        self._each = torch.eye(self._streams, device=context.device)
        """Row ``i`` are weights that select stream ``i``."""
        self._mean = self._each.mean(0, keepdim=True)
        super().__init__(context, config, num_mtp_heads, make_mlp)
        names = {
            f"model.altup_{part}.{number}" for part in ("projections", "unembed_projections") for number in numbers
        }
        self.lora_targets = {**dict.fromkeys(names), **self.lora_targets}

    def _make_layer(
        self, context: BuildContext, number: int, attention: AttentionFactory, mlp: MLPFactory
    ) -> DecoderLayer:
        assert self._inputs
        return Gemma3nLayer(context, self.config, number, attention, mlp, self._inputs)

    def _enter(self, batch: Batch) -> Tensor:
        streams = x = super()._enter(batch)
        for projection in self._projections:
            streams = self._ops.concatenate(streams, projection(x, batch.lora_slots))
        return self._ops.equalize_streams(streams, self._streams, MIN_SQUARE)

    def _leave(self, x: Tensor, residual: Tensor | None, batch: Batch) -> Tensor:
        first, *others = (self._ops.collapse_streams(x, each[None], self._streams) for each in self._each)
        streams = first
        for stream, projection in zip(others, self._unembed_projections, strict=True):
            streams = self._ops.concatenate(streams, projection(stream, batch.logits_lora_slots))
        streams = self._ops.equalize_streams(streams, self._streams, MIN_SQUARE)
        return super()._leave(self._ops.collapse_streams(streams, self._mean, self._streams), residual, batch)
