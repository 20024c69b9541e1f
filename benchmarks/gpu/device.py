"""Properties of the device, and its measured bandwidth and rates of matrix products."""

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
    return {"properties": properties(device), "limits": limits(scale, device)}


def properties(device: torch.device) -> dict[str, Any]:
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
    cuda = torch.cuda.get_device_properties(device)
    found |= {
        "device": cuda.name,
        "capability": f"{cuda.major}.{cuda.minor}",
        "multiprocessors": cuda.multi_processor_count,
        "memory": cuda.total_memory,
        "l2": cuda.L2_cache_size,
        "cuda": torch.version.cuda,
    }
    fields = "driver_version,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "-i", str(device.index or 0)]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
        found |= dict(zip(fields.split(","), output.split(", "), strict=False))
    except (OSError, subprocess.SubprocessError) as error:
        found["nvidia-smi"] = str(error)
    return found


def limits(scale: Scale, device: torch.device) -> dict[str, float]:
    """Bytes per second of a copy (read plus written), and operations per second of square matrix products with cuBLAS;
    unsupported dtypes are missing."""
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
