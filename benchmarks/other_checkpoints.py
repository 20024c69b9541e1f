"""Quantizes the demo model in other systems' formats: GGUF (with llama.cpp's library) and bitsandbytes.

Needs the dependency group ``test``.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

from gguf_files import add_tokenizer, write_gguf
from quantized import NF4

GGUF = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
"""GGUF types to which llama.cpp's library can quantize."""
BITSANDBYTES = ("int8", "nf4")
BLOCK = 64
"""Number of weights per scale in nf4."""


def write_gguf_type(model: Path, out: Path, kind: str) -> None:
    """Write a GGUF file with all matrices of the type ``kind``, one of ``GGUF``."""
    write_gguf(model, out, lambda name: kind, lambda writer: add_tokenizer(writer, model, "qwen2"))


def write_bitsandbytes(model: Path, folder: Path, kind: str) -> None:
    """Write a checkpoint with layers quantized to ``kind``, one of ``BITSANDBYTES``, in bitsandbytes' format."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    rounded: dict[str, Tensor] = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        is_matrix = tensor.dim() == 2 and ".layers." in name
        rounded |= (_nf4 if kind == "nf4" else _int8)(name, tensor.float()) if is_matrix else {name: tensor}
    save_file(rounded, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    method = four if kind == "nf4" else {"load_in_8bit": True}
    config["quantization_config"] = {"quant_method": "bitsandbytes", **method}
    (folder / "config.json").write_text(json.dumps(config))


def _int8(name: str, weight: Tensor) -> dict[str, Tensor]:
    largest = weight.abs().amax(1)
    return {
        name: (weight * (127 / largest)[:, None]).round().to(torch.int8),
        f"{name.removesuffix('.weight')}.SCB": largest,
    }


def _nf4(name: str, weight: Tensor) -> dict[str, Tensor]:
    blocks = pad(weight.flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    largest, table = blocks.abs().amax(1), torch.tensor(NF4)
    codes = (blocks / largest[:, None])[..., None].sub(table).abs().argmin(-1).flatten()[: weight.numel()]
    state = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": "bfloat16", "shape": list(weight.shape)}
    return {
        name: (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None],
        f"{name}.absmax": largest,
        f"{name}.quant_map": table,
        f"{name}.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
