"""Selection of a checkpoint format by ``quantization_config``."""

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
from .nvfp4 import ModelOptNVFP4

METHODS: dict[str, Callable[[Mapping[str, Any]], CheckpointFormat]] = {
    "awq": AWQ,
    "gptq": GPTQ,
    "compressed-tensors": CompressedTensors,
    "fp8": FP8,
    "fbgemm_fp8": FP8,
    "bitsandbytes": BitsAndBytes,
    "mxfp4": MXFP4,
    "modelopt_fp4": ModelOptNVFP4,
}
"""``quant_method`` → reader of the checkpoint format."""


def read_quantization_config(config: Any) -> CheckpointFormat:
    """Return the checkpoint format for the ``quantization_config`` of ``config.json``.

    Raises ``PenstockError``: ``unsupported`` for an unsupported format or variant, ``invalid`` for malformed fields.
    """
    config = mapping(config, "quantization_config")
    method = config.get("quant_method")
    if method is None and (config.get("load_in_4bit") or config.get("load_in_8bit")):
        method = "bitsandbytes"  # transformers before 4.35 wrote no quant_method
    if not isinstance(method, str) or method not in METHODS:
        message = f"unsupported quant_method {method!r:.60} in config.json; supported are {', '.join(METHODS)}"
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    return METHODS[method](config)
