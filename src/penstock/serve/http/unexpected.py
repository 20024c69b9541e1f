"""Failures for unexpected exceptions."""

from __future__ import annotations

import logging

from penstock.core import Failure
from penstock.core.errors import INTERNAL
from penstock.core.machine_errors import exhausted

logger = logging.getLogger(__name__)


def unexpected(error: BaseException, request_id: str = "") -> Failure:
    """Log an unexpected error and return its failure. For an exhausted resource, such as memory, the failure says which
    one, and the log has no traceback."""
    extra = {"fields": {"id": request_id}} if request_id else {}
    if failure := exhausted(error):
        logger.error("a request failed: %s", error, extra=extra)
        return failure
    logger.error("a request failed", exc_info=error, extra=extra)
    return INTERNAL
