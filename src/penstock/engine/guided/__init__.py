"""Guided decoding (structured outputs): which tokens a grammar allows next.

``backend.py`` defines compiled grammars, and the guide that tracks the state of a sequence; ``compiler.py`` compiles
with llguidance (``backend_llguidance.py``). Grammars that are not fully supported are refused, with an error that names
the unsupported part.
"""

from .backend import Grammar, Guide
from .bitmask import BitmaskBuilder
from .compiler import GrammarCompiler
