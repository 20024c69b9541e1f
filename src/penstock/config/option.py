"""What an option has beside its type and default."""

from __future__ import annotations

from typing import Any

import msgspec


def option(help: str, unit: str = "", empty: str = "", **bounds: Any) -> msgspec.Meta:
    """Help, unit and bounds of an option.

    Args:
        empty: meaning of an empty value, for the help.
    """
    return msgspec.Meta(description=help, extra={"unit": unit, "empty": empty}, **bounds)
