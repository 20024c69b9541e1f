"""Language model of Llama 4 (Meta, 2025): chunked attention; layers without rotary embedding, whose queries are scaled
by position; experts whose input is scaled by the router's score."""

import re

from penstock.checkpoint.decoder_options import QKNormOptions, QueryScaling
from penstock.checkpoint.experts_config import ExpertsConfig, FusedLayout, Routing, num_experts_of
from penstock.checkpoint.model_config import ConfigJson, ModelConfig, dense_config, options_of
from penstock.core import Code, PenstockError

from ..registry import Family
from ..stored import Stored

WITH_VISION = "Llama4ForConditionalGeneration"
"""Architecture with a vision tower, which is not loaded: prompts are text only."""


def read_config(raw: ConfigJson) -> ModelConfig:
    layers, interval = int(raw["num_hidden_layers"]), int(raw.get("no_rope_layer_interval") or 4)
    given = raw.get("no_rope_layers")  # despite its name, true for layers with rotary embedding
    rope = tuple(map(bool, given)) if given else tuple((layer + 1) % interval != 0 for layer in range(layers))
    chunk = int(raw.get("attention_chunk_size") or 0)
    types = raw.get("layer_types")
    chunked = [kind == "chunked_attention" for kind in types] if types else rope
    if len(rope) != layers or len(chunked) != layers:
        lengths = f"{len(rope)} and {len(chunked)} entries"
        raise ValueError(
            f"no_rope_layers and layer_types have {lengths}; they must have one for each of {layers} layers"
        )
    return dense_config(
        raw,
        intermediate_size=int(raw["intermediate_size_mlp"]),
        sliding_windows=tuple(chunk if each else 0 for each in chunked),
        experts=_read_experts(raw, layers),
        qk_norm=bool(raw.get("use_qk_norm", True)),
        options=options_of(
            raw,
            rope_interleaved=True,
            rope_layers=rope,
            qk_norm=QKNormOptions(weight="none", after_rope=True),
            attention_chunks=True,
            query_scaling=_query_scaling(raw),
        ),
    )


def _query_scaling(raw: ConfigJson) -> QueryScaling | None:
    if not raw.get("attn_temperature_tuning", True):
        return None
    interval, factor = float(raw.get("floor_scale") or 8192), float(raw.get("attn_scale") or 0.1)
    return QueryScaling(factor, interval, offset=1, every_layer=False)


def _read_experts(raw: ConfigJson, layers: int) -> ExpertsConfig:
    if (top_k := int(raw.get("num_experts_per_tok") or 1)) != 1:
        message = f"num_experts_per_tok in config.json is {top_k}; only 1 is supported for Llama 4"
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    step, size, sparse = (
        int(raw.get("interleave_moe_layer_step") or 1),
        int(raw["intermediate_size"]),
        raw.get("moe_layers"),
    )
    sparse = range(step - 1, layers, step) if sparse is None else sparse
    return ExpertsConfig(
        num_experts_of(raw),
        size,
        Routing(1, renormalize=True),  # outputs have weight 1, because input_routing scales the inputs
        dense_layers=frozenset(range(layers)).difference(map(int, sparse)),
        shared_size=size,
        shared_name="shared_expert",
        module="feed_forward",
        router="router",
        input_routing=Routing(1, "sigmoid"),
        fused=FusedLayout(transposed=True),
    )


def find_stored(config: ModelConfig, name: str) -> Stored:
    """See ``Family.find_stored``."""
    return Stored(
        re.sub(r"^(model|lm_head)\b", r"language_model.\1", name) if config.architecture == WITH_VISION else name
    )


FAMILY = Family(
    architectures=("Llama4ForCausalLM", WITH_VISION),
    read_config=read_config,
    find_stored=find_stored,
)
