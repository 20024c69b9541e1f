"""GGUF files of dense models whose tensors differ from Llama's, written with llama.cpp's ``gguf`` package as by its
converter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH, GGUFWriter
from gguf_files import add_tokenizer
from numpy.typing import NDArray
from safetensors.torch import load_file

Weights = NDArray[np.float32]
Config = dict[str, Any]
Tensors = dict[str, Weights]


def write_dense_gguf(checkpoint: Path, out: Path) -> None:
    """Convert a checkpoint with one safetensors file to float32."""
    config = json.loads((checkpoint / "config.json").read_text())
    architecture, add, change = FAMILIES[config["architectures"][0]]
    layers = config.get("num_hidden_layers") or config.get("n_layer") or config["n_layers"]
    names = gguf.get_tensor_name_map(architecture, layers)
    writer = GGUFWriter(out, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_block_count(layers)
    add(writer, config)
    add_tokenizer(writer, checkpoint)
    tensors = {name: tensor.float().numpy() for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    for name, weights in change(config, tensors).items():
        stored = names.get_name(name, (".weight", ".bias")) or name
        writer.add_tensor(stored, np.ascontiguousarray(weights))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_bloom(writer: GGUFWriter, config: Config) -> None:
    writer.add_context_length(512)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(4 * config["hidden_size"])
    writer.add_head_count(config["n_head"])
    writer.add_head_count_kv(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def change_bloom(config: Config, tensors: Tensors) -> Tensors:
    """Queries of all heads, then keys, then values."""

    def ordered(weights: Weights) -> Weights:
        return weights.reshape(config["n_head"], 3, -1, *weights.shape[1:]).swapaxes(0, 1).reshape(weights.shape)

    return {
        name.removeprefix("transformer."): ordered(weights) if "query_key_value" in name else weights
        for name, weights in tensors.items()
    }


def add_mpt(writer: GGUFWriter, config: Config) -> None:
    writer.add_context_length(config["max_seq_len"])
    writer.add_embedding_length(config["d_model"])
    writer.add_feed_forward_length(4 * config["d_model"])
    writer.add_head_count(config["n_heads"])
    writer.add_layer_norm_eps(1e-5)
    writer.add_max_alibi_bias(8.0)


def add_falcon(writer: GGUFWriter, config: Config) -> None:
    writer.add_context_length(2048)
    writer.add_tensor_data_layout("jploski")
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(4 * config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_kv_heads"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def change_falcon(config: Config, tensors: Tensors) -> Tensors:
    """Queries of all groups, then keys, then values."""
    groups, heads = config["num_kv_heads"], config["num_attention_heads"]

    def ordered(weights: Weights) -> Weights:
        parts = weights.reshape(groups, heads // groups + 2, -1, weights.shape[1])
        split = parts[:, :-2], parts[:, -2:-1], parts[:, -1:]
        return np.concatenate([part.reshape(-1, weights.shape[1]) for part in split])

    return {
        name: ordered(weights) if name.endswith("query_key_value.weight") else weights
        for name, weights in tensors.items()
    }


def unchanged(config: Config, tensors: Tensors) -> Tensors:
    return tensors


def _add_gemma(writer: GGUFWriter, config: Config) -> None:
    rope = config["rope_parameters"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    if config["final_logit_softcapping"]:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])


def add_gemma3n(writer: GGUFWriter, config: Config) -> None:
    _add_gemma(writer, config)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_altup_active_idx(config["altup_active_idx"])
    writer.add_altup_num_inputs(config["altup_num_inputs"])
    pattern = config["activation_sparsity_pattern"]
    writer.add_activation_sparsity_scale([NormalDist().inv_cdf(each) if each else -np.inf for each in pattern])


def change_gemma3n(config: Config, tensors: Tensors) -> Tensors:
    """Projections of the streams in one tensor, and rows of zeros for tokens without an embedding for each layer."""
    numbered = {name: weights for name, weights in tensors.items() if ".altup_" in name and ".layers." not in name}
    changed = {name: weights for name, weights in tensors.items() if name not in numbered}
    for part in ("altup_projections", "altup_unembed_projections"):
        changed[f"model.{part}.weight"] = np.stack([numbered[f"model.{part}.{number}.weight"] for number in range(3)])
    table = changed["model.embed_tokens_per_layer.weight"]
    changed["model.embed_tokens_per_layer.weight"] = np.pad(table, ((0, config["vocab_size"] - len(table)), (0, 0)))
    return {f"{name}.weight" if name.endswith("_scale") else name: weights for name, weights in changed.items()}


def add_gemma4(writer: GGUFWriter, config: Config) -> None:
    _add_gemma(writer, config)
    size, layers, wide = config["intermediate_size"], len(config["layer_types"]), config["use_double_wide_mlp"]
    shared = layers - config["num_kv_shared_layers"]
    writer.add_feed_forward_length([size * (1 + (wide and layer >= shared)) for layer in range(layers)])
    full = config["per_layer_config"][str(len(config["layer_types"]) - 1)]
    kv_heads = config["num_key_value_heads"], full.get("num_key_value_heads", config["num_key_value_heads"])
    writer.add_head_count_kv([kv_heads[kind == "full_attention"] for kind in config["layer_types"]])
    writer.add_key_length(full["head_dim"])
    writer.add_value_length(full["head_dim"])
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_rope_dimension_count(full["head_dim"])
    writer.add_rope_dimension_count_swa(config["head_dim"])


def change_gemma4(config: Config, tensors: Tensors) -> Tensors:
    """Divisors of frequencies, infinite for dimensions that are not rotated."""
    full = config["per_layer_config"][str(len(config["layer_types"]) - 1)]["head_dim"] // 2
    rotated = int(full * config["rope_parameters"]["full_attention"]["partial_rotary_factor"])
    factors = np.array([1.0] * rotated + [1e30] * (full - rotated), np.float32)
    named = {f"{name}.weight" if name.endswith("layer_scalar") else name: weights for name, weights in tensors.items()}
    return {"rope_freqs.weight": factors, **named}


Family = tuple[MODEL_ARCH, Callable[[GGUFWriter, Config], None], Callable[[Config, Tensors], Tensors]]
FAMILIES: dict[str, Family] = {
    "BloomForCausalLM": (MODEL_ARCH.BLOOM, add_bloom, change_bloom),
    "MPTForCausalLM": (MODEL_ARCH.MPT, add_mpt, unchanged),
    "FalconForCausalLM": (MODEL_ARCH.FALCON, add_falcon, change_falcon),
    "Gemma3nForCausalLM": (MODEL_ARCH.GEMMA3N, add_gemma3n, change_gemma3n),
    "Gemma4ForCausalLM": (MODEL_ARCH.GEMMA4, add_gemma4, change_gemma4),
}
"""Architecture of the file, metadata, and changes of tensors."""
