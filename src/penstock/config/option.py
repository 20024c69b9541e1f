"""What an option has beside its type, default and docstring."""

from __future__ import annotations

from typing import Any

import msgspec


def option(unit: str = "", empty: str = "", **bounds: Any) -> msgspec.Meta:
    """Unit and bounds of an option.

    Args:
        empty: meaning of an empty value, for the help.
    """
    return msgspec.Meta(extra={"unit": unit, "empty": empty}, **bounds)
