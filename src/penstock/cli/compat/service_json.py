"""``--service-json``: translation of a service description of Alibaba Cloud EAS (JSON with comments) to flags."""

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
"""A comment, or a string (group 1), as ``//`` in a string does not begin a comment."""
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
    """Size in GiB."""


class Storage(msgspec.Struct, kw_only=True):
    mount_path: str
    oss: Bucket | None = None
    empty_dir: EmptyFolder | None = None


class Metadata(msgspec.Struct, kw_only=True):
    instance: int = 1
    cpu: int = 0
    memory: int = 0
    """Memory in MiB."""
    gpu: int | None = None
    resource: str = ""


class Document(msgspec.Struct, kw_only=True):
    name: str
    containers: list[Container]
    storage: list[Storage] = []
    metadata: Metadata = msgspec.field(default_factory=Metadata)


def expand_arguments(arguments: list[str]) -> list[str]:
    """Replace ``--service-json`` by the flags of its document, placed first so that other arguments override them.

    Raises ``PenstockError`` (``invalid``) if the document cannot be read, is inconsistent, or needs a folder that does
    not exist.
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
        raise invalid("service_json", f"{path} cannot be read: {error}") from error
    parts = [("", given, Document), ("metadata.", given.get("metadata", {}), Metadata)]
    parts += [("containers[0].", container, Container) for container in given["containers"][:1]]
    for where, part, schema in parts:
        for name in part.keys() - set(schema.__struct_fields__):
            _log_ignored(f"{where}{name}", "only EAS uses this field")
    return result


def _arguments(document: Document) -> list[str]:
    if len(document.containers) != 1:
        raise invalid("service_json", f"must have one container, has {len(document.containers)}")
    (container,) = document.containers
    try:
        arguments = shlex.split(container.command)
    except ValueError as error:
        raise invalid("service_json", f"containers[0].command cannot be read: {error}") from error
    begin = next((begin for begin in COMMANDS if arguments[: len(begin)] == begin), None)
    if begin is None:
        raise invalid("service_json", f"containers[0].command must run blade_llm_server, is {container.command!r}")
    arguments = arguments[len(begin) :]
    known, _ = _options().parse_known_args(arguments)
    if known.port != container.port:
        message = (
            f"containers[0].port is {container.port}, but --port of its command is {known.port}: set the same port"
        )
        raise invalid("service_json", message)
    if container.image:
        _log_ignored("containers[0].image", "no image is started")
    for storage in document.storage:
        _check(storage)
    limits = _limits(document.metadata, known.model, known.max_gpu_memory_utilization)
    return ["--compat", PROFILE.name, "--served-model-name", document.name, *limits, *arguments]


def _options() -> argparse.ArgumentParser:
    """Parser of the command's options on which other fields of the document depend."""
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
            source = storage.oss.path if storage.oss else "the service's storage"
            raise invalid("service_json", f"{path} does not exist: copy the content of {source} to it, or mount it")
    elif not path.exists():
        _log_ignored(f"storage {path}", "the folder does not exist and is not needed")
    elif (free := os.statvfs(path)).f_frsize * free.f_blocks < storage.empty_dir.size_limit * 2**30:
        _log_ignored(f"storage {path}", f"its disk is smaller than size_limit ({storage.empty_dir.size_limit:g} GiB)")


def _limits(metadata: Metadata, model: str, share: float) -> list[str]:
    """Flags that limit the server to the service's resources."""
    result = []
    cores = len(os.sched_getaffinity(0))
    if metadata.cpu > cores:
        _log_ignored("metadata.cpu", f"this machine has only {cores} of {metadata.cpu} cores")
    elif metadata.cpu:
        result += ["--threads", str(metadata.cpu)]
    if metadata.gpu == 0:
        result += ["--device", "cpu"]
    if metadata.memory:
        result += _memory(metadata, model, share)
    if metadata.instance > 1:
        _log_ignored("metadata.instance", "a server is one instance: start several servers and a load balancer")
    if (metadata.gpu or 0) > 1:
        _log_ignored("metadata.gpu", "--tensor_parallel_size sets the number of ranks")
    if metadata.resource:
        _log_ignored("metadata.resource", "it is a resource group of EAS")
    return result


def _memory(metadata: Metadata, model: str, share: float) -> list[str]:
    """Flags for the memory limit. On CPUs, the KV cache gets ``share`` (0 to 1) of the memory left by the weights."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if metadata.gpu != 0:
        _log_ignored("metadata.memory", "with a GPU it does not limit the KV cache")
    elif metadata.memory * MIB > machine:
        _log_ignored("metadata.memory", f"this machine has only {machine // MIB} of {metadata.memory} MiB")
    else:
        weights = sum(file.stat().st_size for file in Path(model).glob("*.safetensors")) if model else 0
        return ["--kv-cache-memory-bytes", str(max(int((metadata.memory * MIB - weights) * share), 1))]
    return []


def _log_ignored(name: str, why: str) -> None:
    logger.warning("%s of the service is ignored: %s", name, why)
