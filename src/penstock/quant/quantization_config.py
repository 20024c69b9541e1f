"""Finds the format of a quantized checkpoint by its ``quantization_config``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.core import Code, PenstockError

from .awq import AWQ
from .bitsandbytes import BitsAndBytes
from .checkpoint_format import CheckpointFormat
from .compressed_tensors import CompressedTensors
from .config_fields import mapping
from .fp8 import FP8
from .gptq import GPTQ
from .mxfp4 import MXFP4

METHODS: dict[str, Callable[[Mapping[str, Any]], CheckpointFormat]] = {
    "awq": AWQ,
    "gptq": GPTQ,
    "compressed-tensors": CompressedTensors,
    "fp8": FP8,
    "fbgemm_fp8": FP8,
    "bitsandbytes": BitsAndBytes,
    "mxfp4": MXFP4,
}
"""The format of each ``quant_method``."""


def read_quantization_config(config: Any) -> CheckpointFormat:
    """The format that a ``quantization_config`` describes.

    Raises ``PenstockError``: ``unsupported`` for a format, or a variant of it, that is not read; ``invalid`` where the
    description is broken.
    """
    config = mapping(config, "quantization_config")
    method = config.get("quant_method")
    if method is None and (config.get("load_in_4bit") or config.get("load_in_8bit")):
        method = "bitsandbytes"  # of transformers before 4.35
    if not isinstance(method, str) or method not in METHODS:
        words = f"checkpoints quantized as {method!r:.60} (quant_method) are not read; known are {', '.join(METHODS)}"
        raise PenstockError(Code.UNSUPPORTED, words, "model")
    return METHODS[method](config)
