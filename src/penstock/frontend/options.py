"""Options by name, as callers of ``LLM`` and ``AsyncLLM`` give them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.core.errors import invalid
from penstock.core.options import EngineOptions
from penstock.core.settings import nearest


def engine_options(given: Mapping[str, Any]) -> EngineOptions:
    """Raises ``PenstockError`` (``invalid``) for an unknown name, with the nearest known one, or a wrong value."""
    known = [field.name for field in msgspec.structs.fields(EngineOptions)]
    for name in given:
        if name not in known:
            raise invalid(name, f"no such option{nearest(name, known)}")
    plain = {name: json.dumps(value) if isinstance(value, dict) else value for name, value in given.items()}
    try:
        return msgspec.convert(plain, EngineOptions)
    except msgspec.ValidationError as error:
        raise invalid("options", str(error)) from error
