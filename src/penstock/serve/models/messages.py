"""Messages between the supervisor and its API processes, one JSON document per line.

This module imports nothing else of the server, so that the supervisor does not load Starlette and uvicorn.
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
"""Exit status of an API process with a wrong configuration: a restart would not help."""
ALIVE_INTERVAL = 0.5
"""Seconds between ``Alive`` messages."""
DEFAULT_NAME = "default"
INSTANCES = "instances"
"""Placeholder for the engine addresses of a router, which sends requests to instances."""
ANY_MODEL = (DEFAULT_NAME, "null", "dummy", "tgi")
"""Aliases of the first model: ``huggingface_hub`` sends ``dummy`` by default, and the documentation of Text Generation
Inference, which ignores the name, uses ``tgi``."""


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A model that the server serves or can load."""

    names: tuple[str, ...]
    """Names of the model (``--served-model-name``); the first is used in answers."""
    configuration: Configuration
    """Configuration; ``engine.model`` is a local folder once the model is loaded."""
    kserve: Mapping[str, str]
    """Kind (``ensemble``, ``tensorrt_llm``, ...) of each KServe v2 model based on this model, by name."""
    required: bool = True
    """True if readiness requires the model: it was loaded at startup or by a client, and not unloaded since."""
    engines: tuple[str, ...] = ()
    """Addresses of the engines, one per data-parallel replica, or ``INSTANCES`` in a router. Empty: not loaded."""
    instances: tuple[Instance, ...] = ()
    """Remote instances that answer requests for the model, or compute their prompts."""
    unloaded: bool = False
    """True while the engine processes are ended because the model was idle; the next request loads them."""
    load_failure: Failure | None = None
    """Reason why the last load of the unloaded model for a request failed; None: it has not failed."""
    keep_alive: float | None = None
    """Seconds without a request after which the model is unloaded; None: never."""
    draining: bool = False
    """True while the model is being unloaded: open requests finish, new requests are rejected."""
    reason: str = "not loaded"
    """Reason why the model is not served, for errors and the repository index."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def engine(self) -> str:
        """Address of the first engine, which identifies the loaded model in messages; empty if not loaded."""
        return self.engines[0] if self.engines else ""

    @property
    def may_unload(self) -> bool:
        """True if the model may be unloaded while it is idle: no router or other node depends on its engines."""
        engine = self.configuration.engine
        return engine.role == "mixed" and engine.nnodes == 1 and not (engine.engine_address or self.instances)

    @property
    def expected(self) -> bool:
        """True if the model is served or being loaded."""
        return not self.draining and (self.required or bool(self.engine))


class ApiProcessStart(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to an API process."""

    parent: int
    """Process id of the supervisor; the API process dies with it."""
    number: int
    """Index of the API process, from 0."""
    place: str = ""
    """Random name, which is the same for the process and its successors after restarts."""
    configuration: Configuration
    sockets: tuple[int, ...]
    """File descriptors of listening sockets: the first socket serves every path (unless ``port`` is -1), the other
    sockets serve health and metrics only."""
    grpc_address: str = ""
    """Host and port for gRPC, reserved by the supervisor; empty: no gRPC."""

    @property
    def options(self) -> ServerOptions:
        return self.configuration.server


class Models(msgspec.Struct, frozen=True, tag=True):
    """To API processes: all models, in the order of the command line. A request without a model uses the first served
    model."""

    models: tuple[ModelEntry, ...]


class Done(msgspec.Struct, frozen=True, tag=True):
    """To an API process: the ``Request`` with this number has ended."""

    number: int
    failure: Failure | None = None


class Ready(msgspec.Struct, frozen=True, tag=True):
    """To the supervisor: this process sends requests to the engine with this address; empty: this process accepts
    requests."""

    engine: str = ""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """To the supervisor: this process cannot serve the model of ``engine``."""

    engine: str
    failure: Failure


class Drained(msgspec.Struct, frozen=True, tag=True):
    """To the supervisor: this process has no open requests for the model of ``engine``, which is being unloaded."""

    engine: str


class Alive(msgspec.Struct, frozen=True, tag=True):
    """To the supervisor: the event loop of this process runs. Sent every ``ALIVE_INTERVAL`` seconds."""


class Load(msgspec.Struct, frozen=True, tag=True):
    """To the supervisor: load a model."""

    number: int
    name: str


class Unload(msgspec.Struct, frozen=True, tag=True):
    """To the supervisor: unload a model."""

    number: int
    name: str


class Wake(msgspec.Struct, frozen=True, tag=True):
    """To the supervisor: load a model that was unloaded because it was idle, or do not unload it."""

    number: int
    name: str


class Idle(msgspec.Struct, frozen=True, tag=True):
    """To the supervisor: this process has had no request of a model for its keep-alive time: unload it if the other
    processes agree."""

    number: int
    name: str


class SetKeepAlive(msgspec.Struct, frozen=True, tag=True):
    """To the supervisor: change a model's keep-alive time (``ModelEntry.keep_alive``) until it is unloaded."""

    number: int
    name: str
    seconds: float | None


class Operate(msgspec.Struct, frozen=True, tag=True):
    """To the supervisor: execute an operation on the engines of a model."""

    number: int
    name: str
    operation: ModelAction


class Register(msgspec.Struct, frozen=True, tag=True):
    """To the supervisor: register or deregister an instance."""

    number: int
    name: str
    """Identifier of the instance, different after each start."""
    engines: tuple[str, ...]
    """Addresses of the instance's engines, as host:port."""
    leaves: bool = False


ToApiProcess = Models | Done
Request = Load | Unload | Wake | Idle | SetKeepAlive | Operate | Register
"""Requests to the supervisor, answered by ``Done``."""
FromApiProcess = Alive | Ready | Failed | Drained | Request
decode_to_api_process: Any = msgspec.json.Decoder(ToApiProcess).decode
decode_from_api_process: Any = msgspec.json.Decoder(FromApiProcess).decode


def encode_line(message: msgspec.Struct) -> bytes:
    return msgspec.json.encode(message) + b"\n"
