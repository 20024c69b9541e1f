"""Writer of quantized checkpoints in the formats AWQ, GPTQ, and compressed-tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.checkpoint.config_json import read_plain_config_json
from penstock.checkpoint.sentence_transformers import module_files
from penstock.checkpoint.stored_tensors import INDEX, plan_shards
from penstock.config.progress import Progress, print_line
from penstock.core.quantization import Format, Scheme
from penstock.models import ModelConfig
from penstock.models.weights import Checkpoint
from penstock.ops import QuantizedWeight
from penstock.ops.scale_search import fits_half
from penstock.quant import awq, compressed_tensors, gptq

from .gptq import DAMPING
from .layer import QuantizedLayer
from .options import FileFormat, QuantizeOptions
from .state import CONFIG, RunState

SHARD_BYTES = 2**31
"""Maximum size of a shard in bytes."""
COPIED = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt")
"""Name patterns of the files to copy: tokenizer, chat templates, sampling defaults."""
NOT_COPIED = (
    CONFIG,
    "*.index.json",
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
    "figures.json",
)
HEADS = ("embed_tokens", "embeddings", "embedding", "lm_head")
"""Suffixes of the names of embedding and language model head."""


def layer_prefix(checkpoint: Checkpoint) -> str:
    """The prefix of the names of the layers' tensors, before the layer's index."""
    backbone = "backbone.layers."
    return backbone if any(name.startswith(backbone) for name in checkpoint.names) else "model.layers."


def read_tensors(checkpoint: Checkpoint, prefix: str = "") -> dict[str, Tensor]:
    """Read the tensors whose names begin with ``prefix``, in their stored dtypes."""
    names = sorted(name for name in checkpoint.names if name.startswith(prefix))
    return {name: checkpoint.read(name, *checkpoint.shape(name), as_stored=True) for name in names}


def encode_layer(layer: QuantizedLayer, stored: Mapping[str, Tensor], file_format: FileFormat) -> dict[str, Tensor]:
    """Return the tensors of a quantized layer by full name.

    Args:
        stored: the layer's tensors in the original checkpoint.
    """
    tensors = {name: layer.changed.get(name, tensor) for name, tensor in stored.items()}
    for name, weight in layer.quantized.items():
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{part}": tensor for part, tensor in encode(weight, file_format).items()}
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def encode(weight: QuantizedWeight, file_format: FileFormat) -> dict[str, Tensor]:
    """Return the tensors of a quantized matrix by the last part of their names, such as "qweight"."""
    match file_format:
        case "awq":
            return _encode_awq(weight)
        case "gptq":
            return _encode_gptq(weight)
        case _:
            return _encode_compressed(weight)


def _encode_awq(weight: QuantizedWeight) -> dict[str, Tensor]:
    assert weight.offsets is not None
    middle = 1 << (weight.format.bits - 1)
    zeros = (middle - weight.offsets / weight.scales).round().to(torch.uint8)
    return {
        "qweight": awq.pack((weight.values + middle).to(torch.uint8).T),
        "qzeros": awq.pack(zeros.T),
        "scales": weight.scales.T.half(),
    }


def _encode_gptq(weight: QuantizedWeight) -> dict[str, Tensor]:
    bits, (outputs, inputs) = weight.format.bits, weight.values.shape
    middle, groups = 1 << (bits - 1), weight.scales.shape[1]
    order = torch.arange(inputs) if weight.order is None else weight.order
    values = torch.empty_like(weight.values).index_copy_(1, order, weight.values)
    group_of = torch.arange(inputs, dtype=torch.int32) // (weight.format.group_size or inputs)
    return {
        "qweight": gptq.pack((values.short() + middle).to(torch.uint8), bits),
        "qzeros": gptq.pack_zeros(torch.full((groups, outputs), middle, dtype=torch.uint8), bits),
        "scales": weight.scales.T.half(),
        "g_idx": torch.empty_like(group_of).index_copy_(0, order, group_of),
    }


def _encode_compressed(weight: QuantizedWeight) -> dict[str, Tensor]:
    # The format expects normalized rotations; the rotation of ``QuantizedWeight`` is not normalized.
    scales = weight.scales * weight.format.rotation_block(weight.values.shape[1]) ** 0.5
    scales = scales.half() if weight.format.bits == 4 and fits_half(scales) else scales
    if not _is_packed(weight.format):
        return {"weight": weight.values, "weight_scale": scales}
    return {
        "weight_packed": compressed_tensors.pack(weight.values, weight.format.bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.values.shape),
    }


def _is_packed(format: Format) -> bool:
    """True if compressed-tensors packs the integers into int32: 4-bit weights, or unquantized activations."""
    return format.bits == 4 or not format.activation_bits


@dataclass
class CheckpointWriter:
    """Assembles the quantized checkpoint from the files of quantized layers and other files of the original."""

    model: Path
    """Folder of the original checkpoint."""
    output: Path
    """Folder of the quantized checkpoint."""
    config: ModelConfig
    checkpoint: Checkpoint
    options: QuantizeOptions
    state: RunState
    _unquantized: list[str] = field(default_factory=list)
    """Names of unquantized matrices, without embedding and head."""
    _sensitive: list[str] = field(default_factory=list)
    """Names of quantized matrices in the format for sensitive matrices."""

    def write_weights(self, progress: bool = True) -> dict[str, int]:
        """Write the shards, and copy other files. Returns the bytes of all tensors before and after quantization."""
        sizes = {name: tensor.nbytes for name, tensor in self._tensors()}
        shards, total, remaining = plan_shards(sizes, SHARD_BYTES), sum(sizes.values()), self._tensors()
        with Progress("written", total, "B", print_line("quantize"), shown=progress) as bar:
            for file, shard in shards.items():
                tensors = {self.checkpoint.stored_name(name): tensor for name, tensor in islice(remaining, len(shard))}
                write = partial(save_file, _unshared(tensors), metadata={"format": "pt"})
                self.state.write(self.output / file, write)
                bar.update(sum(tensor.nbytes for tensor in tensors.values()))
        if len(shards) > 1:
            weight_map = {name: file for file, shard in shards.items() for name in shard}
            weight_map = {self.checkpoint.stored_name(name): file for name, file in sorted(weight_map.items())}
            self._write_json(INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        self._copy_files()
        original = sum(tensor.nbytes for tensor in read_tensors(self.checkpoint).values())
        return {"bytes_original": original, "bytes_quantized": total}

    def write_config(self) -> None:
        """Write ``config.json``, the last file of the checkpoint."""
        config = read_plain_config_json(self.model)
        self._write_json(CONFIG, {**config, "quantization_config": self._quantization_config()})

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors by name; tensors of the layers are last."""
        self._unquantized, self._sensitive = [], []
        layers, prefix = self.config.num_layers, layer_prefix(self.checkpoint)
        prefixes = tuple(f"{prefix}{number}." for number in range(layers))
        for name in sorted(name for name in self.checkpoint.names if not name.startswith(prefixes)):
            tensor = self.checkpoint.read(name, *self.checkpoint.shape(name), as_stored=True)
            yield name, self._classify(name, tensor)
        for number in range(layers):
            with safe_open(self.state.layer_tensors(number), framework="pt") as file:
                for name in sorted(file.keys()):
                    yield name, self._classify(name, file.get_tensor(name))

    def _classify(self, name: str, tensor: Tensor) -> Tensor:
        """Record the name of an unquantized or sensitive matrix for ``config.json``. Returns the tensor."""
        matrix = name.removesuffix(".weight")
        is_plain = tensor.dtype in (torch.float16, torch.bfloat16, torch.float32)
        if matrix != name and tensor.dim() == 2 and is_plain and not matrix.endswith(HEADS):
            self._unquantized.append(matrix)
        matrix = name.removesuffix(".weight_scale")
        if matrix != name and self.options.scheme.format_of(matrix) != self.options.format:
            self._sensitive.append(matrix)
        return tensor

    def _copy_files(self) -> None:
        for path in sorted((*self.model.iterdir(), *self.model.glob("additional_chat_templates/*.jinja"))):
            is_copied = any(fnmatch(path.name, pattern) for pattern in COPIED)
            if path.is_file() and is_copied and not any(fnmatch(path.name, pattern) for pattern in NOT_COPIED):
                target = self.output / path.relative_to(self.model)
                target.parent.mkdir(exist_ok=True)
                self.state.write(target, partial(shutil.copyfile, path))
        for name, content in module_files(self.model).items():
            (self.output / name).parent.mkdir(parents=True, exist_ok=True)
            self.state.write(self.output / name, partial(Path.write_bytes, data=content))

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
        self.state.write(self.output / name, lambda path: path.write_text(text, encoding="utf-8"))

    def _quantization_config(self) -> dict[str, Any]:
        options, ignored = self.options, ["lm_head", *self._unquantized]
        format = options.format
        group_size = format.group_size or -1
        match options.file_format:
            case "awq":
                return {
                    "quant_method": "awq",
                    "version": "gemm",
                    "bits": format.bits,
                    "group_size": group_size,
                    "zero_point": True,
                    "modules_to_not_convert": ignored,
                }
            case "gptq":
                config = {
                    "quant_method": "gptq",
                    "checkpoint_format": "gptq",
                    "bits": format.bits,
                    "group_size": group_size,
                    "desc_act": options.act_order == "group",
                    "static_groups": options.act_order == "static",
                    "sym": True,
                    "true_sequential": False,
                    "damp_percent": DAMPING,
                    "lm_head": False,
                }
                excluded: dict[str, dict[str, Any]] = {
                    f"-:^{name.replace('.', chr(92) + '.')}$": {} for name in self._unquantized
                }
                return {**config, "dynamic": excluded} if excluded else config
            case _:
                return _compressed_config(options.scheme, self._sensitive, ignored)


