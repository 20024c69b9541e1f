"""ERNIE 4.5 VL (Baidu, 2025): ERNIE 4.5 with experts of its own for the tokens of images, and M-RoPE in which height
and width take turns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.experts_config import ExpertsConfig, read_routing
from penstock.checkpoint.model_config import ModelConfig
from penstock.core import Code, PenstockError
from penstock.core.quantization import Format
from penstock.layers import BuildContext, MLPLayer, Weights
from penstock.layers.mrope import MRoPE
from penstock.ops import Batch, LayerExport, QuantizedWeight

from .decoder import Decoder
from .experts import mixture_of_experts
from .families import ernie4_5
from .layer import MLPFactory, gated_mlp
from .registry import Family
from .vision.ernie4_5_vl import ErnieVisionTower, read_vision_config

KINDS = ("text_moe", "vision_moe")
"""Names of a layer's two sets of experts, in the order in which checkpoints number them."""
MODULE = re.compile(rf"(.+\.mlp)\.({'|'.join(KINDS)})\.(.+)")
VISION_TOKENS = {
    "image_token_id": 100295,
    "image_start_token_id": 101304,
    "image_end_token_id": 101305,
    "video_token_id": 103367,
    "video_start_token_id": 101306,
    "video_end_token_id": 101307,
}
"""Tokens that the experts for images take, by their names in ``config.json``."""


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    if raw.get("use_bias"):
        raise PenstockError(Code.UNSUPPORTED, "use_bias, which gives the language model head a bias", "model")
    config = ernie4_5.read_config(raw)
    sections = [int(size) for size in config.rope_parameters.get("mrope_section") or (22, 22, 20)]
    if len(sections) != 3 or sections[0] != sections[1] or 2 * sum(sections) != config.head_dim:
        raise ValueError(f"mrope_section is {sections}, and heads have {config.head_dim} elements")
    layers, num_experts = int(raw["num_hidden_layers"]), int(raw.get("moe_num_experts") or 64)
    kinds = raw.get("mlp_layer_types") or ["dense"] + ["sparse"] * (layers - 1)
    if len(kinds) != layers:
        raise ValueError(f"mlp_layer_types has {len(kinds)} of {layers} layers")
    size, _ = _sizes(raw)
    shared = raw.get("moe_num_shared_experts")
    top_k, min_sum = int(raw.get("moe_k") or 6), float(raw.get("moe_norm_min") or 1e-12)
    experts = ExpertsConfig(
        num_experts,
        size,
        read_routing(raw, num_experts, top_k=top_k, renormalize=True, min_sum=min_sum),
        dense_layers=frozenset(layer for layer in range(layers) if kinds[layer] == "dense"),
        shared_size=size * int(2 if shared is None else shared),
        router_bias="moe_statics.e_score_correction_bias",
        router_float32=True,
        by_modality=True,
    )
    read_vision_config(raw)
    rope = {**config.rope_parameters, "rope_type": "default", "mrope_section": sections}
    return replace(config, rope_parameters=rope, experts=experts, has_vision=True)


def _sizes(raw: Mapping[str, Any]) -> tuple[int, int]:
    """Intermediate sizes of experts for text, and for images."""
    text, vision = raw.get("moe_intermediate_size") or (1536, 512)
    return int(text), int(vision)


def build(context: BuildContext, config: ModelConfig, num_mtp_heads: int) -> Decoder:
    assert config.experts
    vision_sizes = replace(config.experts, intermediate_size=_sizes(config.raw)[1], shared_size=0)
    of_experts = replace(context, weights=_ExpertWeights(context.weights, config.experts.num_experts))
    kinds = TokenKinds()

    def mlp(context: BuildContext, config: ModelConfig, layer: int, name: str) -> MLPLayer:
        assert config.experts
        if layer in config.experts.dense_layers:
            return gated_mlp(context, config, layer, name)
        sets = []
        for kind, experts in zip(KINDS, (config.experts, vision_sizes), strict=True):
            own = replace(config, experts=replace(experts, module=f"mlp.{kind}", shared_size=0))
            sets.append(mixture_of_experts(of_experts, own, layer, name))
        shared = None
        if size := config.experts.shared_size:
            shared = gated_mlp(context, replace(config, intermediate_size=size), layer, f"{name}.shared_experts")
        return ModalityExperts(context, sets[0], sets[1], shared, kinds, layer == config.num_layers - 1)

    tokens = torch.tensor([int(config.raw.get(name, token)) for name, token in VISION_TOKENS.items()])
    decoder = ErnieDecoder(context, config, num_mtp_heads, mlp, kinds, tokens.to(context.device))
    table = context.rope_table(config.head_dim, config.rope_parameters, config.max_position_embeddings)
    mrope = MRoPE(table, context.max_len, config.rope_parameters["mrope_section"], alternating=True)
    vision = read_vision_config(config.raw)
    decoder.vision = ErnieVisionTower(context, vision, mrope, decoder.embed, config.rms_norm_eps)
    return decoder


