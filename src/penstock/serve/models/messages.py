"""What the supervisor and its API processes tell each other, a JSON document a line. Apart, so that the supervisor need
not load what it serves with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.config.options import Configuration, ServerOptions
from penstock.core import Failure

WRONG = 2
"""Exit status of a worker that no other start would help."""
DEFAULT_NAME = "default"
ANY_MODEL = (DEFAULT_NAME, "null")
"""A model's name that every server knows: the first one's."""


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that a server has or could have."""

    names: tuple[str, ...]
    """Under which clients ask for it; the first is its own."""
    configuration: Configuration
    """Its model is a folder once it is loaded."""
    kserve: Mapping[str, str]
    """The models of the KServe v2 protocol over it: of which kind each is, by name."""
    wanted: bool = True
    """Whether the server is not ready without it: it is loaded at the start, or has been since, and not unloaded."""
    engine: str = ""
    """Its engine's address; nothing where it is not loaded."""
    leaving: bool = False
    """Whether it is being unloaded: what is open comes to its end, and nothing new begins."""
    reason: str = "not loaded"
    """Why it is not there."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def coming(self) -> bool:
        """Whether it is there, or will be."""
        return not self.leaving and (self.wanted or bool(self.engine))


class WorkerStart(msgspec.Struct, frozen=True, kw_only=True):
    """The first line to an API process."""

    parent: int
    """The process without which this one must not be."""
    number: int
    configuration: Configuration
    sockets: tuple[int, ...]
    """File descriptors to accept connections on: the first for everything, unless HTTP is off, others for how the
    server is doing."""
    grpc_address: str = ""
    """Host and port for gRPC, which the supervisor keeps free; nothing for none."""

    @property
    def options(self) -> ServerOptions:
        return self.configuration.server


class Models(msgspec.Struct, frozen=True, tag=True):
    """All there are, in the order in which they were given; the first one serving answers where nobody names one."""

    models: tuple[ServedModel, ...]


class Done(msgspec.Struct, frozen=True, tag=True):
    """What became of a ``Load`` or ``Unload``."""

    number: int
    failure: Failure | None = None


class Met(msgspec.Struct, frozen=True, tag=True):
    """This API process takes requests for the model whose engine has this address; without one, it takes requests."""

    engine: str = ""


class Unfit(msgspec.Struct, frozen=True, tag=True):
    """This API process cannot serve it."""

    engine: str
    failure: Failure


class Left(msgspec.Struct, frozen=True, tag=True):
    """What this API process had open for a model that is being unloaded has ended."""

    engine: str


class Load(msgspec.Struct, frozen=True, tag=True):
    """A client wants a model."""

    number: int
    name: str


class Unload(msgspec.Struct, frozen=True, tag=True):
    """A client wants it gone."""

    number: int
    name: str


ToWorker = Models | Done
FromWorker = Met | Unfit | Left | Load | Unload
decode_to_worker: Any = msgspec.json.Decoder(ToWorker).decode
decode_from_worker: Any = msgspec.json.Decoder(FromWorker).decode


def line(message: msgspec.Struct) -> bytes:
    return msgspec.json.encode(message) + b"\n"
