"""Small quantized checkpoints. NumPy computes their dequantized weights according to the definition of each format."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoints import save
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from penstock.quant import awq, bitsandbytes, compressed_tensors, fp8, gptq

Array = np.ndarray[Any, Any]
SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
NF4 = [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0]
NF4 += [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]
FP4 = [0.0, 0.00520833, 0.6666667, 1.0, 0.33333334, 0.5, 0.16666667, 0.25]
FP4 += [-value for value in FP4]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@dataclass(frozen=True)
class Kind:
    """A variant of a quantization format."""

    config: dict[str, Any]
    """``quantization_config`` of the checkpoint."""
    tensors: Callable[[torch.Generator, int, int], dict[str, Tensor]]
    """Draws the stored tensors of a matrix ``[out, in]``, by the suffix of their names (after the matrix's name)."""
    weights: Callable[[Mapping[str, Array], int, int], Array]
    """Dequantizes the stored tensors of a matrix to ``[out, in]`` float32."""
    activations: tuple[str, int] = ("", 0)
    """Type ("int8" or "fp8") and group size (0: whole row) of quantized activations, if the backend multiplies the
    stored integers."""
    skip: tuple[str, ...] = field(default=("lm_head",))
    """Matrices that are not quantized."""


def unpack(words: Array, bits: int, count: int) -> Array:
    """Unpack unsigned integers, packed densely in the words of each row, ``[rows, words]`` int32, lowest bits first."""
    rows = np.ascontiguousarray(words.astype("<i4")).view(np.uint8)
    each = np.unpackbits(rows, axis=1, bitorder="little")[:, : count * bits].reshape(len(rows), count, bits)
    return each.astype(np.int64) @ (1 << np.arange(bits))


def integers(generator: torch.Generator, bits: int, *shape: int) -> Tensor:
    return torch.randint(0, 2**bits, shape, generator=generator, dtype=torch.uint8)


def scales(generator: torch.Generator, *shape: int, bits: int = 4, dtype: torch.dtype = torch.float16) -> Tensor:
    """Random scales that make weights of about 0.2 from integers of ``bits`` bits."""
    return ((0.5 + torch.rand(shape, generator=generator)) / 2**bits).to(dtype)


def by_group(values: Array, zeros: Array | int, factors: Array, groups: Array) -> Array:
    """Dequantize ``values`` ``[out, in]`` with zero points and scales ``[out, groups]``; ``groups`` ``[in]`` is the
    group of each input."""
    zero_points = zeros if isinstance(zeros, int) else zeros[:, groups]
    return ((values - zero_points) * factors.astype(np.float64)[:, groups]).astype(np.float32)


def awq_kind(size: int, **config: Any) -> Kind:
    def tensors(generator: torch.Generator, outputs: int, inputs: int) -> dict[str, Tensor]:
        groups = 1 if size == -1 else inputs // size
        return {
            "qweight": awq.pack(integers(generator, 4, inputs, outputs)),
            "qzeros": awq.pack(integers(generator, 4, groups, outputs)),
            "scales": scales(generator, groups, outputs),
        }

    def weights(stored: Mapping[str, Array], outputs: int, inputs: int) -> Array:
        result = np.empty((outputs, inputs), np.float32)
        for output in range(outputs):
            word, place = output // 8, (0, 2, 4, 6, 1, 3, 5, 7).index(output % 8)
            integer, zero = ((stored[part][:, word] >> (4 * place)) & 15 for part in ("qweight", "qzeros"))
            for i in range(inputs):
                group = 0 if size == -1 else i // size
                result[output, i] = (integer[i] - zero[group]) * np.float32(stored["scales"][group, output])
        return result

    return Kind({"quant_method": "awq", "group_size": size} | config, tensors, weights)


def gptq_kind(bits: int, size: int, order: str = "", **config: Any) -> Kind:
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": True, **config}
    version = 2 if config.get("checkpoint_format") == "gptq_v2" else 1

    def tensors(generator: torch.Generator, outputs: int, inputs: int) -> dict[str, Tensor]:
        group = inputs if size == -1 else size
        groups = inputs // group
        zeros = integers(generator, bits, groups, outputs)
        if config["sym"]:
            zeros.fill_(1 << (bits - 1))
        g_idx = torch.arange(inputs, dtype=torch.int32) // group
        if order == "shuffled":
            g_idx = g_idx[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
        return {
            "qweight": gptq.pack(integers(generator, bits, outputs, inputs), bits),
            "qzeros": gptq.pack_zeros(zeros, bits, version),
            "scales": scales(generator, groups, outputs, bits=bits),
        } | ({} if order == "none" else {"g_idx": g_idx})

    def weights(stored: Mapping[str, Array], outputs: int, inputs: int) -> Array:
        values = unpack(stored["qweight"].T, bits, inputs)
        words = stored["qzeros"].astype(np.int64)
        if version == 1 and bits != 3:
            # GPTQ v1 stores zero points minus 1; add 1 to each field of the packed word, with carries between fields
            words += sum(1 << shift for shift in range(0, 32, bits))
        zeros = unpack((words & 0xFFFFFFFF).astype(np.uint32).view(np.int32), bits, outputs)
        if version == 1 and bits == 3:
            zeros = (zeros + 1) % 8
        groups = stored.get("g_idx", np.arange(inputs) // (inputs if size == -1 else size))
        return by_group(values, zeros.T, stored["scales"].T, groups)

    return Kind(config, tensors, weights)


def ct_config(format: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"} | weights
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def packed_kind(bits: int, size: int, symmetric: bool = True, order: bool = False) -> Kind:
    arguments = {"num_bits": bits, "symmetric": symmetric}
    arguments |= {"strategy": "group", "group_size": size} if size else {"group_size": None}

    def tensors(generator: torch.Generator, outputs: int, inputs: int) -> dict[str, Tensor]:
        groups = inputs // size if size else 1
        signed = [
            (integers(generator, bits, outputs, count).short() - (1 << (bits - 1))).to(torch.int8)
            for count in (inputs, groups)
        ]
        result = {
            "weight_packed": compressed_tensors.pack(signed[0], bits),
            "weight_scale": scales(generator, outputs, groups, bits=bits, dtype=torch.bfloat16),
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        if not symmetric:
            result["weight_zero_point"] = compressed_tensors.pack_zeros(signed[1], bits)
        if order:
            g_idx = torch.arange(inputs, dtype=torch.int32) // size
            result["weight_g_idx"] = g_idx[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
        return result

    def weights(stored: Mapping[str, Array], outputs: int, inputs: int) -> Array:
        half = 1 << (bits - 1)
        values, zeros = unpack(stored["weight_packed"], bits, inputs) - half, np.int64(0)
        if not symmetric:
            zeros = unpack(stored["weight_zero_point"].T, bits, outputs).T - half
        groups = stored.get("weight_g_idx", np.arange(inputs) // (size or inputs))
        return by_group(values, 0 if symmetric else zeros, stored["weight_scale"], groups)

    return Kind(ct_config("pack-quantized", arguments), tensors, weights)


def int8_kind(symmetric: bool = True, one: bool = False, **inputs: Any) -> Kind:
    def tensors(generator: torch.Generator, outputs: int, inputs: int) -> dict[str, Tensor]:
        rows = 1 if one else outputs
        result = {
            "weight": (integers(generator, 8, outputs, inputs).short() - 128).to(torch.int8),
            "weight_scale": scales(generator, *((1,) if one else (rows, 1)), bits=8, dtype=torch.float32),
        }
        if not symmetric:
            result["weight_zero_point"] = (integers(generator, 5, outputs, 1).short() - 16).to(torch.int8)
        return result

    def weights(stored: Mapping[str, Array], outputs: int, inputs: int) -> Array:
        factors = stored["weight_scale"].reshape(-1, 1)
        if symmetric:
            return stored["weight"].astype(np.float32) * factors
        return stored["weight"].astype(np.float32) * factors - stored["weight_zero_point"].astype(np.float32) * factors

    strategy = "tensor" if one else "channel"
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True} | inputs
    config = ct_config("int-quantized", {"strategy": strategy, "symmetric": symmetric}, activations)
    return Kind(config, tensors, weights, ("int8", 0))


def fp8_tensors(name: str, rows: int, columns: int, shape: Callable[[Tensor], Tensor] = lambda x: x) -> Any:
    def tensors(generator: torch.Generator, outputs: int, inputs: int) -> dict[str, Tensor]:
        values, factors = fp8.pack(0.2 * torch.randn(outputs, inputs, generator=generator), rows, columns)
        return {"weight": values, name: shape(factors)}

    def weights(stored: Mapping[str, Array], outputs: int, inputs: int) -> Array:
        values, factors = stored["weight"], stored[name].reshape(-1, -(-inputs // (columns or inputs)))
        result = np.empty((outputs, inputs), np.float32)
        for output in range(outputs):
            for i in range(inputs):
                row, column = output // (rows or outputs), i // (columns or inputs)
                result[output, i] = values[output, i] * factors[row, column]
        return result

    return tensors, weights


def fp8_kind(
    rows: int, columns: int, shape: Callable[[Tensor], Tensor] = lambda x: x, name: str = "", **config: Any
) -> Kind:
    name = name or ("weight_scale_inv" if columns else "weight_scale")
    config = {"quant_method": "fp8"} | ({"weight_block_size": [rows, columns]} if columns else {}) | config
    return Kind(config, *fp8_tensors(name, rows, columns, shape), ("fp8", columns))


def nvfp4_kind(modelopt: bool) -> Kind:
    """NVFP4 of Model Optimizer, whose scale of the matrix is a factor, or of compressed-tensors, whose is a divisor."""
    table = torch.tensor(E2M1 + [-number for number in E2M1])
    names = ("weight", "weight_scale_2") if modelopt else ("weight_packed", "weight_global_scale")

    def tensors(generator: torch.Generator, outputs: int, inputs: int) -> dict[str, Tensor]:
        codes = integers(generator, 4, outputs, inputs).view(torch.uint8)
        factors = (1 + 3 * torch.rand(outputs, inputs // 16, generator=generator)).to(torch.float8_e4m3fn)
        scale = torch.tensor(0.025) if modelopt else torch.tensor([40.0])
        return {names[0]: codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": factors, names[1]: scale}

    def weights(stored: Mapping[str, Array], outputs: int, inputs: int) -> Array:
        packed, scale = torch.from_numpy(stored[names[0]]).int(), stored[names[1]].reshape(())
        numbers = table[torch.stack((packed & 15, packed >> 4), -1).flatten(1)].numpy()
        factors = stored["weight_scale"] * scale if modelopt else stored["weight_scale"] / scale
        return numbers * np.repeat(factors, 16, 1)

    config: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    if not modelopt:
        numbers = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
        config = ct_config("nvfp4-pack-quantized", numbers, {**numbers, "symmetric": True, "dynamic": "local"})
    return Kind(config, tensors, weights)


def bnb_kind(kind: str, block: int = 64, nested: bool = False, storage: torch.dtype = torch.uint8) -> Kind:
    table = torch.tensor(NF4 if kind == "nf4" else FP4)

    def tensors(generator: torch.Generator, outputs: int, inputs: int) -> dict[str, Tensor]:
        count = outputs * inputs
        places = integers(generator, 4, count)
        state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [outputs, inputs]}
        blocks = -(-count // block)
        result = {"weight": (places[::2] << 4 | places[1::2]).view(storage)[:, None], "weight.quant_map": table.clone()}
        if nested:
            result["weight.absmax"] = integers(generator, 8, blocks)
            result["weight.nested_absmax"] = scales(generator, -(-blocks // 256), bits=2, dtype=torch.float32)
            result["weight.nested_quant_map"] = torch.linspace(-1, 1, 256)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.3}
        else:
            result["weight.absmax"] = scales(generator, blocks, bits=1, dtype=torch.float32)
        text = list(json.dumps(state).encode())
        return result | {f"weight.quant_state.bitsandbytes__{kind}": torch.tensor(text, dtype=torch.uint8)}

    def weights(stored: Mapping[str, Array], outputs: int, inputs: int) -> Array:
        bytes_of = stored["weight"].reshape(-1).view(np.uint8)
        factors = stored["weight.absmax"]
        if nested:
            outer = np.repeat(stored["weight.nested_absmax"], 256)[: len(factors)]
            factors = stored["weight.nested_quant_map"][factors] * outer + np.float32(0.3)
        result = np.empty(outputs * inputs, np.float32)
        for place in range(len(result)):
            nibble = bytes_of[place // 2] >> 4 if place % 2 == 0 else bytes_of[place // 2] & 15
            result[place] = stored["weight.quant_map"][nibble] * factors[place // block]
        return result.reshape(outputs, inputs)

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return Kind(config, tensors, weights)


def llm_int8_kind() -> Kind:
    def tensors(generator: torch.Generator, outputs: int, inputs: int) -> dict[str, Tensor]:
        return {
            "weight": (integers(generator, 8, outputs, inputs).short() - 128).to(torch.int8),
            "SCB": 0.2 + 0.5 * torch.rand(outputs, generator=generator),
            "weight_format": torch.tensor(0, dtype=torch.uint8),
        }

    def weights(stored: Mapping[str, Array], outputs: int, inputs: int) -> Array:
        step = np.float32(bitsandbytes.INT8_STEP)
        return stored["weight"].astype(np.float32) * (stored["SCB"] * step)[:, None]

    return Kind({"quant_method": "bitsandbytes", "load_in_8bit": True}, tensors, weights)


CHANNEL = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
KINDS: dict[str, Kind] = {
    "nvfp4 of Model Optimizer": nvfp4_kind(modelopt=True),
    "nvfp4 of compressed-tensors": nvfp4_kind(modelopt=False),
    "awq g32": awq_kind(32, bits=4, version="gemm", zero_point=True, modules_to_not_convert=["lm_head"]),
    "awq whole rows": awq_kind(-1, w_bit=4, version="GEMM"),
    "gptq": gptq_kind(4, 32),
    "gptq whole rows, no g_idx": gptq_kind(4, -1, order="none"),
    "gptq asymmetric": gptq_kind(4, 16, sym=False),
    "gptq asymmetric, act-order, v2": gptq_kind(
        4, 32, order="shuffled", sym=False, desc_act=True, checkpoint_format="gptq_v2"
    ),
    "gptq 8 bits, act-order": gptq_kind(8, 32, order="shuffled", desc_act=True, checkpoint_format="gptq"),
    "gptq 8 bits, asymmetric": gptq_kind(8, 32, sym=False),
    "gptq 3 bits": gptq_kind(3, 32, sym=False),
    "gptq 2 bits": gptq_kind(2, 32, sym=False),
    "compressed-tensors w4a16": packed_kind(4, 32),
    "compressed-tensors w4a16 asymmetric": packed_kind(4, 32, symmetric=False),
    "compressed-tensors w4a16 act-order": packed_kind(4, 32, symmetric=False, order=True),
    "compressed-tensors w8a16 channel": packed_kind(8, 0),
    "compressed-tensors w8a16 channel asymmetric": packed_kind(8, 0, symmetric=False),
    "compressed-tensors 3 bits": packed_kind(3, 32),
    "compressed-tensors 6 bits": packed_kind(6, 32, symmetric=False),
    "compressed-tensors w8a8": int8_kind(),
    "compressed-tensors w8a8 static": int8_kind(dynamic=False, strategy="tensor"),
    "compressed-tensors w8a8 asymmetric": int8_kind(symmetric=False),
    "compressed-tensors w8a8 one scale": int8_kind(one=True),
    "compressed-tensors fp8 channel": Kind(
        ct_config("float-quantized", CHANNEL, DYNAMIC), *fp8_tensors("weight_scale", 1, 0), ("fp8", 0)
    ),
    "compressed-tensors fp8 tensor": Kind(
        ct_config("float-quantized", CHANNEL | {"strategy": "tensor"}, DYNAMIC | {"dynamic": False}),
        *fp8_tensors("weight_scale", 0, 0, lambda x: x.flatten().to(torch.bfloat16)),
        ("fp8", 0),
    ),
    "compressed-tensors fp8 blocks": Kind(
        ct_config("float-quantized", CHANNEL | {"strategy": "block", "block_structure": [32, 32]}, DYNAMIC),
        *fp8_tensors("weight_scale", 32, 32),
        ("fp8", 32),
    ),
    "fp8 one scale": fp8_kind(0, 0, lambda x: x.reshape(()), activation_scheme="static"),
    "fp8 a scale an output": fp8_kind(1, 0, quant_method="fbgemm_fp8"),
    "fp8 one inverse scale": fp8_kind(
        0,
        0,
        lambda x: x.reshape(()).to(torch.bfloat16),
        "weight_scale_inv",
        activation_scheme="static",
        weight_block_size=None,
    ),
    "fp8 one inverse scale, blocks elsewhere": fp8_kind(
        0, 0, lambda x: x.reshape(1), "weight_scale_inv", weight_block_size=[128, 128]
    ),
    "fp8 an inverse scale an output": fp8_kind(1, 0, lambda x: x, "weight_scale_inv"),
    "fp8 blocks": fp8_kind(32, 32, activation_scheme="dynamic", fmt="e4m3"),
    "fp8 blocks of 128": fp8_kind(128, 128),
    "fp8 blocks, ue8m0": fp8_kind(32, 32, lambda x: x.to(torch.float8_e8m0fnu), scale_fmt="ue8m0"),
    "bitsandbytes nf4": bnb_kind("nf4"),
    "bitsandbytes nf4, double quantization, bytes in bfloat16": bnb_kind("nf4", 64, True, torch.bfloat16),
    "bitsandbytes fp4, blocks across rows": bnb_kind("fp4", 128),
    "bitsandbytes int8": llm_int8_kind(),
}


def as_array(tensor: Tensor) -> Array:
    """Convert to a NumPy array; dtypes that NumPy lacks become float32."""
    unsupported = tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu)
    return (tensor.float() if unsupported else tensor).numpy()


def draw_matrix(kind: Kind, generator: torch.Generator, outputs: int, inputs: int) -> tuple[dict[str, Tensor], Tensor]:
    """Draw the stored tensors of a matrix, by the suffix of their names, and its dequantized weights ``[out, in]``."""
    stored = kind.tensors(generator, outputs, inputs)
    arrays = {part: as_array(tensor) for part, tensor in stored.items() if tensor.dtype != torch.bfloat16}
    arrays |= {part: bfloat16_array(part, stored[part]) for part in stored.keys() - arrays.keys()}
    return stored, torch.from_numpy(kind.weights(arrays, outputs, inputs))


def quantize(folder: Path, kind: Kind, config: Any = None, seed: int = 0) -> PreTrainedModel:
    """Write a checkpoint with random quantized matrices; return the model with their dequantized weights."""
    model = save(config or LlamaConfig(**SIZES), folder)
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in model.state_dict().items():
        matrix = name.removesuffix(".weight")
        if weight.dim() < 2 or "embed" in name or matrix in kind.skip:
            tensors[name] = weight.clone()
            continue
        stored, dequantized = draw_matrix(kind, generator, *weight.shape)
        weight.copy_(dequantized)
        tensors |= {f"{matrix}.{part}": tensor.contiguous() for part, tensor in stored.items()}
    save_file(tensors, folder / "model.safetensors")
    set_quantization(folder, kind)
    return model


def set_quantization(folder: Path, kind: Kind) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": kind.config}))


def quantize_checkpoint(
    folder: Path, kind: Kind, is_quantized: Callable[[str, int, int], bool], seed: int = 0
) -> PreTrainedModel:
    """Replace matrices of a checkpoint by random quantized matrices; return the model with their dequantized weights.

    Experts of a layer in one tensor ``[experts, out, in]`` are quantized as one matrix with the outputs of all experts.

    Args:
        is_quantized: function from a tensor's name, outputs and inputs.
    """
    file, plain = folder / "model.safetensors", folder / "dequantized"
    generator, tensors, dequantized = torch.Generator().manual_seed(seed), dict[str, Tensor](), dict[str, Tensor]()
    for name, weight in load_file(file).items():
        *experts, inputs = weight.shape
        outputs = math.prod(experts)
        if not name.endswith(".weight") or weight.dim() < 2 or not is_quantized(name, outputs, inputs):
            tensors[name] = dequantized[name] = weight
            continue
        stored, numbers = draw_matrix(kind, generator, outputs, inputs)
        dequantized[name] = numbers.view(weight.shape)
        for part, tensor in stored.items():
            by_expert = weight.dim() == 3 and len(tensor) == outputs
            tensor = tensor.unflatten(0, weight.shape[:2]) if by_expert else tensor
            tensors[f"{name.removesuffix('.weight')}.{part}"] = tensor.contiguous()
    shutil.copytree(folder, plain)
    save_file(dequantized, plain / file.name, {"format": "pt"})
    save_file(tensors, file, {"format": "pt"})
    set_quantization(folder, kind)
    return AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()


def bfloat16_array(part: str, tensor: Tensor) -> Array:
    """Convert a bfloat16 tensor: scales to float32, the weight, whose bytes are packed integers, to int16."""
    return tensor.view(torch.int16).numpy() if part == "weight" else tensor.float().numpy()
