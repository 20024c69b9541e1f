"""Part of ``penstock doctor --report`` for bug reports: system, packages, GPUs and environment variables."""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from penstock.config.secrets import MASK, is_secret, mask

from .build_info import commit

PREFIXES = (
    *("PENSTOCK_", "VLLM_", "CUDA", "NVIDIA_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "TRITON_", "OMP_", "MKL_"),
    *("KMP_", "GOMP_", "HF_", "TRANSFORMERS_", "MODELSCOPE_", "RAY_", "OTEL_", "MALLOC_", "PYTHON"),
)
"""Prefixes of environment variables that can change how Penstock runs."""
NAMES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "LANG", "LC_ALL", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "XDG_CACHE_HOME")
DRIVER = Path("/proc/driver/nvidia/version")


def machine_report() -> dict[str, str | list[str]]:
    """Lines by name. Values of secret variables are masked."""
    import torch

    return {
        "commit": commit() or "unknown",
        "system": f"{_distribution()}, {platform.platform()}",
        "interpreter": f"{sys.executable} ({sys.version})",
        "memory size": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
        "cuda": f"{torch.version.cuda or 'none'} (PyTorch), driver {_driver()}",
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())] or ["none"],
        "packages": _packages(),
        "environment": _environment() or ["none"],
    }


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        return platform.system()


def _driver() -> str:
    text = DRIVER.read_text(errors="replace") if DRIVER.exists() else ""
    found = re.search(r"\s(\d+\.[\d.]+)\s", text)
    return found[1] if found else "none"


def _gpu(index: int) -> str:
    import torch

    gpu = torch.cuda.get_device_properties(index)
    return f"{index}: {gpu.name}, {gpu.total_memory / 2**30:.1f} GiB, compute capability {gpu.major}.{gpu.minor}"


def _packages() -> list[str]:
    """Installed packages that Penstock requires, with and without extras."""
    names = sorted({re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in requires("penstock-llm") or ()})
    result = []
    for name in names:
        try:
            result.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return result


def _shown(name: str, value: str) -> str:
    """Value of an environment variable without secrets."""
    if is_secret(name) or name.upper().endswith("_HEADERS"):  # OTEL_EXPORTER_OTLP_HEADERS has authorization headers
        return MASK if value else ""
    if name.upper().endswith("_PROXY") and "://" not in value:  # USER:PASSWORD@HOST:PORT
        return MASK + value[value.rindex("@") :] if "@" in value else value
    return mask(value)


def _environment() -> list[str]:
    return [
        f"{name}={_shown(name, value)}"
        for name, value in sorted(os.environ.items())
        if name.upper().startswith(PREFIXES) or name.upper() in NAMES
    ]
