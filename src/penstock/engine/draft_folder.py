"""Folder and size of the drafter's weights. This module imports no torch, since ``penstock plan memory`` uses it."""

from __future__ import annotations

from pathlib import Path

from penstock import demo
from penstock.config.speculative import LOOKUPS, SpeculativeConfig
from penstock.core.errors import invalid
from penstock.planning.draft_size import METHODS, draft_size_of
from penstock.planning.model_size import ModelSize


def draft_folder(speculative: SpeculativeConfig | None, model: str) -> Path | None:
    """Folder of the draft model or of the draft heads (EAGLE, Medusa); None without separate weights (lookup, MTP).

    Args:
        model: option ``model``; empty for the built-in model.

    Raises ``PenstockError`` (``invalid``) if the options do not name the folder that the method needs.
    """
    if not speculative or speculative.method in (*LOOKUPS, "mtp"):
        return None
    if speculative.model:
        return Path(speculative.model)
    if speculative.method == "medusa" and model:
        return Path(model)  # some checkpoints contain the Medusa heads
    if speculative.method in METHODS:
        message = f'has no "model": set it to the folder of the {speculative.method} heads'
        raise invalid("speculative_config", message)
    if not model or Path(model) == demo.CHAT:
        return demo.DRAFT
    if speculative.method:
        message = f'has the method {speculative.method!r}, but no "model": set it to the draft model\'s folder'
        raise invalid("speculative_config", message)
    return None


def draft_size(speculative: SpeculativeConfig | None, model: str, size: ModelSize) -> ModelSize | None:
    """Size of the draft model or the draft heads; None without separate weights. Raises ``PenstockError`` (``invalid``)
    if the options do not name the folder (``draft_folder``), or its contents are invalid."""
    folder = draft_folder(speculative, model)
    return draft_size_of(folder, speculative.method, size) if speculative and folder else None
