"""Errors that come from the machine and not from the code: a full disk, limits of the process."""

from __future__ import annotations

import errno
import traceback

from .errors import Code, Failure

REASONS = {
    errno.ENOSPC: "a disk is full",
    errno.EDQUOT: "a disk quota is used up",
    errno.EFBIG: "a file would exceed the limit of its size (ulimit -f)",
    errno.EMFILE: "the process has no file descriptor left (ulimit -n)",
    errno.ENFILE: "the machine has no file descriptor left",
    errno.ENOMEM: "there is not enough memory (ulimit -v)",
    errno.EAGAIN: "no further process or thread can be started (ulimit -u)",
}
PHRASES = {
    "failed to map segment": errno.ENOMEM,
    "cannot allocate memory": errno.ENOMEM,
    "out of memory": errno.ENOMEM,
    "can't start new thread": errno.EAGAIN,
}
"""Parts of messages, in lower case, of errors without a number."""
PROCESS_STARTERS = ("subprocess.py", "process.pyx", "popen_fork.py")
"""Files of Python and uvloop that start processes; ``EAGAIN`` of other code comes from sockets and locks."""


def exhausted(error: BaseException) -> Failure | None:
    """The failure of a request for an error that says that a resource is used up; None for other errors."""
    if reason := _reason(error):
        return Failure(Code.UNAVAILABLE, f"the server cannot do this now: {reason}; send the request again later")
    return None


def start_failure(error: BaseException) -> Failure | None:
    """The failure of a start, or of a command, that the machine does not let happen; None for other errors."""
    reason = _reason(error)
    if isinstance(error, OSError):
        reason = reason or (error.strerror or str(error)).lower()
        if error.filename is not None:
            reason = f"{error.filename}: {reason}"
    return Failure(Code.INVALID, reason) if reason else None


def _reason(error: BaseException) -> str:
    if isinstance(error, BlockingIOError) and not _starts_process(error):
        return ""
    if isinstance(error, OSError):
        return REASONS.get(error.errno or 0, "")
    if isinstance(error, MemoryError):
        return REASONS[errno.ENOMEM]
    if isinstance(error, ImportError | RuntimeError):
        message = str(error).lower()
        return next((REASONS[number] for phrase, number in PHRASES.items() if phrase in message), "")
    return ""


def _starts_process(error: BaseException) -> bool:
    """Whether an error was raised by code that starts processes."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_code.co_filename.endswith(PROCESS_STARTERS)
