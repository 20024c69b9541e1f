"""From a prompt's hidden states to one vector."""

from __future__ import annotations

import numpy as np

from penstock.core import PoolingParams

LEAST = 1e-12
"""The least length that a vector is divided by."""


class Pooled:
    """A prompt's vector as its hidden states come, in chunks or all at once: it does not depend on which."""

    def __init__(self, params: PoolingParams) -> None:
        self._params = params
        self.reset()

    @property
    def of_all(self) -> bool:
        """Whether the states of all tokens are wanted, not the last one's alone."""
        return self._params.pooling_type == "mean"

    def reset(self) -> None:
        """The prompt is computed again from its beginning."""
        self._sum: np.ndarray | float = 0.0
        self._count = 0

    def add(self, states: np.ndarray) -> None:
        """The wanted ones among the next tokens', ``[tokens, hidden]`` float32."""
        for state in states.astype(np.float64):  # one after the other, so that chunks end nowhere
            self._sum = self._sum + state
        self._count += len(states)

    def vector(self) -> bytes:
        """Once all are there: float32."""
        mean = np.asarray(self._sum / self._count)[: self._params.dimensions]
        if self._params.normalize:
            mean = mean / max(float(np.sqrt((mean * mean).sum())), LEAST)
        return mean.astype("<f4").tobytes()
