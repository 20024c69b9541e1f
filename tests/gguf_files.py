"""GGUF files of Hugging Face checkpoints, written by llama.cpp's own library as its converter does."""

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
from safetensors import safe_open

ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MistralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
}
HALVES = {
    **{"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,), "IQ4_XS": (0,)},
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)},
}
"""Where blocks have float16 scales."""
SIZE = {"Q8_0": 1e-3, "Q3_K": 1e-3, "Q4_K": 3e-4, "Q5_K": 2e-4, "Q6_K": 1e-4, "IQ4_NL": 1e-3, "IQ4_XS": 1e-4}
"""Of those scales, so that weights are near a tenth; a hundredth for the others."""
WRITTEN = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
"""Types that the library quantizes to. Of others, blocks are drawn."""


def random_blocks(kind: str, rows: int, inputs: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Rows of a matrix in valid blocks, ``[rows, bytes]``."""
    block, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (rows, inputs // block, size), dtype=np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = rng.integers(122, 126, blocks.shape[:2])
    for at in HALVES.get(kind, ()):
        scales = rng.normal(0, SIZE.get(kind, 1e-2), blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def write_gguf(
    checkpoint: Path,
    out: Path,
    type_of: Callable[[str], str] = lambda name: "Q8_0",
    tokenizer: Callable[[GGUFWriter], None] | None = None,
    parts: int = 0,
) -> dict[str, NDArray[np.float32]]:
    """Write a checkpoint with one safetensors file, and return its weights as they are in the GGUF file.

    Args:
        type_of: the type of each matrix, by its name in the GGUF file. Vectors are float32.
        tokenizer: adds another tokenizer than the checkpoint's.
        parts: tensors in each part; 0 writes one file.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = ARCHITECTURES[config["architectures"][0]]
    writer = GGUFWriter(out, gguf.MODEL_ARCH_NAMES[architecture], split_max_tensors=parts)
    add_config(writer, config)
    (tokenizer or (lambda writer: add_tokenizer(writer, checkpoint)))(writer)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    llama, stored, rng = architecture is gguf.MODEL_ARCH.LLAMA, {}, np.random.default_rng(0)
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118, which is no dictionary
            theirs, weights = names.get_name(name, (".weight", ".bias")), file.get_tensor(name).float().numpy()
            assert theirs
            heads = 0
            if llama and (".q_proj" in name or ".k_proj" in name):
                heads = config["num_attention_heads" if ".q_proj" in name else "num_key_value_heads"]
                weights = weights.reshape(heads, 2, -1, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)
            kind = type_of(theirs) if weights.ndim > 1 else "F32"
            number = GGMLQuantizationType[kind]
            if kind in WRITTEN:
                data = gguf.quants.quantize(weights, number)
            else:
                data = random_blocks(kind, *weights.shape, rng)
            writer.add_tensor(theirs, data, raw_dtype=number)
            weights = gguf.quants.dequantize(data, number).reshape(weights.shape)
            if heads:
                weights = weights.reshape(heads, -1, 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)
            stored[name] = weights
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def add_config(writer: GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, head_dim))
    elif rope["rope_type"] != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def llama3_factors(rope: dict[str, Any], head_dim: int) -> NDArray[np.float32]:
    """What llama.cpp divides the frequencies of Llama 3.1 by."""
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
    """Add the tokenizer of ``tokenizer.json``, byte-level BPE.

    Args:
        pre: the name of a pre-tokenizer; None adds ``tokenizer.json`` itself in its place.
    """
    whole = json.loads((checkpoint / "tokenizer.json").read_text())
    config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    vocabulary = whole["model"]["vocab"]
    size = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    size = max(size, *(token["id"] + 1 for token in whole["added_tokens"]))
    tokens, types = [f"[PAD{token_id}]" for token_id in range(size)], [gguf.TokenType.UNUSED] * size
    for token, token_id in vocabulary.items():
        tokens[token_id], types[token_id] = token, gguf.TokenType.NORMAL
    for added in whole["added_tokens"]:
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]], types[added["id"]] = added["content"], kind
    writer.add_tokenizer_model("gpt2")
    if pre:
        writer.add_tokenizer_pre(pre)
    else:
        writer.add_string("tokenizer.huggingface.json", json.dumps(whole))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in whole["model"]["merges"]])
    writer.add_eos_token_id(tokens.index(config["eos_token"]))
    writer.add_pad_token_id(tokens.index(config["pad_token"]))
    writer.add_add_bos_token(False)
    template = checkpoint / "chat_template.jinja"
    if template.exists():
        writer.add_chat_template(template.read_text())
