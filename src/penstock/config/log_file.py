"""Logging handler for the log file, which tolerates a full disk."""

from __future__ import annotations

import logging
import sys
import time
from logging.handlers import WatchedFileHandler
from pathlib import Path

REPORT_INTERVAL = 60.0
"""Minimum seconds between two warnings about lines that cannot be written."""


class LogFile(WatchedFileHandler):
    """Appends lines to a file, which is reopened when log rotation moves it.

    Lines that cannot be written are lost. A warning on standard error counts them, once per ``REPORT_INTERVAL``.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self._lost = 0
        self._reported = -REPORT_INTERVAL

    def handleError(self, record: logging.LogRecord) -> None:
        """Count a line that could not be written, and warn. Called with the lock held, within the exception handler."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self._lost += 1
        if (now := time.monotonic()) - self._reported < REPORT_INTERVAL:
            return
        self._reported = now
        for handler in logging.getLogger().handlers:
            if handler is not self:
                handler.handle(self._report(error))

    def _report(self, error: OSError) -> logging.LogRecord:
        message = "the log file %s cannot be written (%s): %d lines lost so far"
        arguments = (self.baseFilename, (error.strerror or str(error)).lower(), self._lost)
        return logging.LogRecord("penstock", logging.WARNING, __file__, 0, message, arguments, None)
