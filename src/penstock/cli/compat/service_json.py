"""``--service-json``: the service description of Alibaba's EAS, JSON with comments."""

from __future__ import annotations

import argparse
import logging
import os
import re
import shlex
from pathlib import Path
from typing import Any

import msgspec

from penstock.config.profiles.bladellm import PROFILE
from penstock.core.errors import invalid

from ..parser import Parser

logger = logging.getLogger(__name__)

COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*')
"""Comments; ``//`` within strings is not one."""
COMMANDS = (["blade_llm_server"], ["penstock", "serve"])
MIB = 2**20


class Container(msgspec.Struct, kw_only=True):
    command: str
    port: int
    image: str = ""


class Bucket(msgspec.Struct, kw_only=True):
    path: str
    endpoint: str = ""


class EmptyFolder(msgspec.Struct, kw_only=True):
    medium: str = ""
    size_limit: float = 0
    """GiB."""


class Storage(msgspec.Struct, kw_only=True):
    mount_path: str
    oss: Bucket | None = None
    empty_dir: EmptyFolder | None = None


class Metadata(msgspec.Struct, kw_only=True):
    instance: int = 1
    cpu: int = 0
    memory: int = 0
    """MiB."""
    gpu: int | None = None
    resource: str = ""


class Document(msgspec.Struct, kw_only=True):
    name: str
    containers: list[Container]
    storage: list[Storage] = []
    metadata: Metadata = msgspec.field(default_factory=Metadata)


def expand_arguments(arguments: list[str]) -> list[str]:
    """The arguments of ``penstock serve`` with ``--service-json`` replaced by the flags of its document, before all
    others, which override them.

    Raises ``PenstockError`` (``invalid``) where the document cannot be read, contradicts itself or needs a folder that
    does not exist.
    """
    parser = Parser(prog="penstock serve", add_help=False, allow_abbrev=False)
    parser.add_argument("--service-json", "--service_json")
    result, rest = parser.parse_known_args(arguments[1:])
    if result.service_json is None:
        return arguments
    return [arguments[0], *_arguments(_read(Path(result.service_json))), *rest]


def _read(path: Path) -> Document:
    try:
        text = COMMENT.sub(lambda match: match[1] or "", path.read_text(encoding="utf-8"))
        given: Any = msgspec.json.decode(text)
        result = msgspec.convert(given, Document)
    except (OSError, ValueError) as error:
        raise invalid("service_json", f"{path} cannot be used: {error}") from error
    parts = [("", given, Document), ("metadata.", given.get("metadata", {}), Metadata)]
    parts += [("containers[0].", container, Container) for container in given["containers"][:1]]
    for where, part, schema in parts:
        for name in part.keys() - set(schema.__struct_fields__):
            _log_ignored(f"{where}{name}", "it is for EAS")
    return result


def _arguments(document: Document) -> list[str]:
    if len(document.containers) != 1:
        raise invalid("service_json", f"has {len(document.containers)} containers, and one can be served")
    (container,) = document.containers
    try:
        arguments = shlex.split(container.command)
    except ValueError as error:
        raise invalid("service_json", f"containers[0].command cannot be read: {error}") from error
    begin = next((begin for begin in COMMANDS if arguments[: len(begin)] == begin), None)
    if begin is None:
        raise invalid("service_json", f"containers[0].command is {container.command!r}, and blade_llm_server is known")
    arguments = arguments[len(begin) :]
    known, _ = _options().parse_known_args(arguments)
    if known.port != container.port:
        raise invalid("service_json", f"containers[0].port is {container.port}, and its command's --port {known.port}")
    if container.image:
        _log_ignored("containers[0].image", "no image is started")
    for storage in document.storage:
        _check(storage)
    limits = _limits(document.metadata, known.model, known.max_gpu_memory_utilization)
    return ["--compat", PROFILE.name, "--served-model-name", document.name, *limits, *arguments]


def _options() -> argparse.ArgumentParser:
    """Options of the command line on which other fields of the document depend."""
    parser = Parser(prog="penstock serve: containers[0].command", add_help=False, allow_abbrev=False)
    parser.add_argument("--port", type=int, default=PROFILE.defaults["port"])
    parser.add_argument("--model", default="")
    share = PROFILE.defaults["kv_cache_free_memory_fraction"]
    names = ("--max_gpu_memory_utilization", "--max-gpu-memory-utilization")
    parser.add_argument(*names, type=float, default=share)
    return parser


def _check(storage: Storage) -> None:
    path = Path(storage.mount_path)
    if storage.empty_dir is None:
        if not path.exists():
            source = storage.oss.path if storage.oss else "its storage"
            raise invalid("service_json", f"{path} is not there; put what {source} has into it, or mount it there")
    elif not path.exists():
        _log_ignored(f"storage {path}", "there is no such folder, and nothing here needs it")
    elif (free := os.statvfs(path)).f_frsize * free.f_blocks < storage.empty_dir.size_limit * 2**30:
        _log_ignored(f"storage {path}", f"it has less than the {storage.empty_dir.size_limit:g} GiB asked for")


def _limits(metadata: Metadata, model: str, share: float) -> list[str]:
    """Flags that limit the server to the service's resources."""
    result = []
    cores = len(os.sched_getaffinity(0))
    if metadata.cpu > cores:
        _log_ignored("metadata.cpu", f"{metadata.cpu} cores are asked for, and {cores} are here")
    elif metadata.cpu:
        result += ["--threads", str(metadata.cpu)]
    if metadata.gpu == 0:
        result += ["--device", "cpu"]
    if metadata.memory:
        result += _memory(metadata, model, share)
    if metadata.instance > 1:
        _log_ignored("metadata.instance", "one server is one instance: start as many behind a load balancer")
    if (metadata.gpu or 0) > 1:
        _log_ignored("metadata.gpu", "--tensor_parallel_size says how many ranks compute a model")
    if metadata.resource:
        _log_ignored("metadata.resource", "it is a group of machines of EAS")
    return result


def _memory(metadata: Metadata, model: str, share: float) -> list[str]:
    """Flags for the memory limit. Where weights and KV cache share the host's memory, the cache gets a share of what
    the weights leave."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if metadata.gpu != 0:
        _log_ignored("metadata.memory", "with a GPU it does not limit the KV cache")
    elif metadata.memory * MIB > machine:
        _log_ignored("metadata.memory", f"{metadata.memory} MiB are asked for, and {machine // MIB} are here")
    else:
        weights = sum(file.stat().st_size for file in Path(model).glob("*.safetensors")) if model else 0
        return ["--kv-cache-memory-bytes", str(max(int((metadata.memory * MIB - weights) * share), 1))]
    return []


def _log_ignored(name: str, why: str) -> None:
    logger.warning("%s of the service has no meaning here and is ignored: %s", name, why)
