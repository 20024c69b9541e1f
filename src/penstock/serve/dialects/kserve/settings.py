"""Log and trace settings that clients may change at run time (the logging and trace extensions)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.core.spelling import did_you_mean

logger = logging.getLogger("penstock")

LEVELS = {"log_error": logging.ERROR, "log_warning": logging.WARNING, "log_info": logging.INFO}
FORMATS = ("default", "ISO8601")
TRACE_LEVELS = ("OFF", "TIMESTAMPS", "TENSORS")
TRACE = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "triton",
}
"""Default trace settings."""
MIN_VALUES = {"trace_rate": 0, "trace_count": -1, "log_frequency": 0}
"""Numeric trace setting → minimum."""
READ_ONLY_SETTINGS = ("log_file", "trace_file", "trace_mode")
"""Settings that cannot be changed over the network, as in Triton."""
NO_TRACES = "trace settings are stored but have no effect; use --otlp-endpoint to export traces"


class LogSettings:
    """The log levels of this process, as Triton's log settings."""

    def __init__(self) -> None:
        files = [h.baseFilename for h in logging.root.handlers if isinstance(h, logging.FileHandler)]
        level = logging.root.level
        self._initial: dict[str, Any] = {
            "log_file": next(iter(files), ""),
            **{name: level <= minimum for name, minimum in LEVELS.items()},
            "log_verbose_level": int(level <= logging.DEBUG),
            "log_format": "default",
        }
        self._applied: Mapping[str, Any] = {}

    def current(self, changed: Mapping[str, Any]) -> dict[str, Any]:
        """The log settings as ``/v2/logging`` returns them."""
        return {**self._initial, **changed}

    def check(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Validate log settings; returns the changes. Raises ``PenstockError`` for an invalid name or value."""
        result = {}
        for name, value in changes.items():
            _check_known(name, value, self._initial)
            if name in LEVELS and not isinstance(value, bool):
                raise invalid(name, f"must be true or false, is {str(value)[:50]!r}")
            if name == "log_verbose_level" and (type(value) is not int or not 0 <= value < 2**32):
                raise invalid(name, f"must be an integer from 0 to 4294967295, is {str(value)[:50]!r}")
            if name == "log_format" and value not in FORMATS:
                raise invalid(name, f"must be one of {', '.join(FORMATS)}, is {str(value)[:50]!r}")
            if name not in READ_ONLY_SETTINGS:
                result[name] = value
        return result

    def apply(self, changed: Mapping[str, Any]) -> None:
        """Apply changed settings to the log of this process."""
        if changed == self._applied:
            return
        self._applied = dict(changed)
        current = self.current(changed)
        enabled = {level for name, level in LEVELS.items() if current[name]}
        if current["log_verbose_level"]:
            enabled.add(logging.DEBUG)
        logging.root.setLevel(min(enabled, default=logging.CRITICAL + 1))
        for handler in logging.root.handlers:
            handler.filters = [each for each in handler.filters if not isinstance(each, LevelFilter)]
            handler.addFilter(LevelFilter(enabled))


class LevelFilter(logging.Filter):
    """Filter that passes only log records of the enabled levels."""

    def __init__(self, levels: set[int]) -> None:
        super().__init__()
        self._levels = levels

    def filter(self, record: logging.LogRecord) -> bool:
        level = min(record.levelno, logging.ERROR) // 10 * 10  # round a custom level down to a standard level
        return level in self._levels


def trace_settings(changed: Mapping[str, Mapping[str, Any]], model: str = "") -> dict[str, Any]:
    """The trace settings as ``/v2/trace/setting`` and ``/v2/models/NAME/trace/setting`` return them."""
    return {**TRACE, **changed.get("", {}), **(changed.get(model, {}) if model else {})}


def check_trace(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Validate trace settings; returns the changes (None: reset). Raises ``PenstockError`` for invalid settings."""
    result: dict[str, Any] = {}
    for name, value in changes.items():
        _check_known(name, value, TRACE)
        if name in READ_ONLY_SETTINGS:
            continue
        if value is None:
            result[name] = None
        elif name in MIN_VALUES:
            result[name] = str(_number(name, value))
        else:
            levels = value if isinstance(value, list) else [value]
            if not levels or not all(isinstance(level, str) and level in TRACE_LEVELS for level in levels):
                raise invalid(name, f"must be a list of {', '.join(TRACE_LEVELS)}, is {str(value)[:50]!r}")
            result[name] = levels
    if any(value not in (None, ["OFF"]) for name, value in result.items() if name == "trace_level"):
        logger.warning("trace_level=%s: %s", result["trace_level"], NO_TRACES)
    return result


def change_trace(trace: dict[str, dict[str, Any]], model: str, changes: Mapping[str, Any]) -> None:
    """Apply validated changes to the settings of a model, or to the global settings if ``model`` is empty."""
    settings = {**trace.get(model, {}), **changes}
    trace[model] = {name: value for name, value in settings.items() if value is not None}


def _number(name: str, value: Any) -> int:
    try:
        if not isinstance(value, str | int) or isinstance(value, bool) or len(str(value)) > 20:
            raise ValueError
        result = int(value)
    except ValueError as error:
        raise invalid(name, f"must be an integer, is {str(value)[:50]!r}") from error
    if result < MIN_VALUES[name]:
        raise invalid(name, f"must be at least {MIN_VALUES[name]}, is {result}", MIN_VALUES[name])
    return result


def _check_known(name: str, value: Any, current: Mapping[str, Any]) -> None:
    if name not in current:
        raise invalid(name[:100], f"no such setting{did_you_mean(name[:100], current)}")
    if name in READ_ONLY_SETTINGS and value not in (None, current[name]):
        message = f"{name}: can not be updated through network protocol; set it when the server starts"
        raise PenstockError(Code.UNSUPPORTED, message, name)
