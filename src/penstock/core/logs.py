"""What the log looks like: lines for people, or one JSON object a line. Every process writes to standard error."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

from .options import LogOptions


def set_up(options: LogOptions, process: str) -> None:
    """Send all loggers to standard error in the form that ``options`` choose.

    Args:
        process: which of the server's processes this is.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(AsJson(process) if options.log_format == "json" else ForPeople(process))
    logging.basicConfig(level=options.log_level.upper(), handlers=[handler], force=True)
    for name in ("httpx", "uvicorn.error"):  # which tell at INFO what our own lines say
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))


class ForPeople(logging.Formatter):
    """Time, level if it is worth a look, process, message, and ``name=value`` for each of ``extra={"facts": …}``."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        level = "" if record.levelno == logging.INFO else f"{record.levelname} "
        facts = "".join(f" {name}={_shown(value)}" for name, value in _facts(record).items())
        line = f"{time} {self._process}: {level}{record.getMessage()}{facts}"
        return line + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")


class AsJson(logging.Formatter):
    """The same as an object: ``time`` (ISO 8601), ``level``, ``process``, ``logger``, ``message`` and the facts."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        found = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **_facts(record),
        }
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found, ensure_ascii=False, default=str)


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "facts", {})


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if not text or any(c.isspace() for c in text) else text
