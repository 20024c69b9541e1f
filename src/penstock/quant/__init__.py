"""Weight formats: what a checkpoint gives, how it is packed once at load, how it multiplies."""

from .dense import Dense

__all__ = ["Dense"]
