"""Guided decoding (structured outputs): which tokens a grammar allows next.

``backend.py`` defines what a backend provides: compiled grammars, and a guide per sequence that tracks its state. There
is one file per backend; ``compiler.py`` compiles with the selected one. A backend refuses grammars that it does not
fully support, with an error that names the unsupported part.
"""

from .backend import Grammar, Guide
from .bitmask import BitmaskBuilder
from .compiler import GrammarCompiler, check_backend

__all__ = ["BitmaskBuilder", "Grammar", "GrammarCompiler", "Guide", "check_backend"]
