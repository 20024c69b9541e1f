"""The options: every one with its type, default, unit and docstring, under the names that vLLM and others use.

Flags, configuration files and their documentation are generated from it.
"""

from __future__ import annotations

from typing import Any, Self

import msgspec

from .engine_options import EngineOptions
from .engine_options import SchedulerOptions as SchedulerOptions
from .model_options import ModelOptions
from .server_options import LogLevel as LogLevel
from .server_options import LogOptions, ServerOptions


class Configuration(msgspec.Struct, frozen=True, kw_only=True):
    """All options, by section."""

    model: ModelOptions = ModelOptions()
    engine: EngineOptions = EngineOptions()
    server: ServerOptions = ServerOptions()
    log: LogOptions = LogOptions()

    def with_engine(self, **changes: Any) -> Self:
        """A copy with other options of the engine."""
        return msgspec.structs.replace(self, engine=msgspec.structs.replace(self.engine, **changes))
