"""Models by the architecture that a checkpoint names."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import torch

from penstock.core.errors import invalid
from penstock.layers import Context, Weights
from penstock.ops import Ops
from penstock.quant import SCHEMES

from .adapter import Adapter, read_adapter
from .cache_folder import cache_folder
from .checkpoint import Checkpoint, Dummy
from .config import DecoderConfig, read_config
from .decoder import Decoder
from .weight_cache import WeightCache

logger = logging.getLogger(__name__)

__all__ = ["Adapter", "Decoder", "DecoderConfig", "cache_folder", "load_model", "read_adapter", "read_config"]


def load_model(
    folder: Path,
    ops: Ops,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    longest: int | None = None,
    load_format: Literal["auto", "safetensors", "dummy"] = "auto",
    seed: int = 0,
    quantization: str = "none",
    cache: Path | None = None,
    cache_size: float = 0.0,
    heads_ahead: bool = False,
    max_loras: int = 0,
) -> Decoder:
    """Build the model that a checkpoint describes.

    Args:
        dtype: to compute in; None is the checkpoint's own, but on a CPU bfloat16 in place of float16.
        longest: tokens a sequence may have; None is the model's own context, which it must not exceed.
        seed: of dummy weights.
        quantization: what the weights are rounded to, a name of ``SCHEMES``.
        cache: where packed weights are kept for the next start.
        cache_size: GiB that it may hold; 0 is a share of the disk.
        heads_ahead: whether to read the checkpoint's heads that guess ahead.
        max_loras: adapters that there may be at the same time.

    Raises ``PenstockError`` with one sentence where the checkpoint is broken or unknown.
    """
    config = read_config(folder)
    if longest and longest > config.context:
        raise invalid("max_model_len", f"this model has a context of {config.context} tokens", config.context)
    device = device or torch.device("cpu")
    if dtype is None and config.dtype is torch.float16 and device.type == "cpu":
        logger.info("the checkpoint is in float16, and is computed in bfloat16")
        dtype = torch.bfloat16
    dtype = dtype or config.dtype
    weights: Weights = Dummy(dtype, seed) if load_format == "dummy" else Checkpoint(folder)
    scheme, kept = SCHEMES[quantization], None
    if cache and load_format != "dummy" and device.type == "cpu":
        form = f"{ops.LAYOUT} {dtype} {scheme}{' heads' * heads_ahead}"
        kept = WeightCache(cache, folder, form, cache_size)
    context = Context(ops, weights, dtype, device, scheme=scheme, kept=kept, max_loras=max_loras)
    model = Decoder(context, config, longest or config.context, config.heads_ahead if heads_ahead else 0)
    if kept:
        kept.save()
    return model
