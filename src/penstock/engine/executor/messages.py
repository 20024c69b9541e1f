"""What an executor and its worker processes say to each other."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from penstock.config.options import EngineOptions, LogOptions
from penstock.core import Failure

from ..step import DeviceMemory, LoadLoRA, MemoryProfile, ModelInfo, Propose, StepInput, StepOutput, UnloadLoRA, decoder
from .ring import Descriptors


class Start(msgspec.Struct, frozen=True):
    """What a worker process reads on its standard input."""

    options: EngineOptions
    logs: LogOptions | None
    inbox: Descriptors
    outbox: Descriptors
    parent: int
    """The executor's process."""


class Load(msgspec.Struct, tag=True): ...


class Profile(msgspec.Struct, tag=True): ...


class InitCache(msgspec.Struct, tag=True):
    blocks: int
    host_blocks: int


class Step(msgspec.Struct, tag=True):
    """``Masks`` follows where the step is masked."""

    step: StepInput


class Masks(msgspec.Struct, tag=True):
    bits: np.ndarray


class Call(msgspec.Struct, tag=True):
    number: int
    op: Propose | LoadLoRA | UnloadLoRA | DeviceMemory


class Close(msgspec.Struct, tag=True):
    """End the process."""


class Failed(msgspec.Struct, tag=True):
    """Something went wrong; the worker's log has the whole of it where it is no ``PenstockError``."""

    words: str
    failure: Failure | None = None


class Computed(msgspec.Struct, tag=True):
    """A step's output, or ``failed``."""

    output: StepOutput | None = None
    failed: Failed | None = None


class Started(msgspec.Struct, tag=True):
    """The answer to ``Load``, ``Profile`` and ``InitCache``."""

    info: ModelInfo | None = None
    profile: MemoryProfile | None = None
    failed: Failed | None = None


class Answer(msgspec.Struct, tag=True):
    """The answer to ``Call``."""

    number: int
    value: list[list[int]] | int | None = None
    failed: Failed | None = None


ToWorker = Load | Profile | InitCache | Step | Masks | Call | Close
FromWorker = Computed | Started | Answer
to_worker: msgspec.msgpack.Decoder[Any] = decoder(ToWorker)
from_worker: msgspec.msgpack.Decoder[Any] = decoder(FromWorker)
