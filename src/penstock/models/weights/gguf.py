"""Tensors of a checkpoint in a memory-mapped GGUF file, or its parts."""

from __future__ import annotations

import hashlib
import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.checkpoint.checkpoint_digest import checkpoint_digest, weight_files
from penstock.checkpoint.gguf_architectures import FUSED, KEYS_B, VALUES_B
from penstock.checkpoint.gguf_file import GGUFFile, GGUFTensor, parts_in
from penstock.checkpoint.gguf_metadata import Metadata
from penstock.checkpoint.gguf_registry import architecture_of
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.core.quantization import UNQUANTIZED, Format
from penstock.ops import QuantizedWeight
from penstock.quant.gguf import read_blocks

logger = logging.getLogger(__name__)

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INTERLEAVED = re.compile(r"blk\.\d+\.attn_[qk]\.(weight|bias)")
"""Pattern of the names of query and key tensors, whose rows may be interleaved."""
LINEAR_ATTENTION = re.compile(r"\.linear_attn\.(\w+)(\.weight)?")
"""Pattern of the names of tensors of a gated delta net in a Hugging Face checkpoint."""
PLACES = {"attn_q": 0, "attn_k": 2, "attn_v": 1, "ffn_gate": 0, "ffn_up": 1, "ffn_gate_exps": 0, "ffn_up_exps": 1}
"""Tensor → its place N in a fused tensor: N times its number of rows before the end; 0: at the beginning."""


def find_gguf(folder: Path) -> list[Path]:
    """The GGUF file of a folder, or its parts; empty if the folder has other weights.

    Raises ``PenstockError`` (``invalid``) for a folder with several models.
    """
    return [] if weight_files(folder) else parts_in(folder)


class _Place(NamedTuple):
    """Location of the rows of a matrix, or of the elements of a vector, in a GGUF tensor."""

    tensor: GGUFTensor
    first: int
    """First row in ``tensor``, after flattening all dimensions of the tensor but the last."""
    order: Callable[[Tensor], Tensor] | None = None
    """Function from rows in the order of a Hugging Face checkpoint to rows of the file; None: the same order."""


