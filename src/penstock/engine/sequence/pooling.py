"""Pooling: a prompt's hidden states become its embedding, or the outputs of a classifier."""

from __future__ import annotations

from typing import Literal

import numpy as np

from penstock.core import PoolingParams

from ..step import sum_states

MIN_NORM = 1e-12
"""Lower bound of the norm that an embedding is divided by."""


class PoolingState:
    """Pools the hidden states of one prompt as they are computed. They are summed token by token, so that the result
    does not depend on the chunks of a chunked prefill.

    With a head, workers pool, and the state gets the head's output.
    """

    def __init__(self, params: PoolingParams) -> None:
        self._params = params
        self.pooling_type = params.pooling_type or "last"
        self.reset()

    @property
    def needs_all_hidden_states(self) -> bool:
        """True if hidden states of other tokens than the last one are pooled, so that all have to be computed."""
        return self.pooling_type != "last"

    def reset(self) -> None:
        """Reset what was pooled, since the prompt is recomputed."""
        self._sum: np.ndarray | float = 0.0
        self._count = 0
        self._states: list[np.ndarray] = []

    def add(self, states: np.ndarray) -> None:
        """Add the next tokens' hidden states, ``[tokens, hidden]`` float32."""
        if self.pooling_type == "all":
            self._states.append(states)
        else:
            self._sum = sum_states(states, self._sum)
        self._count += len(states)

    def embedding(self) -> bytes:
        """The vector, or with ``all`` the vector of each token, float32; to be called when all states are added."""
        if self.pooling_type == "all":
            vectors = np.concatenate(self._states).astype(np.float64)
        else:
            vectors = np.asarray(self._sum / self._count)[None]
        return self._finish(vectors).astype("<f4").tobytes()

    def _finish(self, vectors: np.ndarray) -> np.ndarray:
        params = self._params
        if params.token_ids:  # the second one's logit against the first one's
            vectors = vectors[:, 1:] - vectors[:, :1]
        if params.head == "classifier" or params.token_ids:
            return vectors if params.use_activation is False else activate(vectors, params.activation or "none")
        vectors = vectors[:, : params.dimensions]
        if params.normalize is False:
            return vectors
        norms = np.sqrt((vectors * vectors).sum(-1, keepdims=True))
        return np.asarray(vectors / np.maximum(norms, MIN_NORM))


def activate(logits: np.ndarray, activation: Literal["none", "sigmoid", "softmax"]) -> np.ndarray:
    """Probabilities of a classifier's outputs ``[rows, labels]``."""
    if activation == "sigmoid":
        return np.asarray(0.5 * (1 + np.tanh(0.5 * logits)))
    if activation == "softmax":
        powers = np.exp(logits - logits.max(-1, keepdims=True))
        return np.asarray(powers / powers.sum(-1, keepdims=True))
    return logits
