"""ERNIE 4.5 (Baidu, 2025), mixture of experts: softmax scores, a bias for the choice of experts, shared experts."""

from dataclasses import replace

from penstock.checkpoint.experts_config import ExpertsConfig, read_routing
from penstock.checkpoint.model_config import ConfigJson, ModelConfig
from penstock.core import Code, PenstockError

from ..registry import Family
from . import ernie4_5


def read_config(raw: ConfigJson) -> ModelConfig:
    if raw.get("use_bias"):
        raise PenstockError(Code.UNSUPPORTED, "use_bias (a bias of the language model head) is not supported", "model")
    num_experts, size = int(raw["moe_num_experts"]), int(raw["moe_intermediate_size"])
    min_sum = float(raw.get("moe_norm_min") or 1e-12)
    config = ernie4_5.read_config(raw)
    experts = ExpertsConfig(
        num_experts,
        size,
        read_routing(raw, num_experts, top_k=int(raw["moe_k"]), renormalize=True, min_sum=min_sum),
        dense_layers=_dense_layers(raw),
        shared_size=size * int(raw.get("moe_num_shared_experts") or 0),
        router_bias="moe_statics.e_score_correction_bias",
        router_bias_shape=(1, num_experts),
        router_float32=True,
    )
    return replace(config, experts=experts)


def _dense_layers(raw: ConfigJson) -> frozenset[int]:
    layers, interval = range(int(raw["num_hidden_layers"])), int(raw.get("moe_layer_interval") or 1)
    start, end = int(raw.get("moe_layer_start_index") or 0), int(raw.get("moe_layer_end_index", -1))
    end = end if end >= 0 else len(layers) - 1
    mtp = range(len(layers), len(layers) + int(raw.get("num_nextn_predict_layers") or 0))
    return frozenset(mtp).union(layer for layer in layers if not start <= layer <= end or (layer + 1) % interval)


FAMILY = Family(("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoEForCausalLM"), read_config, find_stored=ernie4_5.find_mtp)
