"""Convert Hugging Face checkpoints to GGUF with llama.cpp's ``gguf`` package, in the layout of its converter."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray
from safetensors.torch import load_file

Weights = NDArray[np.float32]
ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MistralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
    "Qwen3MoeForCausalLM": gguf.MODEL_ARCH.QWEN3MOE,
    "DeepseekV3ForCausalLM": gguf.MODEL_ARCH.DEEPSEEK2,
    "Gemma3ForCausalLM": gguf.MODEL_ARCH.GEMMA3,
}
SCALE_OFFSETS = {
    **{"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,), "IQ4_XS": (0,)},
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)},
}
"""Byte offsets of the float16 scales in a block, by GGUF type."""
SCALE_SIZES = {"Q8_0": 1e-3, "Q3_K": 1e-3, "Q4_K": 3e-4, "Q5_K": 2e-4, "Q6_K": 1e-4, "IQ4_NL": 1e-3, "IQ4_XS": 1e-4}
"""Standard deviation of the scales by type, for weights of about 0.1; 0.01 for types that are not listed."""
QUANTIZABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
"""Types to which the gguf package can quantize. Blocks of the other types are drawn at random."""


def random_blocks(kind: str, rows: int, inputs: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Random rows of a matrix in valid blocks, ``[rows, bytes]``."""
    block, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (rows, inputs // block, size), dtype=np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = rng.integers(122, 126, blocks.shape[:2])
    for offset in SCALE_OFFSETS.get(kind, ()):
        scales = rng.normal(0, SCALE_SIZES.get(kind, 1e-2), blocks.shape[:2]).astype(np.float16)
        blocks[..., offset : offset + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def write_gguf(
    checkpoint: Path,
    out: Path,
    type_of: Callable[[str], str] = lambda name: "Q8_0",
    tokenizer: Callable[[GGUFWriter], None] | None = None,
    parts: int = 0,
) -> dict[str, NDArray[np.float32]]:
    """Convert a checkpoint with one safetensors file, and return the dequantized weights of the GGUF file.

    Args:
        type_of: returns the type of a matrix for its name in the GGUF file. Vectors are float32.
        tokenizer: adds a tokenizer to the file; None: add the checkpoint's tokenizer.
        parts: number of tensors in each part of the file; 0: one file.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = ARCHITECTURES[config["architectures"][0]]
    writer = GGUFWriter(out, gguf.MODEL_ARCH_NAMES[architecture], split_max_tensors=parts)
    add_config(writer, config)
    (tokenizer or (lambda writer: add_tokenizer(writer, checkpoint)))(writer)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    rng = np.random.default_rng(0)

    def write(name: str, weights: Weights) -> Weights:
        """Write a tensor, and return its dequantized values."""
        gguf_name = names.get_name(
            name.replace("e_score_correction_bias", "e_score_correction.bias"), (".weight", ".bias")
        )
        assert gguf_name, name
        kind = type_of(gguf_name) if weights.ndim > 1 and "ffn_gate_inp" not in gguf_name else "F32"
        number = GGMLQuantizationType[kind]
        if kind in QUANTIZABLE:
            data = gguf.quants.quantize(weights, number)
        else:
            rows = random_blocks(kind, weights.size // weights.shape[-1], weights.shape[-1], rng)
            data = rows.reshape(*weights.shape[:-1], -1)
        writer.add_tensor(gguf_name, data, raw_dtype=number)
        return gguf.quants.dequantize(data, number).reshape(weights.shape)

    tensors = {name: tensor.float().numpy() for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    stored = write_experts(tensors, write)
    for name, weights in tensors.items():
        if architecture is gguf.MODEL_ARCH.LLAMA and (".q_proj" in name or ".k_proj" in name):
            heads = config["num_attention_heads" if ".q_proj" in name else "num_key_value_heads"]
            written = write(
                name, weights.reshape(heads, 2, -1, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)
            )
            stored[name] = written.reshape(heads, -1, 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)
        elif architecture is gguf.MODEL_ARCH.GEMMA3 and name.endswith("norm.weight"):
            stored[name] = write(name, weights + 1) - 1
        elif ".kv_b_proj" in name:
            by_head = weights.reshape(config["num_attention_heads"], -1, weights.shape[-1])
            keys, values = np.split(by_head, [config["qk_nope_head_dim"]], axis=1)
            keys = write(name.replace("kv_b", "k_b"), np.ascontiguousarray(keys.swapaxes(1, 2))).swapaxes(1, 2)
            values = write(name.replace("kv_b", "v_b"), np.ascontiguousarray(values))
            stored[name] = np.concatenate((keys, values), axis=1).reshape(weights.shape)
        else:
            stored[name] = write(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def write_experts(tensors: dict[str, Weights], write: Callable[[str, Weights], Weights]) -> dict[str, Weights]:
    """Remove the experts' matrices from a checkpoint's tensors, and write all experts of a layer as one tensor."""
    layers: dict[str, dict[int, Weights]] = {}
    for name in [name for name in tensors if ".experts." in name]:
        before, _, after = name.partition(".experts.")
        number, _, projection = after.partition(".")
        layers.setdefault(f"{before}.experts.{projection}", {})[int(number)] = tensors.pop(name)
    stored = {}
    for name, experts in layers.items():
        written = write(name, np.stack([experts[number] for number in range(len(experts))]))
        stored |= {name.replace(".experts.", f".experts.{i}."): matrix for i, matrix in enumerate(written)}
    return stored


def add_config(writer: GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    rank = config.get("kv_lora_rank", 0)  # latent attention has one key-value head in llama.cpp
    rotary = config["qk_rope_head_dim"] if rank else head_dim
    writer.add_head_count_kv(1 if rank else config["num_key_value_heads"])
    writer.add_key_length(rank + rotary)
    writer.add_value_length(rank or head_dim)
    writer.add_rope_dimension_count(rotary)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if experts := config.get("n_routed_experts") or config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "kv_lora_rank" in config:
        add_latent(writer, config)
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, head_dim))
    elif rope["rope_type"] != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def add_latent(writer: GGUFWriter, config: dict[str, Any]) -> None:
    """Add the sizes of latent attention and of DeepSeek's experts."""
    rotary, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotary)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def llama3_factors(rope: dict[str, Any], head_dim: int) -> NDArray[np.float32]:
    """Divisors of the RoPE frequencies of Llama 3.1 in llama.cpp, ``[head_dim / 2]``."""
    low, high, trained = (
        rope[name] for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    factors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * pair / head_dim)
        if wavelength < trained / high:
            factors.append(1.0)
        elif wavelength > trained / low:
            factors.append(rope["factor"])
        else:
            smooth = (trained / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def add_tokenizer(writer: GGUFWriter, checkpoint: Path, pre: str | None = None) -> None:
    """Add a byte-level BPE tokenizer (``tokenizer.json``).

    Args:
        pre: name of the pre-tokenizer (``tokenizer.ggml.pre``); None: embed ``tokenizer.json`` instead.
    """
    source = json.loads((checkpoint / "tokenizer.json").read_text())
    config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    vocabulary = source["model"]["vocab"]
    size = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    size = max(size, *(token["id"] + 1 for token in source["added_tokens"]))
    tokens, types = [f"[PAD{token_id}]" for token_id in range(size)], [gguf.TokenType.UNUSED] * size
    for token, token_id in vocabulary.items():
        tokens[token_id], types[token_id] = token, gguf.TokenType.NORMAL
    for added in source["added_tokens"]:
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]], types[added["id"]] = added["content"], kind
    writer.add_tokenizer_model("gpt2")
    if pre:
        writer.add_tokenizer_pre(pre)
    else:
        writer.add_string("tokenizer.huggingface.json", json.dumps(source))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in source["model"]["merges"]])
    writer.add_eos_token_id(tokens.index(config["eos_token"]))
    writer.add_pad_token_id(tokens.index(config["pad_token"]))
    writer.add_add_bos_token(False)
    template = checkpoint / "chat_template.jinja"
    if template.exists():
        writer.add_chat_template(template.read_text())
