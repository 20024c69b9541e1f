"""Any architecture that the ``transformers`` library knows, run by its modules over our KV cache (``model_impl``).

The library is imported when a configuration is read.
"""

from __future__ import annotations

from ..registry import Family
from .config import read_config
from .model import build

FAMILY = Family(architectures=(), read_config=read_config, build=build)
"""Of all architectures; it is not registered, as it is for those alone that have no family of their own."""
