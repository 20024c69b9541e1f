"""All options, under the names of vLLM where it has them.

Each has a type, default, unit and docstring, from which flags, help, configuration files and environment variables are
derived.
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
        """Return a copy with changed engine options."""
        return msgspec.structs.replace(self, engine=msgspec.structs.replace(self.engine, **changes))
