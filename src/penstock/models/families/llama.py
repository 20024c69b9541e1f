"""Llama (Touvron et al., 2023): pre-norm with RMS norms, rotary embedding, grouped-query attention, SwiGLU."""

from penstock.checkpoint.model_config import dense_config

from ..registry import Family

FAMILY = Family(("LlamaForCausalLM",), dense_config)
