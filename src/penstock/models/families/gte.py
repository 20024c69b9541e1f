"""GTE (Zhang et al., 2024): BERT with rotary embedding and gated MLPs."""

from dataclasses import replace

from penstock.checkpoint.encoders import SUFFIXES
from penstock.checkpoint.model_config import ConfigJson, ModelConfig

from ..registry import Family, imported
from ..stored import Stored, find_fused, part_of
from .bert import read_bert_config


def read_config(raw: ConfigJson) -> ModelConfig:
    config = read_bert_config(raw)
    return replace(config, options=replace(config.options, gated_mlp=True))


def find_stored(config: ModelConfig, name: str) -> Stored:
    """See ``Family.find_stored``. The tensors ``qkv_proj`` and ``up_gate_proj`` are fused; the gate is second."""
    parent, _, last = name.rpartition(".")
    if last in ("gate_proj", "up_proj"):
        return part_of(f"{parent}.up_gate_proj", [config.intermediate_size] * 2, last == "gate_proj")
    return find_fused(config, name)


FAMILY = Family(
    architectures=tuple(f"Gte{end}" for end in SUFFIXES),
    read_config=read_config,
    build=imported("penstock.models.gte:build"),
    build_classifier=imported("penstock.models.bert:build_classifier"),
    find_stored=find_stored,
)
