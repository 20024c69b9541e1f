"""Factory of mixture-of-experts layers in decoders."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.checkpoint.experts_config import ExpertsConfig
from penstock.checkpoint.model_config import ModelConfig
from penstock.core.errors import invalid
from penstock.layers import MLP, BuildContext, GatedMLP, LatentProjections, MixtureOfExperts, MLPLayer

from .layer import dense_mlp


def feed_forward(context: BuildContext, config: ModelConfig, layer: int, name: str) -> MLPLayer:
    """``MLPFactory``: ``MixtureOfExperts`` in layers with experts, ``dense_mlp`` in dense layers."""
    if (experts := config.experts) is None:
        return dense_mlp(context, config, layer, name)
    name = f"{name.removesuffix('mlp')}{experts.module}"
    if layer in experts.dense_layers:
        return dense_mlp(context, config, layer, name)
    shared, is_hashed = None, layer in experts.hash_layers
    if experts.shared_size:
        shared_name = f"{name}.{experts.shared_name}"
        shared = _shared_expert(context, experts, config, shared_name)
    return MixtureOfExperts(
        context,
        name,
        config.hidden_size,
        experts.num_experts,
        experts.intermediate_size,
        experts.routing,
        activation=config.options.activation,
        bias=experts.bias,
        router=experts.router,
        router_matrix_bias=experts.router_matrix_bias,
        router_bias=_router_bias(context, experts, name) if experts.router_bias and not is_hashed else None,
        table=_hash_table(context, experts, config, name) if is_hashed else None,
        router_float32=experts.router_float32,
        projections=experts.projections,
        layer=layer,
        shared=shared,
        shared_gate=experts.shared_gate,
        input_routing=experts.input_routing,
        latent=LatentProjections(context, name, config.hidden_size, experts.latent_size, experts.latent_bias)
        if experts.latent_size
        else None,
    )


def _shared_expert(context: BuildContext, experts: ExpertsConfig, config: ModelConfig, name: str) -> MLPLayer:
    sizes = config.hidden_size, experts.shared_size, experts.shared_bias
    if experts.projections[0]:
        return GatedMLP(context, name, *sizes, config.options.activation, projections=experts.shared_projections)
    return MLP(context, (f"{name}.up_proj", f"{name}.down_proj"), *sizes, config.options.activation)


def _hash_table(context: BuildContext, experts: ExpertsConfig, config: ModelConfig, name: str) -> Tensor:
    """Experts of each token id, ``[vocabulary, top_k]`` int64."""
    tensor = f"{name}.gate.tid2eid"
    table = context.read_weight(tensor, config.vocab_size, experts.routing.top_k, as_stored=True)
    if table.dtype not in (torch.int32, torch.int64):
        raise invalid("model", f"tensor {tensor} has dtype {table.dtype}; it must be int64 or int32")
    if table.min() < 0 or table.max() >= experts.num_experts:
        message = (
            f"tensor {tensor} has experts from {table.min()} to {table.max()}, but there are {experts.num_experts}"
        )
        raise invalid("model", f"{message}; check the weights")
    return table.long().contiguous()


def _router_bias(context: BuildContext, experts: ExpertsConfig, name: str) -> Tensor:
    shape = experts.router_bias_shape or (experts.num_experts,)
    return context.read_weight(f"{name}.{experts.router_bias}", *shape, as_stored=True).float().flatten().clone()
