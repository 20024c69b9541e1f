"""Tensor parallelism: which part of each matrix a rank computes. One rank is supported so far."""

from .group import SINGLE_RANK, Group

__all__ = ["SINGLE_RANK", "Group"]
