"""Llama (Touvron et al., 2023): RMS norms before attention and MLP, rotary positions, grouped queries, SwiGLU."""

from penstock.checkpoint.model_config import dense_config

from ..decoder import build_decoder
from ..registry import Family

FAMILY = Family(architectures=("LlamaForCausalLM",), read_config=dense_config, build=build_decoder)