def _compressed_config(scheme: Scheme, sensitive: list[str], ignored: list[str]) -> dict[str, Any]:
    """Return the ``quantization_config`` of a compressed-tensors checkpoint.

    Args:
        sensitive: names of the matrices in the format for sensitive matrices.
        ignored: names of matrices that are not quantized.
    """
    groups = [_config_group(scheme.layers, ["Linear"])]
    if scheme.sensitive and sensitive:
        groups.append(_config_group(scheme.sensitive, sensitive))
    layouts, block = {group["format"] for group in groups}, scheme.layers.rotation
    rotation = {"transform_config": _transform_config(block, ignored)} if block else {}
    return {
        "quant_method": "compressed-tensors",
        **rotation,
        "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
        "ignore": ignored,
        "kv_cache_scheme": None,
    }


def _config_group(format: Format, targets: list[str]) -> dict[str, Any]:
    """Return a config group: a format, and the modules that have it, by name or class."""
    kind = "float" if format.floating else "int"
    weights = _arguments(format.bits, kind, "group" if format.group_size else "channel", False)
    if format.group_size:
        weights["group_size"] = format.group_size
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": _arguments(8, kind, "token", True) if format.activation_bits else None,
        "output_activations": None,
        "format": "pack-quantized" if _is_packed(format) else f"{kind}-quantized",
    }


def _transform_config(block: int, ignored: list[str]) -> dict[str, Any]:
    """Return the ``transform_config`` for rotated inputs and weights. Weights are stored rotated."""
    apply = [
        {"targets": ["Linear"], "location": location, "inverse": inverse, "ignore": ignored}
        for location, inverse in (("input", False), ("weight_input", True))
    ]
    return {"config_groups": {"inputs": {"type": "hadamard", "head_dim": block, "apply": apply}}}


def _arguments(bits: int, kind: str, strategy: str, dynamic: bool) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": dynamic}


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Make tensors contiguous and without shared memory, as safetensors requires. Tied tensors of PyTorch files share
    memory."""
    result: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone(memory_format=torch.contiguous_format) if address in seen else tensor.contiguous()
        seen.add(address)
    return result
