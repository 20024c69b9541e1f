"""A step that the device may still be computing."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..step import StepOutput


class PendingStep:
    """The future output of a step.

    Args:
        finish: waits for the device and returns the output. Called once.
    """

    def __init__(self, finish: Callable[[], StepOutput]) -> None:
        self._finish: Callable[[], StepOutput] | None = finish
        self._output: StepOutput | None = None
        self._error: Exception | None = None

    def complete(self) -> None:
        """Wait for the step. Does not raise its error: ``result`` does."""
        if not self._finish:
            return
        finish, self._finish = self._finish, None
        try:
            with torch.inference_mode():
                self._output = finish()
        except Exception as error:
            self._error = error

    def result(self) -> StepOutput:
        """Wait for the step and return its output, or raise its error."""
        self.complete()
        if self._error:
            raise self._error
        assert self._output is not None
        return self._output
