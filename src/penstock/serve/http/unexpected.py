"""Failures for unexpected exceptions: exhausted resources are reported to the client."""

from __future__ import annotations

import logging

from penstock.core import Code, Failure
from penstock.core.machine_errors import exhausted

logger = logging.getLogger(__name__)

INTERNAL = Failure(Code.INTERNAL, "internal error; the server's log says more")


def unexpected(error: BaseException, request_id: str = "") -> Failure:
    """The failure for an unexpected error, which is logged: with its traceback, unless a resource is used up."""
    fields = {"fields": {"id": request_id}} if request_id else {}
    if failure := exhausted(error):
        logger.error("a request failed: %s", error, extra=fields)
        return failure
    logger.error("a request failed", exc_info=error, extra=fields)
    return INTERNAL
