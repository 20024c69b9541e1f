"""Seed-OSS (ByteDance, 2025): Llama with biases of queries, keys and values."""

from penstock.checkpoint.model_config import ConfigJson, ModelConfig, dense_config

from ..registry import Family


def read_config(raw: ConfigJson) -> ModelConfig:
    qkv_bias, output_bias = bool(raw.get("attention_bias", True)), bool(raw.get("attention_out_bias", False))
    return dense_config(raw, qkv_bias=qkv_bias, output_bias=output_bias)


FAMILY = Family(("SeedOssForCausalLM",), read_config)