class _ValueOrder(NamedTuple):
    """Order of the value heads of gated delta nets: by their index in the group of a key head, then by key head
    (``Architecture.tiled_values``)."""

    key_heads: int
    value_heads: int
    dim: int
    """Elements of a value."""
    key_size: int
    """Elements of the queries and keys of all heads, which precede the values in ``in_proj_qkv`` and ``conv1d``."""

    @classmethod
    def of(cls, metadata: Metadata) -> _ValueOrder:
        keys, values = metadata.size("ssm.group_count"), metadata.size("ssm.time_step_rank")
        dim = metadata.size("ssm.inner_size") // values
        return cls(keys, values, dim, 2 * keys * metadata.size("ssm.state_size"))

    def check(self, tensors: Iterable[GGUFTensor]) -> None:
        """Raise ``PenstockError`` (``unsupported``) if groups of quantized weights have inputs of several heads."""
        for tensor in tensors:
            size = tensor.type.format.group_size
            if size and self.dim % size and tensor.name.endswith(".ssm_out.weight"):
                message = f"{tensor.name} has groups of {size} weights, which must divide a value head's {self.dim}"
                raise PenstockError(Code.UNSUPPORTED, f"{message}: use a file of another type", "model")

    def rows_of(self, module: str) -> Callable[[Tensor], Tensor] | None:
        """``_Place.order`` of a module's tensor; None: in the order of the checkpoint."""
        if module in ("in_proj_qkv", "conv1d"):
            return partial(self.order, size=self.dim, first=self.key_size)
        if module == "in_proj_z":
            return partial(self.order, size=self.dim)
        return partial(self.order, size=1) if module in ("in_proj_a", "in_proj_b", "A_log", "dt_bias") else None

    def order(self, rows: Tensor, size: int, first: int = 0) -> Tensor:
        """Rows of the file.

        Args:
            rows: rows in the checkpoint's order, which is by key head, then by the index in its group.
            size: rows of a head.
            first: first row of the values; rows before it stay in place.
        """
        group = self.value_heads // self.key_heads
        head, rest = (rows - first) // size, (rows - first) % size
        tiled = (head % group * self.key_heads + head // group) * size + rest + first
        return torch.where(rows < first, rows, tiled)


class GGUFCheckpoint:
    """The tensors of a GGUF file under the names of a Hugging Face checkpoint.

    Each expert's matrix has a name (``experts.3.up_proj.weight``), although files have one tensor for all experts of a
    layer. Projections also have separate names (``q_proj``, ``k_proj``, ``v_proj``) if the file has a fused tensor.

    Args:
        folder: the checkpoint folder, with a ``config.json``.
        parts: the file, or its parts in order.
        head_dim: elements per head.

    Raises ``PenstockError``: ``invalid`` for a damaged file, ``unsupported`` for unsupported tensor types.
    """

    def __init__(self, folder: Path, parts: list[Path], head_dim: int) -> None:
        self._folder = folder
        files = [GGUFFile(part) for part in parts]
        metadata = Metadata(files)
        self._tensors, self._architecture = metadata.tensors, architecture_of(metadata)
        self._bytes: dict[str, Tensor] = {}
        for file in files:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # torch warns about the read-only buffer
                content = torch.frombuffer(file.content, dtype=torch.uint8)
            self._bytes |= dict.fromkeys(file.tensors, content)
        self._head_dim = head_dim
        self._values: _ValueOrder | None = None
        if self._architecture.tiled_values:
            self._values = _ValueOrder.of(metadata)
            self._values.check(self._tensors.values())
        self.bytes_read = 0
        """Bytes of all tensors and slices read so far, as stored in the file."""
        types = Counter(tensor.type.name for tensor in self._tensors.values())
        logger.info("%s has tensors of %s", parts[0], ", ".join(f"{name} ({count})" for name, count in types.items()))

    @cached_property
    def version(self) -> str:
        return checkpoint_digest(self._folder)

    @property
    def state(self) -> str:
        digest = hashlib.sha256((self._folder / "config.json").read_bytes())
        for file in sorted(self._folder.glob("*.gguf")):
            status = file.stat()
            digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} ".encode())
        digest.update(repr(sorted(self._tensors.items())).encode())
        return digest.hexdigest()

    def read(self, name: str, *shape: int, rows: tuple[int, int] | None = None, as_stored: bool = False) -> Tensor:
        """See ``layers.Weights.read``. The file is mapped: its pages are read when the rows are used."""
        wanted = rows or (0, shape[0])
        if parts := self._key_value_parts(name):
            return self._key_value_matrix(parts, shape)[slice(*wanted)]
        place = self._find(name, shape)
        tensor = place.tensor
        if (dtype := FLOATS.get(tensor.type.name)) is None:
            raise invalid("model", f"tensor {tensor.name} has type {tensor.type.name}; it must be F32, F16 or BF16")
        read = self._rows(place, prod(shape[1:]), wanted).view(dtype)
        if self._architecture.norm_offset and re.fullmatch(r".*(?<!ssm_)norm\.weight", tensor.name):
            read = read.float() - self._architecture.norm_offset
        if tensor.name.endswith(".ssm_a"):  # the converter stores -exp(A_log)
            read = (-read.float()).log()
        read = read.reshape(-1, *shape[1:])
        return read if (columns := self._columns(name, shape[-1])) is None else read[:, columns]

    def has(self, name: str) -> bool:
        return self._stored(name)[0] is not None or self._key_value_parts(name) is not None

    def format_of(self, name: str) -> Format:
        tensor, _ = self._stored(f"{name}.weight")
        return tensor.type.format if tensor else UNQUANTIZED

    def read_quantized(self, name: str, outputs: int, inputs: int, rows: tuple[int, int]) -> QuantizedWeight:
        place = self._find(f"{name}.weight", (outputs, inputs))
        read = read_blocks(place.tensor.type, self._rows(place, inputs, rows))
        if (columns := self._columns(f"{name}.weight", inputs)) is None:
            return read
        size = read.format.group_size
        groups = columns[::size] // size
        offsets = None if read.offsets is None else read.offsets[:, groups]
        return replace(read, values=read.values[:, columns], scales=read.scales[:, groups], offsets=offsets)

    def _columns(self, name: str, inputs: int) -> Tensor | None:
        """Columns of the file's matrix in the order of a Hugging Face checkpoint; None: the same order."""
        if self._values and name.endswith(".linear_attn.out_proj.weight"):
            return self._values.order(torch.arange(inputs), self._values.dim)
        return None

    def _stored(self, name: str) -> tuple[GGUFTensor | None, int | None]:
        """The tensor that contains a weight, possibly fused (None: absent), and the expert's index in it (None: not a
        tensor of experts)."""
        stored, expert = self._architecture.stored_name(name)
        if tensor := self._tensors.get(stored):
            return tensor, expert
        stem, _, kind = stored.rpartition(".")
        prefix, _, last = stem.rpartition(".")
        others = (other for other, parts in FUSED.items() if last in parts and other not in (KEYS_B, VALUES_B))
        found = (self._tensors.get(f"{prefix}.{other}.{kind}") for other in others)
        return next((tensor for tensor in found if tensor), None), expert

    def _find(self, name: str, shape: tuple[int, ...]) -> _Place:
        """Location of a weight. Raises ``PenstockError`` (``invalid``) if the file lacks it, or its shape differs."""
        tensor, expert = self._stored(name)
        stored, _ = self._architecture.stored_name(name)
        if tensor is None:
            raise invalid("model", f"{self._folder} has no tensor {stored}")
        found, first = tensor.shape, 0
        if expert is not None:
            if expert >= found[0] or len(found) < 2:
                raise invalid("model", f"tensor {tensor.name} has shape {found}; config.json requires expert {expert}")
            found, first = found[1:], expert * found[1]
        part = stored.rpartition(".")[0].rpartition(".")[2]
        order = self._order(name, stored)
        is_part = tensor.name != stored or (part == "ffn_up" and found[:1] == (2 * shape[0],))
        if is_part and found[1:] == shape[1:] and found[0] > PLACES[part] * shape[0]:
            return _Place(tensor, first + (found[0] - PLACES[part] * shape[0]) % found[0], order)
        is_vector = len(shape) == 1 and prod(found) == shape[0]  # norms may have a row per group
        if is_part or not (is_vector or _squeezed(found) == _squeezed(shape)):
            raise invalid("model", f"tensor {tensor.name} has shape {found}; config.json requires {shape}")
        return _Place(tensor, first, order)

    def _order(self, name: str, stored: str) -> Callable[[Tensor], Tensor] | None:
        """See ``_Place.order``."""
        if self._architecture.interleaved and INTERLEAVED.fullmatch(stored):
            return partial(_interleaved_rows, head_dim=self._head_dim)
        if self._values and (found := LINEAR_ATTENTION.search(name)):
            return self._values.rows_of(found[1])
        return None

    def _rows(self, place: _Place, inputs: int, rows: tuple[int, int]) -> Tensor:
        """A range of rows of a matrix, or of elements of a vector: ``[rows, bytes]`` uint8.

        Args:
            inputs: number of elements per row.
        """
        tensor, (start, end) = place.tensor, rows
        data = self._bytes[tensor.name][tensor.offset : tensor.offset + tensor.size]
        whole = data.view(prod(tensor.shape) // inputs, -1)[place.first :]
        part = whole[place.order(torch.arange(start, end))] if place.order else whole[start:end]
        self.bytes_read += part.nbytes
        return part

    def _key_value_parts(self, name: str) -> tuple[GGUFTensor, GGUFTensor] | None:
        """The key and the value tensor, if ``name`` is a ``kv_b_proj`` stored in two tensors; else None."""
        stored = self._architecture.stored_name(name)[0]
        if not self._architecture.latent or stored in self._tensors or not stored.endswith(".attn_kv_b.weight"):
            return None
        prefix = stored.removesuffix("attn_kv_b.weight")
        keys, values = (self._tensors.get(f"{prefix}{part}.weight") for part in (KEYS_B, VALUES_B))
        return (keys, values) if keys and values else None

    def _key_value_matrix(self, parts: tuple[GGUFTensor, GGUFTensor], shape: tuple[int, ...]) -> Tensor:
        """``kv_b_proj``, ``[heads * (nope + value), latent]`` float32."""
        keys, values = (self._numbers(part) for part in parts)
        if keys.dim() == 3 and values.dim() == 3 and keys.shape[:2] == values.shape[::2]:
            matrix = torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)
            if matrix.shape == shape:
                return matrix
        shapes = " and ".join(str(part.shape) for part in parts)
        raise invalid(
            "model", f"tensors {parts[0].name} and {VALUES_B} have shapes {shapes}; config.json requires {shape}"
        )

    def _numbers(self, tensor: GGUFTensor) -> Tensor:
        """All values of a tensor in float32, dequantized if necessary."""
        inputs = tensor.shape[-1]
        count = prod(tensor.shape) // inputs
        rows = self._rows(_Place(tensor, 0), inputs, (0, count))
        dtype = FLOATS.get(tensor.type.name)
        numbers = read_blocks(tensor.type, rows).dequantize() if dtype is None else rows.view(dtype).float()
        return numbers.view(tensor.shape)


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without its dimensions of size 1. Files may omit such dimensions."""
    return tuple(size for size in shape if size != 1)


def _interleaved_rows(rows: Tensor, head_dim: int) -> Tensor:
    """The rows of a query or key matrix in llama.cpp's order, which alternates the rows of both halves of a head."""
    head, index = rows // head_dim, rows % head_dim
    half, pair = index // (head_dim // 2), index % (head_dim // 2)
    return head * head_dim + 2 * pair + half
