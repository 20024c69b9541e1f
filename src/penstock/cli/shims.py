"""``penstock shims``: writes files with the names of other systems' commands, which start Penstock's.

The package itself installs ``penstock`` alone, so that it takes no name from a system that is installed, too.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.config.settings import did_you_mean
from penstock.core.errors import invalid

MARK = "written by `penstock shims`"
"""In every file, by which ``penstock shims`` recognizes its own."""
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
"""Text of a module to import from. It loads a name when it is used, so that other modules of the package start fast."""
LONGEST = 120
"""Longest interpreter path that every Linux kernel accepts after ``#!``, characters."""


@dataclass(frozen=True)
class Shim:
    """One file.

    Args:
        system: the system whose command it replaces.
        path: below the folder: a command without folders in between, a module below ``modules``.
        module: module of ``penstock.cli`` that it runs.
        arguments: put before those on the command line.
        compat: profile, where no argument can select it.
        names: of a module to import from: name → module of this package that has it. It runs nothing.
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
        """The command that the file runs; ``-P`` keeps the current folder out of ``sys.path``."""
        profile = ["env", f"PENSTOCK_COMPAT={self.compat}"] if self.compat else []
        return [*profile, sys.executable, "-P", "-m", f"penstock.cli.{self.module}", *self.arguments]

    @property
    def about(self) -> str:
        """The command for display; of a module to import from, the names in it."""
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
        fits = len(sys.executable) <= LONGEST and " " not in sys.executable
        interpreter = sys.executable if fits else "/usr/bin/env python3"  # any will do: it runs the right one
        lines = [f"#!{interpreter}", f"# {self.path}, {MARK}", "import os", "import sys", ""]
        return "\n".join([*lines, f"os.execv({sys.executable!r}, [{runs}, *sys.argv[1:]])", ""])


def _serving(system: str, *paths: str) -> list[Shim]:
    return [Shim(system, path, "main", ("serve", "--compat", system)) for path in paths]


def _running(system: str, module: str, *paths: str) -> list[Shim]:
    """Commands that ``penstock.cli.compat.MODULE`` finds by their names."""
    return [Shim(system, path, f"compat.{module}", (path.rpartition("/")[2],)) for path in paths]


def _importing(system: str, path: str, module: str, *names: str) -> Shim:
    """A module to import names from."""
    return Shim(system, f"{MODULES}/{path}.py", module, (), names=dict.fromkeys(names, module))


def _vllm_modules(system: str) -> list[Shim]:
    return [
        _importing(system, "vllm/__init__", "penstock", "LLM", "PoolingParams", "SamplingParams"),
        _importing(system, "vllm/sampling_params", "penstock", "GuidedDecodingParams", "SamplingParams"),
        _importing(system, "vllm/lora/request", "penstock", "LoRARequest"),
    ]


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
    Shim("vllm", "vllm", "main", (), "vllm"),
    *_serving("vllm", *VLLM),
    *_vllm_modules("vllm"),
    *_vllm_modules("ascend-vllm"),
    *_serving("ascend-vllm", *VLLM, "llm_tools/PD_separate/start_servers.sh"),
    Shim("ascend-vllm", "llm_tools/PD_separate/pd_ranktable_tools.py", "main", ("ranktable",)),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", type=Path, metavar="DIR", help="to write to; made where it is not there")
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"of a system ({', '.join(_systems())}) or of a command; nothing for all",
    )
    parser.add_argument("--list", action="store_true", help="tell what there is, and what each starts")
    parser.add_argument("--force", action="store_true", help="overwrite files that others have written, too")


def run(args: argparse.Namespace) -> int:
    """Write the files and print shell code that sets the search paths: ``eval "$(penstock shims DIR)"``."""
    names = args.names
    if args.list:
        for shim in _chosen([*([str(args.folder)] if args.folder else []), *names]):
            print(f"{shim.system:<12} {shim.path:<55} {shim.about}")
        return 0
    if args.folder is None:
        raise invalid("DIR", "is missing: name the folder to write to, or ask for --list")
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

    Raises ``PenstockError`` (``invalid``) where a file is in the way that was not written here, or it cannot be done.
    """
    places = {folder / shim.path: shim.text for shim in shims}
    try:
        for place in places:
            if (
                not force
                and os.path.lexists(place)
                and not (place.is_file() and MARK in place.read_text("utf-8", "replace"))
            ):
                raise invalid("DIR", f"{place} is there and was not {MARK}: name another folder, or give --force")
        for place, text in places.items():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)  # what it leads to stays as it is
            place.write_text(text, encoding="utf-8")
            place.chmod(0o755)
    except OSError as error:
        raise invalid("DIR", f"cannot write to {error.filename or folder} ({error.strerror})") from error


def _systems() -> list[str]:
    return list(dict.fromkeys(shim.system for shim in SHIMS))


def _chosen(names: Sequence[str]) -> list[Shim]:
    """The shims of the named systems and commands, or all. Where two have the same path, the first one's.

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
