"""Sizes of the ops with recurrent state."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class DeltaSizes:
    """Sizes of ``gated_delta_rule`` on one rank."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    l2_eps: float = 1e-6
    """Added to the square of a query's or key's length before it is normalized."""
    beta_scale: float = 1.0
    """Factor of beta; 2 allows states with negative eigenvalues (OLMo-Hybrid)."""
    decay_dim: int = 1
    """Number of decays of a head: 1, or ``key_dim`` for a decay per channel of the keys (Kimi-Linear)."""


@dataclass(frozen=True)
class StateSpaceSizes:
    """Sizes and limits of ``state_space`` on one rank."""

    heads: int
    groups: int
    """Number of groups of consecutive heads that share B and C."""
    head_dim: int
    state_size: int
    min_step: float = 0.0
    max_step: float = math.inf
