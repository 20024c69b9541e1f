"""Where what drafts tokens comes from. Known without torch, as ``penstock plan memory`` needs it."""

from __future__ import annotations

from pathlib import Path

from penstock import demo
from penstock.config.speculative import SpeculativeConfig
from penstock.core.errors import invalid
from penstock.planning.draft_size import METHODS, draft_size_of
from penstock.planning.model_size import ModelSize


def draft_folder(speculative: SpeculativeConfig | None, model: str) -> Path | None:
    """Folder of the heads or of the draft model; None if n-grams or the model's own MTP layers draft, or nothing.

    Args:
        model: the option; empty for the built-in model.

    Raises ``PenstockError`` (``invalid``) if it is not given.
    """
    if not speculative or speculative.method in ("ngram", "mtp"):
        return None
    if speculative.model:
        return Path(speculative.model)
    if speculative.method == "medusa" and model:
        return Path(model)  # some checkpoints have heads beside the model
    if speculative.method in METHODS:
        raise invalid("speculative_config", f"name the folder of the {speculative.method} heads as model")
    if not model or Path(model) == demo.CHAT:
        return demo.DRAFT
    if speculative.method:
        raise invalid("speculative_config", "name the draft model's folder as model")
    return None


def draft_size(speculative: SpeculativeConfig | None, model: str, size: ModelSize) -> ModelSize | None:
    """The size of the heads or of the draft model; None if there are none. Raises as ``draft_folder``, and
    ``PenstockError`` (``invalid``) if they are broken."""
    folder = draft_folder(speculative, model)
    return draft_size_of(folder, speculative.method, size) if speculative and folder else None
