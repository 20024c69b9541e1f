"""Where checkpoints have the language model and the vision tower of models that see images."""

from __future__ import annotations

from penstock.checkpoint.model_config import ModelConfig

from ..stored import Stored

TOWER = "vision_tower"


def find_stored(config: ModelConfig, name: str) -> Stored:
    """As ``Family.find_stored``."""
    if name.startswith(("model.", "lm_head")):
        return Stored(f"language_model.{name}")
    if name.startswith(f"{TOWER}."):  # one level deeper in files of earlier versions of transformers
        return Stored(name, other=f"{TOWER}.vision_model{name.removeprefix(TOWER)}")
    return Stored(name)
