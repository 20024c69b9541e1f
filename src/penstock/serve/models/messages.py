"""Messages between the supervisor and its API processes, one JSON document a line.

The module imports nothing else of the server, so that the supervisor does not load Starlette and uvicorn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.config.options import Configuration, ServerOptions
from penstock.core import Failure
from penstock.engine.service.control import ModelAction
from penstock.engine.service.instance import Instance

EXIT_MISCONFIGURED = 2
"""Exit status of an API process whose configuration is wrong: a restart would not help."""
ALIVE_INTERVAL = 0.5
"""Seconds between two reports of an API process that its event loop runs."""
DEFAULT_NAME = "default"
INSTANCES = "instances"
"""In place of an engine's address: the instances of a router."""
ANY_MODEL = (DEFAULT_NAME, "null", "dummy", "tgi")
"""Names that clients may use for the first model, whatever it is called: ``huggingface_hub`` sends ``dummy`` where none
is given, and Text Generation Inference, which ignores the name, has ``tgi`` in its documents."""


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of the supervisor's list: a model that the server serves or can load."""

    names: tuple[str, ...]
    """Names that clients use for it (``--served-model-name``); the first is in its answers."""
    configuration: Configuration
    """Its ``engine.model`` is a local folder once the model is loaded."""
    kserve: Mapping[str, str]
    """Models of the KServe v2 protocol over it: name → kind (``ensemble``, ``tensorrt_llm`` …)."""
    required: bool = True
    """Whether the server is ready only with it: it was loaded at the start or by a client, and not unloaded since."""
    engines: tuple[str, ...] = ()
    """Addresses of its engines, one for each data-parallel replica; ``INSTANCES`` for those of a router. Empty while it
    is not loaded."""
    instances: tuple[Instance, ...] = ()
    """Instances that answer its requests, or compute prompts for them."""
    draining: bool = False
    """Whether it is being unloaded: open requests finish, new ones are refused."""
    reason: str = "not loaded"
    """Why it is not served, for errors and the repository index."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def engine(self) -> str:
        """Address of the first engine, by which messages name the loaded model; empty while it is not loaded."""
        return self.engines[0] if self.engines else ""

    @property
    def expected(self) -> bool:
        """Whether it is served, or is being loaded."""
        return not self.draining and (self.required or bool(self.engine))


class ApiProcessStart(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to an API process."""

    parent: int
    """Process id of the supervisor; the API process dies with it."""
    number: int
    """Index of the API process, from 0."""
    configuration: Configuration
    sockets: tuple[int, ...]
    """File descriptors of listening sockets: the first serves every path (unless ``port`` is -1), the others health
    and metrics only."""
    grpc_address: str = ""
    """Host and port to serve gRPC on, which the supervisor has reserved; empty for none."""

    @property
    def options(self) -> ServerOptions:
        return self.configuration.server


class Models(msgspec.Struct, frozen=True, tag=True):
    """To the API processes: all models, in the order of the command line. A request that names no model gets the first
    that is served."""

    models: tuple[ModelEntry, ...]


class Done(msgspec.Struct, frozen=True, tag=True):
    """To an API process: the ``Load``, ``Unload`` or ``Operate`` of this number has ended."""

    number: int
    failure: Failure | None = None


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Acknowledgement: this process now serves the model of ``engine``; without one, it accepts requests."""

    engine: str = ""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """This process cannot serve the model of ``engine``."""

    engine: str
    failure: Failure


class Drained(msgspec.Struct, frozen=True, tag=True):
    """This process has no open request left for the model of ``engine``, which is being unloaded."""

    engine: str


class Alive(msgspec.Struct, frozen=True, tag=True):
    """The event loop of this process runs; sent every ``ALIVE_INTERVAL``."""


class Load(msgspec.Struct, frozen=True, tag=True):
    """A client asks to load a model."""

    number: int
    name: str


class Unload(msgspec.Struct, frozen=True, tag=True):
    """A client asks to unload a model."""

    number: int
    name: str


class Operate(msgspec.Struct, frozen=True, tag=True):
    """A client asks for an operation on the engines of a model."""

    number: int
    name: str
    operation: ModelAction


class Register(msgspec.Struct, frozen=True, tag=True):
    """An instance says that it is there, or that it leaves."""

    number: int
    name: str
    """By which one instance is told from others: it has another one each time it starts."""
    engines: tuple[str, ...]
    """Addresses of its engines, as host:port."""
    leaves: bool = False


ToApiProcess = Models | Done
FromApiProcess = Alive | Ready | Failed | Drained | Load | Unload | Operate | Register
decode_to_api_process: Any = msgspec.json.Decoder(ToApiProcess).decode
decode_from_api_process: Any = msgspec.json.Decoder(FromApiProcess).decode


def line(message: msgspec.Struct) -> bytes:
    return msgspec.json.encode(message) + b"\n"
