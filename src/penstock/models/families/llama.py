"""Llama (Touvron et al., 2023): RMS norms before attention and MLP, rotary positions, grouped queries, SwiGLU."""

from penstock.checkpoint.model_config import dense_config

from ..registry import Family

FAMILY = Family(("LlamaForCausalLM",), dense_config)
