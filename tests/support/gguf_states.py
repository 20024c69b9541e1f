"""GGUF files of models with recurrent state, written with llama.cpp's ``gguf`` package as by its converter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter
from gguf_files import add_tokenizer, write_experts
from numpy.typing import NDArray
from safetensors.torch import load_file

Weights = NDArray[np.float32]
Config = dict[str, Any]
FUSED_EXPERTS = {"input_linear": ("ffn_gate", "ffn_up"), "output_linear": ("ffn_down",)}
"""Granite's module → tensors of the file, without their suffix."""


def write_state_gguf(checkpoint: Path, out: Path, kind: str = "F32") -> None:
    """Convert a checkpoint with one safetensors file.

    Args:
        kind: type of matrices whose rows consist of whole blocks; other tensors are float32.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    architecture, change, add = FAMILIES[config["architectures"][0]]
    count = config.get("num_hidden_layers") or len(config["layers_block_type"])
    names = gguf.get_tensor_name_map(architecture, count)
    writer = GGUFWriter(out, gguf.MODEL_ARCH_NAMES[architecture])
    add_sizes(writer, config, count)
    add(writer, config)
    add_tokenizer(writer, checkpoint)
    block = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]

    def write(name: str, weights: Weights) -> Weights:
        stored = names.get_name(name, (".weight", ".bias")) or name
        is_matrix = weights.ndim > 1 and stored.endswith(".weight") and "conv" not in stored and "norm" not in stored
        quantized = is_matrix and "ffn_gate_inp" not in stored and weights.shape[-1] % block == 0
        number = GGMLQuantizationType[kind if quantized else "F32"]
        writer.add_tensor(stored, gguf.quants.quantize(np.ascontiguousarray(weights), number), raw_dtype=number)
        return weights

    tensors = {name: tensor.float().numpy() for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    write_experts(tensors, lambda name, weights: write(expert_name(name), weights))
    for name, weights in tensors.items():
        for changed, values in change(config, *common(name, weights)):
            write(changed, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def expert_name(name: str) -> str:
    """The name, known to the ``gguf`` package, of a tensor of all experts."""
    if ".feed_forward." in name:
        return name.removeprefix("model.")
    return name.replace("backbone.layers.", "model.layers.").replace(".mixer.", ".mlp.")


def common(name: str, weights: Weights) -> tuple[str, Weights]:
    """Changes that files of all families have."""
    if name.endswith(".A_log"):
        return name, -np.exp(weights)
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        return name, weights.squeeze(1)
    for old, new in (
        ("dt_bias", "dt_proj.bias"),
        (".expert_bias", ".expert_bias.bias"),
        ("e_score_correction_bias", "e_score_correction.bias"),
    ):
        name = name.removesuffix(old) + new if name.endswith(old) else name
    return name, weights


def permuted(weights: Weights, heads: int) -> Weights:
    """Rows of queries or keys, which alternate between both halves of a head."""
    return weights.reshape(heads, 2, -1, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


Changed = list[tuple[str, Weights]]


def change_mamba2(config: Config, name: str, weights: Weights) -> Changed:
    """Mamba 2 layers, and attention in the layout of Llama's files."""
    if name.endswith((".A_log", ".D")):
        return [(name, weights[:, None])]
    if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        return [(name, weights.reshape(config.get("mamba_n_groups") or config["n_groups"], -1))]
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        return [(name, permuted(weights, heads))]
    module, _, last = name.removesuffix(".weight").rpartition(".")
    if last in FUSED_EXPERTS:
        layer = name.split(".")[2]
        end = "exps" if "block_sparse_moe" in module else "shexp" if config["num_local_experts"] else ""
        suffixed = [f"blk.{layer}.{part}{'_' * bool(end)}{end}.weight" for part in FUSED_EXPERTS[last]]
        return [*zip(suffixed, np.split(weights, len(suffixed), axis=-2), strict=True)]
    return [(name, weights)]


def change_qwen3_5(config: Config, name: str, weights: Weights) -> Changed:
    """Norms with an offset of 1, and value heads by their index in the group of a key head, then by key head."""
    if name.endswith("norm.weight") and ".linear_attn." not in name:
        return [(name, weights + 1)]
    _, _, part = name.partition(".linear_attn.")
    keys, values, dim = (config[f"linear_{each}"] for each in ("num_key_heads", "num_value_heads", "value_head_dim"))

    def tiled(rows: Weights, size: int) -> Weights:
        return rows.reshape(keys, values // keys, size, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

    if part in ("A_log", "dt_proj.bias", "in_proj_a.weight", "in_proj_b.weight"):
        return [(name, tiled(weights, 1))]
    if part == "in_proj_z.weight":
        return [(name, tiled(weights, dim))]
    if part == "out_proj.weight":
        return [(name, tiled(weights.T, dim).T)]
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        head = 2 * keys * config["linear_key_head_dim"]
        return [(name, np.concatenate((weights[:head], tiled(weights[head:], dim))))]
    return [(name, weights)]


def unchanged(config: Config, name: str, weights: Weights) -> Changed:
    return [(name, weights)]


def add_sizes(writer: GGUFWriter, config: Config, count: int) -> None:
    heads = config["num_attention_heads"]
    kinds = config.get("layer_types") or config.get("layers_block_type")
    with_attention = [kind in ("attention", "full_attention") for kind in kinds]
    writer.add_block_count(count)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv([config["num_key_value_heads"] * each for each in with_attention])
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps") or config.get("norm_eps") or config["layer_norm_epsilon"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    for name in ("n_routed_experts", "num_local_experts", "num_experts"):
        if config.get(name):
            writer.add_expert_count(config[name])
            writer.add_expert_used_count(config["num_experts_per_tok"])
    if rope := config.get("rope_parameters"):
        writer.add_rope_freq_base(rope["rope_theta"])


def add_qwen3_5(writer: GGUFWriter, config: Config) -> None:
    values = config["linear_num_value_heads"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(values)
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * values)
    writer.add_rope_dimension_count(int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]))


def add_granite(writer: GGUFWriter, config: Config) -> None:
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    writer.add_rope_scaling_finetuned(False)


def add_nemotron_h(writer: GGUFWriter, config: Config) -> None:
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_state_size(config["ssm_state_size"])
    writer.add_ssm_group_count(config["n_groups"])
    writer.add_ssm_time_step_rank(config["mamba_num_heads"])
    writer.add_ssm_inner_size(config["mamba_num_heads"] * config["mamba_head_dim"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    if config.get("moe_latent_size"):
        writer.add_moe_latent_size(config["moe_latent_size"])


def add_lfm2(writer: GGUFWriter, config: Config) -> None:
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    writer.add_feed_forward_length(config["intermediate_size"])


Family = tuple[MODEL_ARCH, Callable[[Config, str, Weights], Changed], Callable[[GGUFWriter, Config], None]]
FAMILIES: dict[str, Family] = {
    "Qwen3_5MoeForCausalLM": (MODEL_ARCH.QWEN35MOE, change_qwen3_5, add_qwen3_5),
    "GraniteMoeHybridForCausalLM": (MODEL_ARCH.GRANITE_HYBRID, change_mamba2, add_granite),
    "NemotronHForCausalLM": (MODEL_ARCH.NEMOTRON_H_MOE, change_mamba2, add_nemotron_h),
    "Lfm2MoeForCausalLM": (MODEL_ARCH.LFM2MOE, unchanged, add_lfm2),
}
"""Architecture of the file, changes of tensors, and further metadata. ``test_gguf_families.py`` has the other families,
with the converter."""
