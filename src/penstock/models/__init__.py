"""Models: families by architecture."""

from __future__ import annotations

from penstock.checkpoint.model_config import ModelConfig

from . import bert, ernie4_5_vl, gte, llama4, modernbert, qwen2_vl, qwen3_vl, whisper
from .families import (
    cohere,
    deepseek,
    dots1,
    ernie4_5,
    ernie4_5_moe,
    exaone4,
    gemma,
    glm,
    glm4_moe,
    gpt_oss,
    granite,
    hunyuan,
    internlm,
    llama,
    minimax_m2,
    ministral3,
    mistral,
    mixtral,
    olmo2,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    seed_oss,
    smollm3,
    starcoder2,
)
from .read_config import read_config
from .registry import Family, register
from .vision import gemma3 as gemma3_vision
from .vision import internvl, llava, pixtral

__all__ = ["Family", "ModelConfig", "read_config", "register"]

for family in (
    bert.FAMILY,
    *cohere.FAMILIES,
    deepseek.FAMILY,
    dots1.FAMILY,
    ernie4_5.FAMILY,
    ernie4_5_moe.FAMILY,
    ernie4_5_vl.FAMILY,
    exaone4.FAMILY,
    *gemma.FAMILIES,
    gemma3_vision.FAMILY,
    *glm.FAMILIES,
    glm4_moe.FAMILY,
    gpt_oss.FAMILY,
    *granite.FAMILIES,
    gte.FAMILY,
    *hunyuan.FAMILIES,
    *internlm.FAMILIES,
    internvl.FAMILY,
    llama.FAMILY,
    llama4.FAMILY,
    *llava.FAMILIES,
    minimax_m2.FAMILY,
    ministral3.FAMILY,
    mistral.FAMILY,
    mixtral.FAMILY,
    modernbert.FAMILY,
    *olmo2.FAMILIES,
    olmoe.FAMILY,
    phi3.FAMILY,
    pixtral.FAMILY,
    qwen2.FAMILY,
    qwen2_moe.FAMILY,
    *qwen2_vl.FAMILIES,
    qwen3.FAMILY,
    qwen3_moe.FAMILY,
    *qwen3_vl.FAMILIES,
    seed_oss.FAMILY,
    smollm3.FAMILY,
    starcoder2.FAMILY,
    whisper.FAMILY,
):
    register(family)
