"""Which adapter a prompt is for."""

from __future__ import annotations

import msgspec

from .errors import invalid


class LoRARequest(msgspec.Struct, frozen=True):
    """A LoRA adapter by name, under the names that vLLM's users know."""

    lora_name: str
    lora_int_id: int = 0
    """A number that vLLM knows it by; here the name is enough."""
    lora_path: str = ""
    """Folder to load it from where it is not loaded yet; nothing for one that is."""


def named(lora_modules: tuple[str, ...]) -> dict[str, str]:
    """Folders by name, from ``name=folder``.

    Raises ``PenstockError`` (``invalid``) where one is not written so, or a name comes twice.
    """
    found: dict[str, str] = {}
    for entry in lora_modules:
        name, equals, path = entry.partition("=")
        if not equals or not name or not path:
            raise invalid("lora_modules", f"{entry!r} is not written name=folder")
        if name in found:
            raise invalid("lora_modules", f"{name!r} comes twice")
        found[name] = path
    return found
