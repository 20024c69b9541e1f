"""Logging setup and formats: text, or one JSON object per line. Secrets are masked (``secrets``).

Each process writes to standard error and, with ``log_file``, appends line by line to the same file.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.core.errors import invalid

from . import log_stream, secrets
from .options import LogOptions

TRACE: ContextVar[Mapping[str, str]] = ContextVar("TRACE", default={})  # noqa: B039, as it is never modified
"""Fields of all log lines of a traced request: ``trace_id``, ``span_id``."""


def set_up(options: LogOptions, process: str) -> None:
    """Configure all loggers of this process.

    Args:
        process: name of the process, shown in each line.

    Raises ``PenstockError`` (``invalid``) if the log file cannot be written.
    """
    handlers: list[logging.Handler] = [_file(Path(options.log_file))] if options.log_file else []
    handlers.append(log_stream.handler(sys.stderr))
    secrets.register(options)
    for handler in handlers:
        handler.setFormatter(JsonFormatter(process) if options.log_format == "json" else TextFormatter(process))
    logging.basicConfig(level=options.log_level.upper(), handlers=handlers, force=True)
    for name in ("httpx", "httpx2", "uvicorn.error"):  # their INFO lines repeat Penstock's
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))


def _file(path: Path) -> logging.Handler:
    from .log_file import LogFile  # slow to import

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return LogFile(path)
    except OSError as error:
        raise invalid("log_file", f"cannot write {path} ({error.strerror}); set another file, or none") from error


class _Formatter(logging.Formatter):
    """Base class of the formatters: stores the name of the process."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process


class TextFormatter(_Formatter):
    """Lines of date, time, process, level (unless INFO), message, and a ``name=value`` per ``extra={"fields": …}``."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        level = "" if record.levelno == logging.INFO else f"{record.levelname} "
        fields = "".join(f" {name}={_shown(value)}" for name, value in _log_fields(record).items())
        line = f"{time} {self._process}: {level}{record.getMessage()}{fields}"
        return secrets.mask(line + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""))


class JsonFormatter(_Formatter):
    """JSON objects with ``time`` (ISO 8601), ``level``, ``process``, ``logger``, ``message`` and the fields."""

    def format(self, record: logging.LogRecord) -> str:
        result = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": secrets.mask(record.getMessage()),
            **_log_fields(record),
        }
        if record.exc_info:
            result["exception"] = secrets.mask(self.formatException(record.exc_info))
        return json.dumps(result, ensure_ascii=False, default=str)


def _log_fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = {**getattr(record, "fields", {}), **TRACE.get()}
    return {name: secrets.mask(value) if isinstance(value, str) else value for name, value in fields.items()}


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if not text or any(c.isspace() for c in text) else text
