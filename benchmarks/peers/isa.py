"""How peers are held to one of Penstock's instruction sets."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

ONEDNN = {
    "portable": "SSE41",
    "avx2": "AVX2",
    "avxvnni": "AVX2_VNNI",
    "avx512": "AVX512_CORE",
    "avx512bf16": "AVX512_CORE_BF16",
    "amx": "AVX512_CORE_AMX",
}
"""The value of ``ONEDNN_MAX_CPU_ISA`` for each; oneDNN has no code without SSE 4.1."""
FUNCTIONS = {
    "portable": "",
    "avx2": "avx avx2",
    "avxvnni": "avx avx2 avx2_vnni",
    "avx512": "avx avx2 avx512f avx512_core",
    "avx512bf16": "avx avx2 avx512f avx512_core avx512_core_vnni bfloat16",
    "amx": "avx avx2 avx2_vnni avx2_vnni_2 avx512f avx512_core avx512_core_vnni bfloat16 avx512_core_fp16 "
    "avx512_core_amx avx512_core_amx_int8 avx512_core_amx_bf16 avx512_core_amx_fp16",
}
"""What OpenVINO may find when it asks the processor itself; ``amx`` has all that it asks for."""
FEATURES = ("avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx_int8")
"""Of a processor, those that llama.cpp tells of its build and that set these sets apart."""
BUILDS: dict[str, set[str]] = {
    "portable": set(),
    "avx2": {"avx2"},
    "avxvnni": {"avx2", "avx_vnni"},
    "avx512": {"avx2", "avx512"},
    "avx512bf16": {"avx2", "avx512", "avx512_vnni", "avx512_bf16"},
    "amx": {"avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx_int8"},
}
"""What of it a build of llama.cpp must use, and no more, to stand beside each set."""


def check_llama_cpp(folder: Path, isa: str) -> str | None:
    """Why the build of llama.cpp in ``folder`` cannot stand beside ``isa``; none where it can."""
    library = folder / "build/bin/libggml-cpu.so"
    try:
        loaded = ctypes.CDLL(str(library))
        built = {feature for feature in FEATURES if getattr(loaded, f"ggml_cpu_has_{feature}")()}
    except (OSError, AttributeError) as error:
        return f"{folder}: what this llama.cpp was built for cannot be read from its shared library: {error}"
    if built == BUILDS[isa]:
        return None
    told = ", ".join(feature for feature in FEATURES if feature in built) or "none"
    wanted = ", ".join(feature for feature in FEATURES if feature in BUILDS[isa]) or "none"
    return f"{folder}: this llama.cpp was built for other instructions than {isa}, for {told} instead of {wanted}"


def hold_openvino(isa: str | None, work: Path) -> dict[str, str]:
    """The environment that holds OpenVINO to ``isa``.

    oneDNN and the code that OpenVINO generates itself go by ``ONEDNN_MAX_CPU_ISA``. Its compiled kernels and its choice
    of types go by functions of its own (``ov::with_cpu_x86_...``), in whose place a library in ``work`` says no.
    """
    if not isa:
        return {}
    hidden = set(FUNCTIONS["amx"].split()) - set(FUNCTIONS[isa].split())
    source = "".join(f"bool with_cpu_x86_{name}() {{ return false; }}\n" for name in sorted(hidden))
    library = (work / f"openvino-{isa}.so").absolute()
    work.mkdir(parents=True, exist_ok=True)
    compiler = [os.environ.get("CXX", "c++"), "-shared", "-fPIC", "-O1", "-x", "c++", "-", "-o", str(library)]
    subprocess.run(compiler, input=f"namespace ov {{\n{source}}}\n", text=True, check=True)
    preloaded = [str(library), *filter(None, [os.environ.get("LD_PRELOAD")])]
    return {"ONEDNN_MAX_CPU_ISA": ONEDNN[isa], "LD_PRELOAD": ":".join(preloaded)}
