"""compressed-tensors checkpoints (llm-compressor), with a quantization scheme for each group of modules."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.core.errors import invalid
from penstock.core.quantization import UNQUANTIZED, Format
from penstock.ops import QuantizedWeight

from .checkpoint_format import FLOATS, TensorSource, num_groups, read_tensor
from .config_fields import group_size, integer, mapping, pattern, unsupported
from .fp8 import STATIC_ACTIVATIONS, block_size, read_fp8
from .integers import from_unsigned, input_order, pack_bits, unpack_bits
from .nvfp4 import FORMAT as NVFP4_FORMAT
from .nvfp4 import GROUP, read_nvfp4

PACKED, PLAIN = "pack-quantized", ("int-quantized", "float-quantized", "naive-quantized")
NVFP4 = "nvfp4-pack-quantized"
KV_CACHE = "kv_cache_scheme is ignored: --kv-cache-dtype sets the format of the KV cache"


def pack(values: Tensor, bits: int) -> Tensor:
    """Pack ``[out, in]`` int8, signed integers of ``bits`` bits, into ``[out, ceil(in * bits / 32)]`` int32, the layout
    of ``weight_packed``."""
    return pack_bits(_unsigned(values, bits), bits)


def pack_zeros(zeros: Tensor, bits: int) -> Tensor:
    """Pack ``[out, groups]`` int8 into ``[ceil(out * bits / 32), groups]`` int32, the layout of
    ``weight_zero_point``."""
    return pack(zeros.T, bits).T.contiguous()


def _unsigned(values: Tensor, bits: int) -> Tensor:
    """Map signed integers of ``bits`` bits, int8, to unsigned integers, uint8, by adding ``2 ** (bits - 1)``."""
    return values.contiguous().view(torch.uint8) + (1 << (bits - 1))  # wraps around modulo 256


@dataclass(frozen=True)
class _Scheme:
    """Quantization of the matrices of a config group."""

    format: Format
    bits: int
    packed: bool
    symmetric: bool
    nvfp4: bool
    targets: tuple[str | re.Pattern[str], ...]

    def matches(self, name: str, rank: int) -> bool:
        """True if a module is a target: by its full name (``rank`` 0), a regular expression (1), or its class (2)."""
        match rank:
            case 0:
                return name in self.targets
            case 1:
                return any(isinstance(target, re.Pattern) and target.match(name) for target in self.targets)
            case _:
                return ("Embedding" if name.endswith("embed_tokens") else "Linear") in self.targets


class CompressedTensors:
    """``CheckpointFormat`` for compressed-tensors: integers packed into int32 (``weight_packed``, ``weight_shape``), or
    int8 or e4m3 (``weight``); with ``weight_scale``, and optionally ``weight_zero_point`` and ``weight_g_idx``."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._rotation = _read_rotation(config)
        sparsity = mapping(config.get("sparsity_config") or {}, "sparsity_config").get("format") or "dense"
        if sparsity != "dense":
            raise unsupported(f"compressed-tensors with the sparsity format {sparsity!r}; only 'dense' is supported")
        groups = mapping(config.get("config_groups") or {}, "config_groups").values()
        self._schemes = [
            scheme for group in groups if (scheme := _read_scheme(mapping(group, "config_groups"), config))
        ]
        if not self._schemes:
            message = f"config_groups in config.json has {len(groups)} groups, none of them with a weights scheme"
            raise invalid("model", message)
        notes = [STATIC_ACTIVATIONS] if any(map(_is_static, groups)) else []
        self.notes: Sequence[str] = notes + [KV_CACHE] * bool(config.get("kv_cache_scheme"))

    def format_of(self, source: TensorSource, name: str) -> Format:
        """See ``CheckpointFormat.format_of``. A matrix with scales or packed weights is quantized."""
        if not source.has(f"{name}.weight_scale") and not source.has(f"{name}.weight_packed"):
            return UNQUANTIZED
        return replace(self._scheme_of(name).format, rotation=self._rotation)

    def shape(self, source: TensorSource, name: str) -> tuple[int, int]:
        """See ``CheckpointFormat.shape``."""
        scheme = self._scheme_of(name)
        if source.has(f"{name}.weight_shape"):
            stored = read_tensor(source, f"{name}.weight_shape", 2, dtypes=(torch.int32, torch.int64))
            return int(stored[0]), int(stored[1])
        outputs, columns = source.shape(f"{name}.weight_packed" if scheme.packed or scheme.nvfp4 else f"{name}.weight")
        if scheme.packed:
            columns = columns * 32 // scheme.bits
        return outputs, columns * (2 if scheme.nvfp4 else 1)

    def read(
        self, source: TensorSource, name: str, outputs: int, inputs: int, rows: tuple[int, int]
    ) -> QuantizedWeight:
        """See ``CheckpointFormat.read``."""
        scheme, (first, end) = self._scheme_of(name), rows
        format, bits = scheme.format, scheme.bits
        if scheme.nvfp4:
            divisor = read_tensor(source, f"{name}.weight_global_scale", 1, dtypes=(torch.float32,))
            tensors = f"{name}.weight_packed", f"{name}.weight_scale"
            return read_nvfp4(source, *tensors, lambda scales: scales / divisor, outputs, inputs, rows)
        if format.floating:
            return read_fp8(source, name, f"{name}.weight_scale", outputs, inputs, rows, format)
        if scheme.packed:
            values = self._read_packed(source, name, outputs, inputs, rows, bits)
        else:
            stored = read_tensor(source, f"{name}.weight", outputs, inputs, dtypes=(torch.int8,), rows=rows)
            values = _unsigned(stored, bits)
            if bits < 8 and bool((values >= 1 << bits).any()):
                low, high = int(stored.min()), int(stored.max())
                message = f"tensor {name}.weight has integers from {low} to {high}, outside the range of {bits} bits"
                raise invalid("model", message)
        groups = num_groups(inputs, format.group_size)
        scales = _per_output(source, f"{name}.weight_scale", outputs, groups, FLOATS)[first:end]
        zeros = None if scheme.symmetric else self._read_zeros(source, name, outputs, groups, scheme)[first:end]
        order = self._order(source, name, inputs, format.group_size)
        if self._rotation:
            if order is not None:
                raise unsupported("compressed-tensors with transform_config and weight_g_idx")
            format, scales = replace(format, rotation=self._rotation), scales / self._rotation**0.5
        return from_unsigned(values, zeros, scales, bits, format, order)

    def _read_packed(
        self, source: TensorSource, name: str, outputs: int, inputs: int, rows: tuple[int, int], bits: int
    ) -> Tensor:
        if source.has(f"{name}.weight_shape"):
            shape = read_tensor(source, f"{name}.weight_shape", 2, dtypes=(torch.int32, torch.int64)).tolist()
            if shape != [outputs, inputs]:
                raise invalid("model", f"{name} has shape {shape}; config.json requires {[outputs, inputs]}")
        columns = -(-inputs * bits // 32)
        packed = read_tensor(source, f"{name}.weight_packed", outputs, columns, dtypes=(torch.int32,), rows=rows)
        return unpack_bits(packed, bits, inputs)

    def _read_zeros(self, source: TensorSource, name: str, outputs: int, groups: int, scheme: _Scheme) -> Tensor:
        """Read zero points, ``[out, groups]`` uint8, as unsigned integers like the weights (``_unsigned``)."""
        tensor, bits = f"{name}.weight_zero_point", scheme.bits
        if not scheme.packed:
            return _unsigned(_per_output(source, tensor, outputs, groups, (torch.int8,)), bits)
        packed = read_tensor(source, tensor, -(-outputs * bits // 32), groups, dtypes=(torch.int32,))
        return unpack_bits(packed.T, bits, outputs).T

    def _order(self, source: TensorSource, name: str, inputs: int, size: int) -> Tensor | None:
        """Read the order of inputs (``actorder`` "group"); None: the inputs are in their original order."""
        tensor = f"{name}.weight_g_idx"
        if not source.has(tensor):
            return None
        groups = read_tensor(source, tensor, inputs, dtypes=(torch.int32, torch.int64))
        return None if bool((groups == -1).all()) else input_order(groups, size, tensor)

    def _scheme_of(self, name: str) -> _Scheme:
        """Return the scheme of a module: the first scheme with a matching target. Names have precedence over regular
        expressions, and regular expressions over classes. A single scheme applies to all modules."""
        if len(self._schemes) == 1:
            return self._schemes[0]
        for rank in range(3):
            for scheme in self._schemes:
                if scheme.matches(name, rank):
                    return scheme
        raise invalid("model", f"{name} is quantized, but matches no target of config_groups in config.json")


def _read_scheme(group: Mapping[str, Any], config: Mapping[str, Any]) -> _Scheme | None:
    """Read the scheme of a config group; None if the group does not quantize weights.

    Raises ``PenstockError``: ``unsupported`` for an unsupported layout or format, ``invalid`` for malformed fields.
    """
    if group.get("weights") is None:
        return None
    weights, layout = mapping(group["weights"], "weights"), group.get("format") or config.get("format")
    if layout not in (known := (PACKED, *PLAIN, NVFP4)):
        raise unsupported(f"compressed-tensors in the format {layout!r:.40}; supported: {', '.join(known)}")
    if group.get("output_activations"):
        raise unsupported("compressed-tensors with quantized output_activations")
    bits, kind, strategy = integer(weights, "num_bits", 8), weights.get("type", "int"), weights.get("strategy")
    targets = group.get("targets") or ["Linear"]
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise invalid("model", f"targets in config.json is {targets!r:.60}; it must be a list of strings")
    parsed = tuple(pattern(each.removeprefix("re:")) if each.startswith("re:") else each for each in targets)
    by_kind = {"int": _integer_format, "float": _float_format}
    if kind not in by_kind:
        raise unsupported(f"compressed-tensors with weights of type {kind!r:.40}; supported are int and float")
    if layout == NVFP4:
        if (bits, kind, weights.get("group_size")) != (4, "float", GROUP):
            raise unsupported(
                f"compressed-tensors in the format {NVFP4} with other numbers than 4 bits in groups of {GROUP}"
            )
        format = NVFP4_FORMAT
    else:
        format = by_kind[kind](weights, bits, strategy, _activation_bits(group, kind))
    return _Scheme(format, bits, layout == PACKED, bool(weights.get("symmetric", True)), layout == NVFP4, parsed)


def _read_rotation(config: Mapping[str, Any]) -> int:
    """Read the size of the Hadamard blocks that rotate the inputs of all quantized matrices; 0: no rotation.

    Raises ``PenstockError`` (``unsupported``) for any other ``transform_config``.
    """
    transforms = config.get("transform_config")
    if not transforms:
        return 0
    groups = list(mapping(mapping(transforms, "transform_config").get("config_groups") or {}, "config_groups").values())
    group = mapping(groups[0], "config_groups") if len(groups) == 1 else {}
    block, ignored = group.get("head_dim"), config.get("ignore") or []
    expected = [
        {"targets": ["Linear"], "location": location, "inverse": inverse, "ignore": ignored}
        for location, inverse in (("input", False), ("weight_input", True))
    ]
    is_plain = group.get("type") == "hadamard" and not group.get("randomize") and group.get("apply") == expected
    if not is_plain or block not in (2, 4, 8, 16, 32, 64):
        raise unsupported(f"compressed-tensors with transform_config {transforms!r:.60}")
    return int(block)


def _activation_bits(group: Mapping[str, Any], kind: str) -> int:
    """Bits of activations: 8 if the group has 8-bit activations of the weights' type, else 0 (unquantized)."""
    inputs = mapping(group.get("input_activations") or {}, "input_activations")
    return 8 if inputs and (inputs.get("num_bits", 8), inputs.get("type", "int")) == (8, kind) else 0


def _integer_format(weights: Mapping[str, Any], bits: int, strategy: Any, activation_bits: int) -> Format:
    if not 2 <= bits <= 8:
        raise unsupported(f"compressed-tensors with {bits}-bit integers; supported are 2 to 8 bits")
    if strategy not in ("group", "channel", "tensor"):
        raise unsupported(f"compressed-tensors with integer strategy {strategy!r:.40}; use group, channel or tensor")
    size = group_size(weights) if strategy == "group" else 0
    return Format(4 if bits <= 4 else 8, size, activation_bits, asymmetric=not weights.get("symmetric", True))


def _float_format(weights: Mapping[str, Any], bits: int, strategy: Any, activation_bits: int) -> Format:
    if bits != 8:
        raise unsupported(f"compressed-tensors with {bits}-bit floating-point numbers; only 8 bits are supported")
    rows, columns = 1, 0
    match strategy:
        case "tensor":
            rows = 0
        case "channel":
            pass
        case "group":
            columns = group_size(weights)
        case "block":
            rows, columns = block_size(weights.get("block_structure"))
        case _:
            raise unsupported(f"compressed-tensors with floating-point numbers of strategy {strategy!r:.40}")
    return Format(8, columns, activation_bits, floating=True, rows_per_scale=rows)


def _is_static(group: Mapping[str, Any]) -> bool:
    """True if the checkpoint has static scales of activations."""
    inputs = group.get("input_activations") or {}
    return bool(inputs) and not inputs.get("dynamic")


def _per_output(source: TensorSource, tensor: str, outputs: int, groups: int, dtypes: Sequence[torch.dtype]) -> Tensor:
    """Read a tensor ``[outputs, groups]``, which may be stored as ``[outputs]`` or as one value for all outputs."""
    shape = source.shape(tensor)
    if shape in ((), (1,), (1, 1)) and groups == 1:
        return read_tensor(source, tensor, *shape, dtypes=dtypes).reshape(1, 1).expand(outputs, 1)
    if shape == (outputs,) and groups == 1:
        return read_tensor(source, tensor, outputs, dtypes=dtypes)[:, None]
    return read_tensor(source, tensor, outputs, groups, dtypes=dtypes)
