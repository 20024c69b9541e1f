"""Mixture of experts in ``config.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.ops import Routing


@dataclass(frozen=True)
class ExpertsConfig:
    """The experts of a model's layers."""

    num_experts: int
    intermediate_size: int
    """Of each expert."""
    routing: Routing
    is_sparse: Callable[[int], bool] = lambda layer: True
    """Whether the layer of a number has experts; others have a dense MLP."""
    shared_size: int = 0
    """Intermediate size of the expert that every token has, or of several as one; 0 is none."""
    shared_name: str = "shared_experts"
    shared_bias: bool = False
    shared_gate: str = ""
    router_bias: str = ""
    """Name of the tensor that is added to scores for the choice alone, below the layer's name; "" is none."""
    router_bias_shape: tuple[int, ...] = ()
    module: str = "mlp"
    """Name of the layer's module."""
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


def read_routing(raw: Mapping[str, Any], num_experts: int, **fields: Any) -> Routing:
    """The router of a ``config.json``, with the names that most families share.

    Args:
        fields: of ``Routing`` in place of those read.

    Raises ``ValueError`` where it asks for more experts than there are.
    """
    groups, top_groups = int(raw.get("n_group") or 1), int(raw.get("topk_group") or 1)
    given = {
        "top_k": int(raw["num_experts_per_tok"]) if "top_k" not in fields else 0,
        "renormalize": bool(raw.get("norm_topk_prob", False)),
        "groups": groups,
        "top_groups": top_groups,
    }
    routing = Routing(**given | fields)
    if num_experts % routing.groups or not 1 <= routing.top_groups <= routing.groups:
        raise ValueError(f"{num_experts} experts in {routing.groups} groups, of which {routing.top_groups} are chosen")
    if not 1 <= routing.top_k <= num_experts // routing.groups * routing.top_groups:
        raise ValueError(f"{routing.top_k} experts of a token, of {num_experts}")
    return routing


def num_experts_of(raw: Mapping[str, Any]) -> int:
    """Number of experts, by either of the names that families use."""
    return int(raw["num_experts"] if raw.get("num_experts") is not None else raw["num_local_experts"])


def is_sparse_by_step(raw: Mapping[str, Any]) -> Callable[[int], bool]:
    """``ExpertsConfig.is_sparse`` by ``mlp_only_layers`` and ``decoder_sparse_step``."""
    dense, step = tuple(raw.get("mlp_only_layers") or ()), int(raw.get("decoder_sparse_step") or 1)
    return lambda layer: layer not in dense and (layer + 1) % step == 0
