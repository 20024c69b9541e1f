"""Default executor of the engines in tests, from the environment: ``PENSTOCK_DISTRIBUTED_EXECUTOR_BACKEND=mp pytest``.

Servers read the variable without this module. Also a device that fails on demand.
"""

from __future__ import annotations

import os
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest

from penstock.config.options import EngineOptions
from penstock.config.settings import settings

BACKEND = "distributed_executor_backend"
DEFAULT = os.environ.get(settings()[BACKEND].variable, "uni")


def engine_options(**options: Any) -> EngineOptions:
    return EngineOptions(**{BACKEND: DEFAULT} | options)


def set_default() -> None:
    """Make ``DEFAULT`` the default of ``LLM`` and ``AsyncLLM``."""
    if DEFAULT != "uni":
        from penstock import LLM, AsyncLLM

        for kind in (LLM, AsyncLLM):
            kind.__init__ = partialmethod(kind.__init__, **{BACKEND: DEFAULT})  # type: ignore[method-assign]


FAILING = """
from pathlib import Path
from penstock.ops import cpu
whole, failures = cpu.copy_blocks, Path({failures!r})
def copy_blocks(*args):
    if count := int(failures.read_text() or 0):
        failures.write_text(str(count - 1))
        raise RuntimeError("the device has failed")
    whole(*args)
cpu.copy_blocks = copy_blocks
"""


class FailingDevice:
    """Make a kernel that every step calls fail on demand, in this process and in the processes that it starts.

    Args:
        folder: folder for the number of remaining failures, and for ``sitecustomize.py``.
        patch: fixture that undoes the changes.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        from penstock.ops import cpu

        self._failures = folder / "failures"
        self.fail(0)
        code = FAILING.format(failures=str(self._failures))
        (folder / "sitecustomize.py").write_text(code)
        patch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")
        patch.setattr(cpu, "copy_blocks", cpu.copy_blocks)
        exec(code, {})

    def fail(self, calls: int = 10**6) -> None:
        """Let the next ``calls`` calls of the kernel fail; 0: no calls."""
        self._failures.write_text(str(calls))
