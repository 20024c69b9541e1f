"""The device: what it is, and what it does at most, measured here."""

from __future__ import annotations

import platform
import subprocess
import sys
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from shapes import Scale
from timing import seconds

SIDE = 8192


def run(scale: Scale) -> dict[str, Any]:
    device = torch.device(scale.device)
    return {"facts": facts(device), "limits": limits(scale, device)}


def facts(device: torch.device) -> dict[str, Any]:
    import triton

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "machine": platform.machine(),
        "executable": sys.executable,
    }
    if device.type == "cpu":
        return found | {"device": "Triton's interpreter on a CPU"}
    properties = torch.cuda.get_device_properties(device)
    found |= {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory": properties.total_memory,
        "l2": properties.L2_cache_size,
        "cuda": torch.version.cuda,
    }
    fields = "driver_version,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "-i", str(device.index or 0)]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
        found |= dict(zip(fields.split(","), said.split(", "), strict=False))
    except (OSError, subprocess.SubprocessError) as error:
        found["nvidia-smi"] = str(error)
    return found


def limits(scale: Scale, device: torch.device) -> dict[str, float]:
    """Bytes a second of a copy (read and written), and operations a second of square products by cuBLAS; what the
    device does not have is missing."""
    side, count = (32, 1 << 12) if scale.interpret else (SIDE, 1 << 32)
    source = torch.empty(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found = {"copy": 2 * count / seconds(partial(target.copy_, source), device)}
    del source, target
    a = torch.randn(side, side, device=device)
    b = torch.randn(side, side, device=device)
    operations = 2 * side**3
    wide, narrow = a.to(torch.bfloat16), b.to(torch.bfloat16)
    found["bf16"] = operations / seconds(lambda: wide @ narrow.t(), device)
    whole = (a * 40).clamp(-127, 127).to(torch.int8), (b * 40).clamp(-127, 127).to(torch.int8)
    with suppress(RuntimeError):
        found["int8"] = operations / seconds(lambda: torch._int_mm(whole[0], whole[1].t()), device)
    with suppress(RuntimeError, AttributeError):
        one = torch.ones((), device=device)
        first, second = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)

        def scaled() -> object:
            return torch._scaled_mm(first, second.t(), one, one, out_dtype=torch.bfloat16)

        found["fp8"] = operations / seconds(scaled, device)
    return found
