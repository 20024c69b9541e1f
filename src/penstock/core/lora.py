"""LoRA adapters of requests and options."""

from __future__ import annotations

import msgspec

from .errors import invalid


class LoRARequest(msgspec.Struct, frozen=True):
    """The LoRA adapter of a prompt, as in vLLM."""

    lora_name: str
    lora_int_id: int = 0
    """Ignored; vLLM needs it."""
    lora_path: str = ""
    """Folder to load the adapter from unless it is loaded; empty for a loaded one."""


def parse_lora_modules(lora_modules: tuple[str, ...]) -> dict[str, str]:
    """The option ``lora_modules``, entries of ``name=folder``, as a mapping.

    Raises ``PenstockError`` (``invalid``) for other entries, and for a name that is given twice.
    """
    result: dict[str, str] = {}
    for entry in lora_modules:
        name, equals, path = entry.partition("=")
        if not equals or not name or not path:
            raise invalid("lora_modules", f"{entry!r} is not written name=folder")
        if name in result:
            raise invalid("lora_modules", f"{name!r} comes twice")
        result[name] = path
    return result
