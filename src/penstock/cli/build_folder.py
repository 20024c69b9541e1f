"""Building of engine folders, for ``penstock build`` and commands of other systems."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.checkpoint.engine_config import EngineConfig
from penstock.config.options import EngineOptions
from penstock.config.progress import Progress, log_or_print
from penstock.config.settings import settings
from penstock.config.sources import convert_setting

from .interrupts import ending_at_ctrl_c

logger = logging.getLogger(__name__)


def engine_options(values: Mapping[str, Any], source: str) -> EngineOptions:
    """Convert values by option name to engine options; other names are ignored.

    Raises ``PenstockError`` (``invalid``) for an invalid value.
    """
    known = {name: setting for name, setting in settings().items() if setting.section == "engine"}
    return EngineOptions(
        **{name: convert_setting(known[name], value, source) for name, value in values.items() if name in known}
    )


def build(options: EngineOptions, output: Path, **arguments: Any) -> EngineConfig:
    """Run ``engine_folder.build_engine`` and show its progress."""
    with ending_at_ctrl_c():
        from penstock.engine.engine_folder import build_engine

    with Progress("packed", 0, "B", log_or_print(logger)) as bar:
        return build_engine(options, output, progress=bar.set, **arguments)


def describe(config: EngineConfig) -> str:
    """One-line description of an engine folder."""
    ranks = f"{config.world_size} ranks" if config.world_size > 1 else "1 rank"
    formats = config.dtype if config.quantization == "none" else f"{config.quantization}, {config.dtype}"
    return f"an engine folder for {ranks}, {formats}, kernel layout {config.layout}"
