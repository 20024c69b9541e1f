"""Who computes what: the ranks of a tensor-parallel group. So far there is one rank."""

from .group import ALONE, Group

__all__ = ["ALONE", "Group"]
