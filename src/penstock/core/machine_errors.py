"""Errors of exhausted resources: a full disk, memory, limits of the process."""

from __future__ import annotations

import errno
import traceback

from .errors import Code, Failure

REASONS = {  # descriptions by errno
    errno.ENOSPC: "a disk is full",
    errno.EDQUOT: "a disk quota is used up",
    errno.EFBIG: "a file would exceed the file size limit (ulimit -f)",
    errno.EMFILE: "the process has no file descriptors left (ulimit -n)",
    errno.ENFILE: "the machine has no file descriptors left",
    errno.ENOMEM: "there is not enough memory (ulimit -v)",
    errno.EAGAIN: "no further process or thread can be started (ulimit -u)",
}
PHRASES = {
    "failed to map segment": errno.ENOMEM,
    "cannot allocate memory": errno.ENOMEM,
    "out of memory": errno.ENOMEM,
    "can't start new thread": errno.EAGAIN,
}
"""Phrases in lower-case messages of errors that have no errno."""
PROCESS_STARTERS = ("subprocess.py", "process.pyx", "popen_fork.py")
"""Files of Python and uvloop that start processes. ``EAGAIN`` raised in other files is about sockets or locks."""


def exhausted(error: BaseException) -> Failure | None:
    """Failure of a request because of an exhausted resource; None for other errors."""
    if reason := _reason(error):
        return Failure(Code.UNAVAILABLE, f"the server cannot do this now: {reason}; retry later")
    return None


def start_failure(error: BaseException) -> Failure | None:
    """Failure of a start or a command because of an exhausted resource or an OS error; None for other errors."""
    reason = _reason(error)
    if isinstance(error, OSError):
        reason = reason or (error.strerror or str(error)).lower()
        if error.filename is not None:
            reason = f"{error.filename}: {reason}"
    return Failure(Code.INVALID, reason) if reason else None


def _reason(error: BaseException) -> str:
    """Description of the exhausted resource; empty for other errors."""
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
    """True if the error was raised while a process was started."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_code.co_filename.endswith(PROCESS_STARTERS)
