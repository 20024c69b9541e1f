"""LoRA adapter of a request, and parsing of ``lora_modules``."""

from __future__ import annotations

import msgspec

from .errors import invalid


class LoRARequest(msgspec.Struct, frozen=True):
    """LoRA adapter of a prompt, as in vLLM."""

    lora_name: str
    """Name of the adapter, as in ``lora_modules``."""
    lora_int_id: int = 0
    """Ignored; accepted for compatibility with vLLM."""
    lora_path: str = ""
    """Folder to load the adapter from if it is not loaded; empty: the adapter is already loaded."""


def parse_lora_modules(lora_modules: tuple[str, ...]) -> dict[str, str]:
    """Parse entries ``name=folder`` of the option ``lora_modules`` into folders by name. Raises ``PenstockError``
    (``invalid``) for other entries and for duplicate names."""
    result: dict[str, str] = {}
    for entry in lora_modules:
        name, equals, path = entry.partition("=")
        if not equals or not name or not path:
            raise invalid("lora_modules", f"{entry!r} does not have the form name=folder")
        if name in result:
            raise invalid("lora_modules", f"{name!r} is given twice; use a different name for each adapter")
        result[name] = path
    return result
