"""``penstock shims``: create wrapper commands (shims) with the names of other systems' commands.

The package installs only ``penstock``, so that it does not conflict with other installed systems.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.core.errors import invalid
from penstock.core.spelling import did_you_mean

MARK = "written by `penstock shims`"
"""Text in all shims, by which ``penstock shims`` recognizes them."""
MODULES = "modules"
"""Folder of Python modules, for ``PYTHONPATH``."""
IMPORTS = """\
from importlib import import_module

NAMES = {names}


def __getattr__(name):
    if name not in NAMES:
        raise AttributeError(f"module {{__name__!r}} has no attribute {{name!r}}; it has {{', '.join(NAMES)}}")
    try:
        return getattr(import_module(NAMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "penstock":
            raise
        raise ImportError("penstock is not installed in this Python; run " + {interpreter}) from error
"""
"""Source of a module that exports names. It imports them on first use, so that other modules of its package start
fast."""
MAX_SHEBANG = 120
"""Maximum characters of an interpreter path after ``#!`` on all Linux kernels."""


@dataclass(frozen=True)
class Shim:
    """A wrapper file: a command, or a Python module.

    Args:
        system: system of the original command or module.
        path: path in the output folder. Commands are at the top level or in folders of the other system; modules are in
            ``modules``.
        module: module of ``penstock.cli`` to run.
        arguments: arguments inserted before the arguments of the command line.
        compat: profile for ``PENSTOCK_COMPAT``, if no argument selects it.
        names: for a module that only re-exports names: Penstock's module of each name.
    """

    system: str
    path: str
    module: str
    arguments: tuple[str, ...]
    compat: str = ""
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def command(self) -> list[str]:
        """Command that the file runs; ``-P`` keeps the current folder out of ``sys.path``."""
        profile = ["env", f"PENSTOCK_COMPAT={self.compat}"] if self.compat else []
        return [*profile, sys.executable, "-P", "-m", f"penstock.cli.{self.module}", *self.arguments]

    @property
    def about(self) -> str:
        """Description: the command it runs, or the names it exports."""
        if self.names:
            package = self.path[len(MODULES) + 1 : -len(".py")].removesuffix("/__init__").replace("/", ".")
            return f"from {package} import {', '.join(self.names)}"
        program = "penstock" if self.module == "main" else f"python -m penstock.cli.{self.module}"
        profile = [f"PENSTOCK_COMPAT={self.compat}"] if self.compat else []
        return shlex.join([*profile, *program.split(), *self.arguments])

    @property
    def text(self) -> str:
        if self.names:
            interpreter = repr(sys.executable)
            return f"# {self.path}, {MARK}\n{IMPORTS.format(names=dict(self.names), interpreter=interpreter)}"
        if not self.path.endswith(".py"):
            return f'#!/bin/sh\n# {self.path}, {MARK}\nexec {shlex.join(self.command)} "$@"\n'
        runs = ", ".join(map(repr, self.command))
        fits = len(sys.executable) <= MAX_SHEBANG and " " not in sys.executable
        # Any Python can run the file, as os.execv starts sys.executable.
        interpreter = sys.executable if fits else "/usr/bin/env python3"
        lines = [f"#!{interpreter}", f"# {self.path}, {MARK}", "import os", "import sys", ""]
        return "\n".join([*lines, f"os.execv({sys.executable!r}, [{runs}, *sys.argv[1:]])", ""])


def _serving(system: str, *paths: str) -> list[Shim]:
    return [Shim(system, path, "main", ("serve", "--compat", system)) for path in paths]


def _running(system: str, module: str, *paths: str) -> list[Shim]:
    """Commands implemented by ``penstock.cli.compat.MODULE``, which gets the command's name as first argument."""
    return [Shim(system, path, f"compat.{module}", (path.rpartition("/")[2],)) for path in paths]


def _importing(system: str, path: str, module: str, *names: str) -> Shim:
    """Shim that is a Python module and re-exports ``names`` of Penstock's ``module``."""
    return Shim(system, f"{MODULES}/{path}.py", module, (), names=dict.fromkeys(names, module))


VLLM_NAMES = {
    "beam_search": "BeamSearchOutput BeamSearchSequence",
    "engine/arg_utils": "AsyncEngineArgs EngineArgs",
    "engine/async_llm_engine": "AsyncLLMEngine",
    "engine/llm_engine": "LLMEngine",
    "entrypoints/llm": "LLM",
    "inputs": "EmbedsPrompt PromptType TextPrompt TokensPrompt",
    "lora/request": "LoRARequest",
    "outputs": (
        "ClassificationOutput ClassificationRequestOutput CompletionOutput EmbeddingOutput EmbeddingRequestOutput "
        "PoolingOutput PoolingRequestOutput RequestOutput ScoringOutput ScoringRequestOutput"
    ),
    "pooling_params": "PoolingParams",
    "sampling_params": "BeamSearchParams GuidedDecodingParams RequestOutputKind SamplingParams StructuredOutputsParams",
    "utils/argparse_utils": "FlexibleArgumentParser",
    "v1/engine/async_llm": "AsyncLLM",
    "v1/engine/llm_engine": "LLMEngine",
    "v1/metrics/reader": "Counter Gauge Histogram Metric Vector",
}
"""Names of Penstock by vLLM's module that has them."""
VLLM_TOP_LEVEL = (
    "AsyncEngineArgs AsyncLLMEngine EngineArgs LLM LLMEngine PoolingParams PromptType SamplingParams TextPrompt "
    f"TokensPrompt {VLLM_NAMES['outputs']}"
)


def _vllm_modules(system: str) -> list[Shim]:
    modules = {"__init__": VLLM_TOP_LEVEL, **VLLM_NAMES}
    return [_importing(system, f"vllm/{path}", "penstock", *names.split()) for path, names in modules.items()]


FASTDEPLOY = "penstock.frontend.fastdeploy"
VLLM = [f"{MODULES}/vllm/entrypoints/{module}.py" for module in ("openai/api_server", "api_server")]
SHIMS = [
    *_serving("triton", "tritonserver", "launch_triton_server.py"),
    *_serving("triton", "tensorrtllm_backend/scripts/launch_triton_server.py"),
    *_running("triton", "fill_template", "fill_template.py", "tensorrtllm_backend/tools/fill_template.py"),
    *_running("triton", "trtllm", "convert_checkpoint.py", "quantize.py", "trtllm-build"),
    *_running("triton", "trtllm", "TensorRT-LLM/examples/qwen/convert_checkpoint.py"),
    *_running("triton", "trtllm", "TensorRT-LLM/examples/quantization/quantize.py"),
    *_running("paddlenlp", "paddlenlp", "start_server", "stop_server", "download_model.py"),
    *_serving("bladellm", "blade_llm_server"),
    *_running("bladellm", "bladellm", "blade_llm_quantize", "blade_llm_split"),
    *_serving("fastdeploy", f"{MODULES}/fastdeploy/entrypoints/openai/api_server.py"),
    Shim(
        "fastdeploy",
        f"{MODULES}/fastdeploy/router/launch.py",
        "main",
        ("serve", "--compat", "fastdeploy", "--role", "router"),
    ),
    _importing("fastdeploy", "fastdeploy/__init__", FASTDEPLOY, "LLM", "SamplingParams"),
    _importing("fastdeploy", "fastdeploy/entrypoints/llm", FASTDEPLOY, "LLM"),
    _importing("fastdeploy", "fastdeploy/engine/sampling_params", FASTDEPLOY, "SamplingParams"),
    Shim("vllm", "vllm", "compat.vllm", (), "vllm"),
    *_serving("vllm", *VLLM),
    *_vllm_modules("vllm"),
    *_vllm_modules("ascend-vllm"),
    *_serving("ascend-vllm", *VLLM, "llm_tools/PD_separate/start_servers.sh"),
    Shim("ascend-vllm", "llm_tools/PD_separate/pd_ranktable_tools.py", "main", ("ranktable",)),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", type=Path, metavar="DIR", help="output folder, created if it is missing")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"system ({', '.join(_systems())}) or command (default: all)"
    )
    parser.add_argument("--list", action="store_true", help="list wrapper commands and the commands they run")
    parser.add_argument("--force", action="store_true", help="also overwrite files not written by penstock shims")


def run(args: argparse.Namespace) -> int:
    """Write the shims, and print shell code that sets the search paths: ``eval "$(penstock shims DIR)"``."""
    names = args.names
    if args.list:
        for shim in _chosen([*([str(args.folder)] if args.folder else []), *names]):
            print(f"{shim.system:<12} {shim.path:<55} {shim.about}")
        return 0
    if args.folder is None:
        raise invalid("DIR", "is missing: give an output folder, or --list")
    folder, shims = args.folder.absolute(), _chosen(names)
    write(folder, shims, force=args.force)
    print(f"# {len(shims)} files in {folder}")
    if any("/" not in shim.path for shim in shims):
        print(f"export PATH={shlex.quote(str(folder))}:$PATH")
    if any(shim.path.startswith(f"{MODULES}/") for shim in shims):
        print(f"export PYTHONPATH={shlex.quote(str(folder / MODULES))}${{PYTHONPATH:+:$PYTHONPATH}}")
    return 0


def write(folder: Path, shims: Iterable[Shim], *, force: bool = False) -> None:
    """Write all files, or none.

    Raises ``PenstockError`` (``invalid``) if a file cannot be written, or exists and was not written by this command.
    """
    files = {folder / shim.path: shim.text for shim in shims}
    try:
        for file in files:
            if (
                not force
                and os.path.lexists(file)
                and not (file.is_file() and MARK in file.read_text("utf-8", "replace"))
            ):
                raise invalid("DIR", f"{file} exists and was not {MARK}: give another folder, or --force")
        for file, text in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.unlink(missing_ok=True)  # do not write to the target of a symbolic link
            file.write_text(text, encoding="utf-8")
            file.chmod(0o755)
    except OSError as error:
        raise invalid("DIR", f"cannot write to {error.filename or folder} ({error.strerror})") from error


def _systems() -> list[str]:
    return list(dict.fromkeys(shim.system for shim in SHIMS))


def _chosen(names: Sequence[str]) -> list[Shim]:
    """Shims of the named systems and commands, or all. If several shims have the same path, only the first is returned.

    Raises ``PenstockError`` (``invalid``) for an unknown name.
    """
    result: dict[str, Shim] = {}
    for name in names or _systems():
        matching = [shim for shim in SHIMS if name in (shim.system, shim.name, shim.path)]
        if not matching:
            known = {*_systems(), *(shim.name for shim in SHIMS)}
            raise invalid("NAME", f"{name!r} is neither a system nor a command, see --list{did_you_mean(name, known)}")
        for shim in matching:
            result.setdefault(shim.path, shim)
    return list(result.values())
