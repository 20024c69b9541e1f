"""Mixture-of-experts settings of ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Routing:
    """How experts and their weights are computed from the router's logits."""

    top_k: int
    """Number of experts per token."""
    scores: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    """Function from logits to scores."""
    renormalize: bool = False
    """Divide the scores of the chosen experts by their sum."""
    min_sum: float = 0.0
    """Lower bound of the sum that ``renormalize`` divides by."""
    scale: float = 1.0
    """Factor of the weights of the chosen experts."""
    groups: int = 1
    """Number of equal groups of consecutive experts. Experts are chosen from the best ``top_groups`` groups
    (DeepSeek-V2, section 2.2.2)."""
    top_groups: int = 1
    group_score: Literal["max", "two best"] = "max"
    """Score of a group: its best score, or the sum of its two best scores (DeepSeek-V3)."""
    added_sum: float = 0.0
    """Number added to the sum that ``renormalize`` divides by (LFM2)."""


@dataclass(frozen=True)
class FusedLayout:
    """Layout of fused tensors with the projections of all experts. The default is that of transformers:
    ``[experts, outputs, inputs]``, with all outputs of the gate before those of the up projection."""

    transposed: bool | None = False
    """Unquantized tensors are ``[experts, inputs, outputs]``; None: decided by their shape."""
    interleaved: bool = False
    """Outputs of gate and up projection alternate, beginning with the gate."""
    tensors: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    """Names of the two tensors in the layer's module."""


@dataclass(frozen=True)
class ExpertsConfig:
    """Mixture of experts of a model. Names of modules and tensors are those in the checkpoint."""

    num_experts: int
    intermediate_size: int
    """Intermediate size of an expert."""
    routing: Routing
    dense_layers: frozenset[int] = frozenset()
    """Indices of the layers with a dense MLP instead of experts."""
    shared_size: int = 0
    """Intermediate size of the shared experts together; 0: no shared expert."""
    shared_name: str = "shared_experts"
    shared_bias: bool = False
    shared_projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Gate, up and down projection of the shared expert, if experts have gates."""
    shared_gate: str = ""
    """Name of the matrix of the shared expert's gate; "": no gate."""
    router_bias: str = ""
    """Name of the bias that is added to the scores to choose experts, but not to their weights; "": no bias."""
    router_bias_shape: tuple[int, ...] = ()
    """Shape of the tensor ``router_bias`` in the checkpoint; (): ``[num_experts]``."""
    router_float32: bool = False
    """Compute the router's logits in float32, whatever the dtype of the model."""
    module: str = "mlp"
    """Name of the layer's MLP module."""
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Gate, up and down projection of an expert; without a gate, the first is ""."""
    latent_size: int = 0
    """Size of the input and output of the experts, with projections from and to the hidden size (Nemotron 3); 0: same
    as the hidden size."""
    latent_bias: bool = False
    """The projections from and to ``latent_size`` have a bias."""
    bias: bool = False
    """Projections of experts have biases."""
    router: str = "gate"
    """Name of the router's matrix."""
    router_matrix_bias: bool = False
    """The router's matrix has a bias, which is added to the logits."""
    input_routing: Routing | None = None
    """Routing whose weights scale the input of the experts (see ``MixtureOfExperts``)."""
    vision_intermediate_size: int = 0
    """Intermediate size of the separate experts for image tokens (ERNIE 4.5 VL); 0: no separate experts."""
    fused: FusedLayout = field(default_factory=FusedLayout)
    """Layout of fused experts; ignored for checkpoints with a tensor per expert."""
    hash_layers: frozenset[int] = frozenset()
    """Layers that choose experts by token id (DeepSeek-V4): tensor ``gate.tid2eid`` of the module."""

    @property
    def by_modality(self) -> bool:
        """Whether image tokens have separate experts. A captured forward pass cannot choose between them."""
        return self.vision_intermediate_size > 0


def read_routing(raw: Mapping[str, Any], num_experts: int, **fields: Any) -> Routing:
    """The router's settings from a ``config.json`` with the usual field names.

    Args:
        fields: fields of ``Routing`` that override those of ``raw``.

    Raises ``ValueError`` if there are too few experts for ``top_k``, or groups would have unequal sizes.
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
        message = f"n_group is {routing.groups} and topk_group is {routing.top_groups}; n_group must divide the number"
        raise ValueError(f"{message} of experts, {num_experts}, and topk_group must be from 1 to n_group")
    most = num_experts // routing.groups * routing.top_groups
    if not 1 <= routing.top_k <= most:
        message = f"the number of experts per token is {routing.top_k}; it must be from 1 to {most}"
        raise ValueError(f"{message} (the model has {num_experts} experts)")
    return routing


def num_experts_of(raw: Mapping[str, Any]) -> int:
    """Number of experts: ``num_experts`` or ``num_local_experts``."""
    return int(raw["num_experts"] if raw.get("num_experts") is not None else raw["num_local_experts"])


def read_experts(
    raw: Mapping[str, Any], size: str, routing: Mapping[str, Any] | None = None, **fields: Any
) -> ExpertsConfig:
    """Settings of the experts from a ``config.json`` with the usual field names.

    Args:
        size: field of ``raw`` with the intermediate size of an expert.
        routing: fields of ``Routing`` that override those of ``raw``.
        fields: further fields of ``ExpertsConfig``.
    """
    num_experts = num_experts_of(raw)
    return ExpertsConfig(num_experts, int(raw[size]), read_routing(raw, num_experts, **(routing or {})), **fields)


def dense_layers_by_step(raw: Mapping[str, Any]) -> frozenset[int]:
    """``ExpertsConfig.dense_layers`` from ``mlp_only_layers`` and ``decoder_sparse_step``."""
    dense, step = raw.get("mlp_only_layers") or (), int(raw.get("decoder_sparse_step") or 1)
    layers = range(int(raw["num_hidden_layers"]))
    return frozenset(layer for layer in layers if layer in dense or (layer + 1) % step)


def read_deepseek_experts(raw: Mapping[str, Any], topk_method: str = "noaux_tc") -> ExpertsConfig | None:
    """The experts of DeepSeek-V3 (DeepSeek-AI, 2024, section 2.1.2), GLM-4.5, and, with ``topk_method`` ``greedy`` or
    ``group_limited_greedy``, DeepSeek-V2. None if all layers are dense.

    Args:
        topk_method: default of ``topk_method``.
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
            raise ValueError(f"topk_method is {other!r:.40}; it must be greedy, group_limited_greedy or noaux_tc")
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
    """Indices of the layers with experts in DeepSeek models: from ``first_k_dense_replace`` on, the multiples of
    ``moe_layer_freq``. If ``moe_layer_freq`` is a list, the layers with a nonzero entry.

    Raises ``ValueError`` if the length of the list is not ``layers``.
    """
    frequency = config.get("moe_layer_freq")
    if isinstance(frequency, list):
        if len(frequency) != layers:
            message = f"moe_layer_freq has {len(frequency)} entries; it must have one for each of {layers} layers"
            raise ValueError(message)
        return [layer for layer in range(layers) if frequency[layer]]
    first = int(config.get("first_k_dense_replace") or 0)
    return [layer for layer in range(first, layers) if layer % int(frequency or 1) == 0]


def read_common_experts(raw: Mapping[str, Any]) -> ExpertsConfig | None:
    """Sizes of the experts of a model without a ``Family``, from the usual field names. None for dense models."""
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
