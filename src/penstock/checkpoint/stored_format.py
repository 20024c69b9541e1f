"""Format of the matrices of a quantized checkpoint, read from ``quantization_config``; exact enough for their size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core.quantization import MX_BLOCK, UNQUANTIZED, Format

QUANT_METHOD = "penstock"
"""``quant_method`` of a ``config.json`` that requests quantization at load; ``format`` names the scheme."""
BNB_BLOCK = 64
"""Number of weights that share a scale in the 4-bit format of bitsandbytes."""


NVFP4 = Format(8, 16)
"""Format to which the numbers of NVFP4 are converted (``quant/nvfp4.py``)."""


def stored_format(config: Any) -> Format:
    """The format of most matrices in the layers. ``UNQUANTIZED`` without quantization, and for unknown or broken
    configurations, which the engine refuses (``quant.read_quantization_config``)."""
    if not isinstance(config, Mapping):
        return UNQUANTIZED
    try:
        return _format(config)
    except (AttributeError, KeyError, StopIteration, TypeError, ValueError):
        return UNQUANTIZED


def _format(config: Mapping[str, Any]) -> Format:
    match config.get("quant_method"):
        case "awq":
            size = config.get("q_group_size") or config.get("group_size") or 128
            return Format(4, max(size, 0), asymmetric=True)
        case "gptq":
            bits = 4 if config["bits"] < 8 else 8
            return Format(bits, max(config.get("group_size") or 128, 0), asymmetric=not config.get("sym", True))
        case "compressed-tensors":
            groups = config["config_groups"].values()
            return _scheme(next(group["weights"] for group in groups if group.get("weights")))
        case "fp8" | "fbgemm_fp8":
            if config.get("expert_dtype") == "fp4":
                return Format(4, MX_BLOCK, floating=True)
            rows, columns = config.get("weight_block_size") or (1, 0)
            return Format(8, columns, 8, floating=True, rows_per_scale=rows)
        case "bitsandbytes":
            eight = config.get("load_in_8bit") or config.get("_load_in_8bit")
            return Format(8) if eight else Format(4, BNB_BLOCK, floating=True)
        case "modelopt_fp4":
            return NVFP4
        case "mxfp4":
            return Format(4, MX_BLOCK, floating=True)
        case _:
            return UNQUANTIZED


def _scheme(weights: Mapping[str, Any]) -> Format:
    """Format of a config group of compressed-tensors."""
    bits, size = weights.get("num_bits", 8), max(weights.get("group_size") or 0, 0)
    if weights.get("strategy") == "tensor_group":
        return NVFP4
    if weights.get("type", "int") != "float":
        return Format(4 if bits <= 4 else 8, size, asymmetric=not weights.get("symmetric", True))
    rows, columns = weights.get("block_structure") or (1, size)
    return Format(bits, columns, floating=True, rows_per_scale=rows)


def quantization_of(config: Mapping[str, Any]) -> str | None:
    """Scheme of the quantization at load that ``config.json`` requests; "": no quantization; None: the weights are
    already quantized."""
    found = quantization_config_of(config)
    if not found:
        return ""
    at_load = isinstance(found, Mapping) and found.get("quant_method") == QUANT_METHOD
    return str(found.get("format", "")) if at_load else None


def quantization_config_of(config: Mapping[str, Any]) -> Any:
    """``quantization_config`` of ``config.json``, in any spelling; None or empty without quantization."""
    # Early versions of compressed-tensors write ``compression_config``, or nest ``quantization_config``.
    found = config.get("quantization_config") or config.get("compression_config")
    if isinstance(found, Mapping) and isinstance(inner := found.get("quantization_config"), Mapping):
        return {**inner, "sparsity_config": found.get("sparsity_config")}
    if isinstance(found, Mapping) and config.get("expert_dtype"):  # DeepSeek-V4
        return {"expert_dtype": config["expert_dtype"], **found}
    return found
