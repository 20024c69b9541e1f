"""Pooling: a prompt's hidden states become its embedding."""

from __future__ import annotations

import numpy as np

from penstock.core import PoolingParams

MIN_NORM = 1e-12
"""Lower bound of the norm that an embedding is divided by."""


class PoolingState:
    """Pools the hidden states of one prompt as they are computed. They are summed token by token, so that the result
    does not depend on the chunks of a chunked prefill."""

    def __init__(self, params: PoolingParams) -> None:
        self._params = params
        self.reset()

    @property
    def needs_all_hidden_states(self) -> bool:
        """Whether the hidden states of all tokens are pooled; otherwise only the last token's."""
        return self._params.pooling_type == "mean"

    def reset(self) -> None:
        """Reset the sum, since the prompt is recomputed."""
        self._sum: np.ndarray | float = 0.0
        self._count = 0

    def add(self, states: np.ndarray) -> None:
        """Add the next tokens' hidden states, ``[tokens, hidden]`` float32."""
        for state in states.astype(np.float64):
            self._sum = self._sum + state
        self._count += len(states)

    def embedding(self) -> bytes:
        """The embedding, float32; to be called when all states are added."""
        mean = np.asarray(self._sum / self._count)[: self._params.dimensions]
        if self._params.normalize:
            mean = mean / max(float(np.sqrt((mean * mean).sum())), MIN_NORM)
        return mean.astype("<f4").tobytes()
