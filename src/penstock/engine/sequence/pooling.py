"""Pooling of a prompt's hidden states to an embedding, or to the outputs of a classifier."""

from __future__ import annotations

from typing import Literal

import numpy as np

from penstock.core import PoolingParams

from ..step import sum_states

MIN_NORM = 1e-12
"""Lower bound of the norm by which an embedding is divided."""


class PoolingState:
    """Pools the hidden states of one prompt as they are computed. States are summed token by token, so that the result
    does not depend on the chunks of a chunked prefill.

    If the pooling parameters have a head, the workers pool, and this class gets the head's output.
    """

    def __init__(self, params: PoolingParams) -> None:
        self._params = params
        self.pooling_type = params.pooling_type or "last"
        self.reset()

    @property
    def needs_all_hidden_states(self) -> bool:
        """True if hidden states of tokens before the last are pooled, so that all tokens have to be computed."""
        return self.pooling_type != "last"

    def reset(self) -> None:
        """Discard the pooled states, before the prompt is recomputed."""
        self._sum: np.ndarray | float = 0.0
        self._count = 0
        self._states: list[np.ndarray] = []

    def add(self, states: np.ndarray) -> None:
        """Add the hidden states of the next tokens, ``[tokens, hidden]`` float32."""
        if self.pooling_type == "all":
            self._states.append(states)
        else:
            self._sum = sum_states(states, self._sum)
        self._count += len(states)

    def embedding(self) -> bytes:
        """Embedding (with ``all``, one vector per token) as float32 bytes. Call this after all states are added."""
        if self.pooling_type == "all":
            vectors = np.concatenate(self._states).astype(np.float64)
        else:
            vectors = np.asarray(self._sum / self._count)[None]
        return self._finish(vectors).astype("<f4").tobytes()

    def _finish(self, vectors: np.ndarray) -> np.ndarray:
        """Apply the activation of a classifier, or truncation and normalization of an embedding, to each row."""
        params = self._params
        if params.token_ids:  # logit for yes minus logit for no
            vectors = vectors[:, 1:] - vectors[:, :1]
        if params.head == "classifier" or params.token_ids:
            return vectors if params.use_activation is False else activate(vectors, params.activation or "none")
        vectors = vectors[:, : params.dimensions]
        if params.normalize is False:
            return vectors
        norms = np.sqrt((vectors * vectors).sum(-1, keepdims=True))
        return np.asarray(vectors / np.maximum(norms, MIN_NORM))


def activate(logits: np.ndarray, activation: Literal["none", "sigmoid", "softmax"]) -> np.ndarray:
    """Apply an activation to a classifier's logits ``[rows, labels]``."""
    if activation == "sigmoid":
        return np.asarray(0.5 * (1 + np.tanh(0.5 * logits)))
    if activation == "softmax":
        powers = np.exp(logits - logits.max(-1, keepdims=True))
        return np.asarray(powers / powers.sum(-1, keepdims=True))
    return logits
