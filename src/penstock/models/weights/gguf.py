"""Tensors of a checkpoint in a memory-mapped GGUF file, or in several parts of one."""

from __future__ import annotations

import hashlib
import logging
import re
import warnings
from collections import Counter
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from penstock.core.errors import invalid
from penstock.core.quantization import UNQUANTIZED, Format
from penstock.ops import QuantizedWeight
from penstock.planning.checkpoint_digest import checkpoint_digest, weight_files
from penstock.planning.gguf_config import tensors_of
from penstock.planning.gguf_file import GGUFFile, GGUFTensor, parts_in
from penstock.quant.gguf import read_blocks

logger = logging.getLogger(__name__)

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Names of Hugging Face's checkpoints, and those of llama.cpp."""
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
INTERLEAVED = re.compile(r"blk\.\d+\.attn_[qk]\.(weight|bias)")
"""Tensors whose rows llama.cpp orders for rotary positions of neighbours, in models of the architecture ``llama``."""


def find_gguf(folder: Path) -> list[Path]:
    """The GGUF file of a folder, or its parts; nothing where the folder has other weights.

    Raises ``PenstockError`` (``invalid``) for a folder with several models.
    """
    return [] if weight_files(folder) else parts_in(folder)


class GGUFCheckpoint:
    """The tensors of a GGUF file under Hugging Face's names.

    Args:
        folder: of the checkpoint, with a ``config.json``.
        parts: the file, or its parts in order.
        head_dim: size of a head.

    Raises ``PenstockError``: ``invalid`` where a file is damaged, ``unsupported`` for types that are not read.
    """

    def __init__(self, folder: Path, parts: list[Path], head_dim: int) -> None:
        self._folder = folder
        files = [GGUFFile(part) for part in parts]
        self._tensors = tensors_of(files)
        self._bytes: dict[str, Tensor] = {}
        for file in files:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that the memory cannot be written
                content = torch.frombuffer(file.content, dtype=torch.uint8)
            self._bytes |= dict.fromkeys(file.tensors, content)
        self._interleaved = files[0].get("general.architecture", str) == "llama"
        self._head_dim = head_dim
        self.bytes_read = 0
        """Bytes of all tensors and slices taken so far, as they are in the file."""
        types = Counter(tensor.type.name for tensor in self._tensors.values())
        logger.info("%s has tensors of %s", parts[0], ", ".join(f"{name} ({count})" for name, count in types.items()))

    @cached_property
    def version(self) -> str:
        return checkpoint_digest(self._folder)

    @property
    def state(self) -> str:
        """As ``Checkpoint.state``."""
        digest = hashlib.sha256((self._folder / "config.json").read_bytes())
        for file in sorted(self._folder.glob("*.gguf")):
            status = file.stat()
            digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} ".encode())
        digest.update(repr(sorted(self._tensors.items())).encode())
        return digest.hexdigest()

    def read(self, name: str, *shape: int, rows: tuple[int, int] | None = None, as_stored: bool = False) -> Tensor:
        """As ``layers.Weights.read``. Only the pages of the file that hold the rows are read, when they are used."""
        tensor = self._find(name, shape)
        if (dtype := FLOATS.get(tensor.type.name)) is None:
            raise invalid("model", f"tensor {tensor.name} is of {tensor.type.name}, and not of floating-point numbers")
        raw = self._rows(tensor, rows or (0, shape[0])).view(dtype)
        return raw if len(shape) > 1 else raw.flatten()

    def has(self, name: str) -> bool:
        return _stored_name(name) in self._tensors

    def format_of(self, name: str) -> Format:
        """As ``layers.Weights.format_of``."""
        tensor = self._tensors.get(_stored_name(f"{name}.weight"))
        return tensor.type.format if tensor else UNQUANTIZED

    def read_quantized(self, name: str, outputs: int, inputs: int, rows: tuple[int, int]) -> QuantizedWeight:
        """As ``layers.Weights.read_quantized``."""
        tensor = self._find(f"{name}.weight", (outputs, inputs))
        return read_blocks(tensor.type, self._rows(tensor, rows))

    def _find(self, name: str, shape: tuple[int, ...]) -> GGUFTensor:
        if (tensor := self._tensors.get(_stored_name(name))) is None:
            raise invalid("model", f"{self._folder} has no tensor {_stored_name(name)}")
        if tensor.shape != shape:
            raise invalid("model", f"tensor {tensor.name} has shape {tensor.shape}, config.json wants {shape}")
        return tensor

    def _rows(self, tensor: GGUFTensor, rows: tuple[int, int]) -> Tensor:
        """Some rows of a tensor, or numbers of a vector, ``[rows, bytes]`` uint8."""
        whole = self._bytes[tensor.name][tensor.offset : tensor.offset + tensor.size].view(tensor.shape[0], -1)
        first, end = rows
        if self._interleaved and INTERLEAVED.fullmatch(tensor.name):
            part = whole[_interleaved_rows(torch.arange(first, end), self._head_dim)]
        else:
            part = whole[first:end]
        self.bytes_read += part.nbytes
        return part


def _interleaved_rows(rows: Tensor, head_dim: int) -> Tensor:
    """Where llama.cpp has rows of queries or keys: it alternates the rows of both halves of a head."""
    head, place = rows // head_dim, rows % head_dim
    half, pair = place // (head_dim // 2), place % (head_dim // 2)
    return head * head_dim + 2 * pair + half


def _stored_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if match := LAYER.fullmatch(stem):
        return f"blk.{match[1]}.{NAMES.get(match[2], match[2])}.{kind}"
    return f"{NAMES.get(stem, stem)}.{kind}"
