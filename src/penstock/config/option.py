"""Metadata of an option: unit, bounds, and the meaning of an empty value."""

from __future__ import annotations

from typing import Any

import msgspec


def option(unit: str = "", empty: str = "", **bounds: Any) -> msgspec.Meta:
    """Create the metadata of an option, for ``Annotated``.

    Args:
        unit: unit of the value, for the help.
        empty: meaning of an empty value, for the help.
        bounds: constraints of ``msgspec.Meta`` (``ge``, ``le``, …).
    """
    return msgspec.Meta(extra={"unit": unit, "empty": empty}, **bounds)
