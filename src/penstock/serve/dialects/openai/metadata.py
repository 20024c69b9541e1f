"""Metadata that clients attach to stored objects."""

from __future__ import annotations

from typing import Annotated

import msgspec

Metadata = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=64)], Annotated[str, msgspec.Meta(max_length=512)]],
    msgspec.Meta(max_length=16),
]
"""Limits of OpenAI's API."""
