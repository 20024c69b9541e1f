"""Guided decoding: which tokens may come next, so that an output has the form that was asked for.

``guide.py`` says what a backend gives, a file each has the backends, and ``guides.py`` compiles with the one that was
chosen. What a backend cannot keep to it refuses by name.
"""

from .guide import Grammar, Guide
from .guides import Guides, check_backend
from .masks import Masks

__all__ = ["Grammar", "Guide", "Guides", "Masks", "check_backend"]
