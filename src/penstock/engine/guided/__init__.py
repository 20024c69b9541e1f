"""Guided decoding (structured outputs): restricts sampling to the tokens that a grammar allows.

``backend.py`` defines a compiled grammar, and the guide that tracks the state of a sequence in it. ``compiler.py``
compiles grammars with llguidance (``backend_llguidance.py``). A grammar with an unsupported part is refused, with an
error that names this part.
"""

from .backend import Grammar, Guide
from .bitmask import BitmaskBuilder
from .compiler import GrammarCompiler