@dataclass
class TokenKinds:
    """Which tokens of a step are of images, ``[tokens]`` bool."""

    all: Tensor | None = None
    outputs: Tensor | None = None
    """Of those that the last layer goes on with."""


class ErnieDecoder(Decoder):
    """A ``Decoder`` that tells its layers which tokens of a step are of images.

    Args:
        kinds: of the step, for the layers.
        tokens: that are of images, ``[tokens]`` int64.
    """

    def __init__(
        self,
        context: BuildContext,
        config: ModelConfig,
        num_mtp_heads: int,
        mlp: MLPFactory,
        kinds: TokenKinds,
        tokens: Tensor,
    ) -> None:
        super().__init__(context, config, num_mtp_heads, mlp=mlp)
        self._kinds = kinds
        self._tokens = tokens

    def forward(self, batch: Batch, cache: list[Any], export: Sequence[LayerExport] = ()) -> Tensor:
        self._kinds.all = torch.isin(batch.token_ids, self._tokens)
        self._kinds.outputs = self._kinds.all[batch.logits_indices]
        return super().forward(batch, cache, export)


@dataclass(frozen=True)
class ModalityExperts:
    """An ``MLPLayer`` that has experts for text and others for images, and one that every token has."""

    context: BuildContext
    text: MLPLayer
    vision: MLPLayer
    shared: MLPLayer | None
    kinds: TokenKinds
    is_last: bool
    """Whether it is in the last layer."""

    def __call__(self, x: Tensor, lora_slots: Tensor | None) -> Tensor:
        """As ``MLPLayer.__call__``."""
        chosen = self.kinds.outputs if self.is_last else self.kinds.all
        assert chosen is not None
        if not chosen.any():
            made = self.text(x, lora_slots)
        else:
            made = torch.empty_like(x)
            for experts, tokens in ((self.text, ~chosen), (self.vision, chosen)):
                rows = tokens.nonzero().flatten()
                if len(rows):
                    made[rows] = experts(x[rows], None if lora_slots is None else lora_slots[rows])
        if self.shared is None:
            return made
        return self.context.ops.add_residual(self.shared(x, lora_slots), self.context.ops.clone(made))


class _ExpertWeights:
    """``layers.Weights`` that has text's and images' experts, and their routers, under names of their own: checkpoints
    number all experts of a layer together, and have routers transposed."""

    def __init__(self, base: Weights, num_experts: int) -> None:
        self._base = base
        self._num_experts = num_experts

    @property
    def version(self) -> str:
        return self._base.version

    def read(self, name: str, *shape: int, rows: tuple[int, int] | None = None, as_stored: bool = False) -> Tensor:
        """As ``layers.Weights.read``."""
        match = MODULE.fullmatch(name)
        first, end = rows or (0, shape[0])
        if match and match[3] == "gate.weight":
            stored = f"{match[1]}.gate.weight{'_1' if match[2] == KINDS[1] else ''}"
            return self._base.read(stored, *reversed(shape), as_stored=as_stored).T[first:end]
        if match and match[3].startswith("moe_statics."):
            both = self._base.read(f"{match[1]}.{match[3]}", 2, *shape, as_stored=as_stored)
            return both[KINDS.index(match[2]), first:end]
        return self._base.read(self._stored(name), *shape, rows=rows, as_stored=as_stored)

    def has(self, name: str) -> bool:
        return self._base.has(self._stored(name))

    def format_of(self, name: str) -> Format:
        """As ``layers.Weights.format_of``."""
        return self._base.format_of(self._stored(name))

    def read_quantized(self, name: str, outputs: int, inputs: int, rows: tuple[int, int]) -> QuantizedWeight | Tensor:
        """As ``layers.Weights.read_quantized``."""
        return self._base.read_quantized(self._stored(name), outputs, inputs, rows)

    def _stored(self, name: str) -> str:
        """Where an expert's matrix lies."""
        if not (match := MODULE.fullmatch(name)) or not match[3].startswith("experts."):
            return name
        _, number, rest = match[3].split(".", 2)
        return f"{match[1]}.experts.{int(number) + KINDS.index(match[2]) * self._num_experts}.{rest}"


FAMILY = Family(
    ("Ernie4_5_VLMoeForConditionalGeneration",), read_config=read_config, build=build, find_stored=ernie4_5.find_mtp
)
