"""Mixture of experts in ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Routing:
    """How each token's experts and their weights follow from the router's logits."""

    top_k: int
    """Experts of a token."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = False
    """Whether the scores of a token's experts are divided by their sum."""
    min_sum: float = 0.0
    """Least sum to divide by."""
    scale: float = 1.0
    """Of the weights in the end."""
    groups: int = 1
    """Equal groups of neighbouring experts, of which the best ``top_groups`` may be chosen from (DeepSeek-V2, section
    2.2.2)."""
    top_groups: int = 1
    group_score: Literal["max", "two best"] = "max"
    """A group's best score, or the sum of its two best ones (DeepSeek-V3)."""


@dataclass(frozen=True)
class FusedLayout:
    """How matrices lie in ``experts.gate_up_proj`` and ``experts.down_proj``, where a checkpoint has such: those of
    transformers are ``[experts, outputs, inputs]``, all outputs of the gate before those of up."""

    transposed: bool | None = False
    """Whether they are ``[experts, inputs, outputs]``; quantized ones never are. None is where their shape is that."""
    interleaved: bool = False
    """Whether outputs of gate and up take turns, the gate's first."""
    tensors: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    """Names of the two tensors, below that of the layer's module."""


@dataclass(frozen=True)
class ExpertsConfig:
    """The experts of a model's layers."""

    num_experts: int
    intermediate_size: int
    """Of each expert."""
    routing: Routing
    dense_layers: frozenset[int] = frozenset()
    """Numbers of the layers that have a dense MLP in place of experts."""
    shared_size: int = 0
    """Intermediate size of the expert that every token has, or of several as one; 0 is none."""
    shared_name: str = "shared_experts"
    shared_bias: bool = False
    shared_gate: str = ""
    router_bias: str = ""
    """Name of the tensor that is added to scores for the choice alone, below the layer's name; "" is none."""
    router_bias_shape: tuple[int, ...] = ()
    router_float32: bool = False
    """Whether the router's matrix is float32 in a model of any dtype."""
    module: str = "mlp"
    """Name of the layer's module."""
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    bias: bool = False
    """Whether an expert's projections have biases."""
    router: str = "gate"
    """Name of the router's matrix."""
    router_matrix_bias: bool = False
    """Whether the matrix has a bias, which is a part of the logits."""
    input_routing: Routing | None = None
    """As of ``MixtureOfExperts``."""
    vision_intermediate_size: int = 0
    """Of each expert for tokens of images, where these have as many experts of their own."""
    fused: FusedLayout = field(default_factory=FusedLayout)
    """Of checkpoints that have a projection of all experts in one tensor; others are read whatever it is."""

    @property
    def by_modality(self) -> bool:
        """Whether tokens of images have experts of their own, which no captured forward pass can choose."""
        return self.vision_intermediate_size > 0


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


def read_experts(
    raw: Mapping[str, Any], size: str, routing: Mapping[str, Any] | None = None, **fields: Any
) -> ExpertsConfig:
    """The experts of a ``config.json``, by the names that most families share.

    Args:
        size: name of the intermediate size of an expert.
        routing: fields of ``Routing`` in place of those read.
        fields: further fields of ``ExpertsConfig``.
    """
    num_experts = num_experts_of(raw)
    return ExpertsConfig(num_experts, int(raw[size]), read_routing(raw, num_experts, **(routing or {})), **fields)


def dense_layers_by_step(raw: Mapping[str, Any]) -> frozenset[int]:
    """``ExpertsConfig.dense_layers`` by ``mlp_only_layers`` and ``decoder_sparse_step``."""
    dense, step = raw.get("mlp_only_layers") or (), int(raw.get("decoder_sparse_step") or 1)
    layers = range(int(raw["num_hidden_layers"]))
    return frozenset(layer for layer in layers if layer in dense or (layer + 1) % step)


def read_deepseek_experts(raw: Mapping[str, Any], topk_method: str = "noaux_tc") -> ExpertsConfig | None:
    """The experts of DeepSeek-V3 (DeepSeek-AI, 2024, section 2.1.2), GLM-4.5, and with ``topk_method`` ``greedy`` or
    ``group_limited_greedy`` of DeepSeek-V2; None where all layers are dense.

    Args:
        topk_method: where ``config.json`` names none.
    """
    num_experts = int(raw.get("n_routed_experts") or 0)
    layers = range(int(raw["num_hidden_layers"]))
    dense = frozenset(layers).difference(sparse_layers(raw, len(layers)))
    if not num_experts or len(dense) == len(layers):
        return None
    fields: dict[str, Any] = {"scale": float(raw.get("routed_scaling_factor") or 1.0)}
    match raw.get("topk_method") or topk_method:
        case "greedy":
            fields |= {"renormalize": False, "groups": 1, "top_groups": 1}
        case "group_limited_greedy":
            fields |= {"renormalize": False}
        case "noaux_tc":
            fields |= {"scores": "sigmoid", "min_sum": 1e-20, "group_score": "two best"}
        case other:
            raise ValueError(f"topk_method is {other!r:.40}")
    intermediate_size = int(raw["moe_intermediate_size"])
    return ExpertsConfig(
        num_experts,
        intermediate_size,
        read_routing(raw, num_experts, **fields),
        dense_layers=dense,
        shared_size=intermediate_size * int(raw.get("n_shared_experts") or 0),
        router_bias="gate.e_score_correction_bias" if "scores" in fields else "",
        router_float32=True,
    )


def sparse_layers(config: Mapping[str, Any], layers: int) -> list[int]:
    """Numbers of the layers with experts of DeepSeek's models: from ``first_k_dense_replace`` on each that is a
    multiple of ``moe_layer_freq``, or those that it marks where it is a list.

    Raises ``ValueError`` for a list of another length.
    """
    frequency = config.get("moe_layer_freq")
    if isinstance(frequency, list):
        if len(frequency) != layers:
            raise ValueError(f"moe_layer_freq has {len(frequency)} of {layers} layers")
        return [layer for layer in range(layers) if frequency[layer]]
    first = int(config.get("first_k_dense_replace") or 0)
    return [layer for layer in range(first, layers) if layer % int(frequency or 1) == 0]


def read_common_experts(raw: Mapping[str, Any]) -> ExpertsConfig | None:
    """The experts of a model without a family, by the names that most have, as far as sizes need them; None without
    experts."""
    names = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
    if not (num_experts := next((int(raw[name]) for name in names if raw.get(name)), 0)):
        return None
    size, layers = int(raw.get("moe_intermediate_size") or raw["intermediate_size"]), int(raw["num_hidden_layers"])
    sparse = sparse_layers(raw, layers) if raw.get("n_routed_experts") else None
    gated = int(raw.get("shared_expert_intermediate_size") or 0)
    return ExpertsConfig(
        num_experts,
        size,
        Routing(1),
        dense_layers=dense_layers_by_step(raw) if sparse is None else frozenset(range(layers)).difference(sparse),
        shared_size=gated or size * int(raw.get("n_shared_experts") or raw.get("moe_num_shared_experts") or 0),
        shared_gate="shared_expert_gate" if gated else "",
    )
