"""Configuration of models with a vision tower, a projector, and a language model of another family."""

from dataclasses import replace

from penstock.checkpoint.model_config import ConfigJson, ModelConfig
from penstock.checkpoint.vision_config import ACTIVATIONS
from penstock.core import Code, PenstockError

from .registry import find_family
from .stored import Stored

TOWER = "vision_tower"
TEXT = {name.lower(): f"{name}ForCausalLM" for name in ("Llama", "Ministral3", "Mistral", "Qwen2", "Qwen3")}
"""``model_type`` of ``text_config`` → architecture of the language model."""
PROJECTOR = "multi_modal_projector"


def read_text(raw: ConfigJson, tower: int, inputs: int) -> ModelConfig:
    """Read the configuration of the language model, including the number of vision parameters.

    Args:
        tower: number of parameters of the tower.
        inputs: input size of the projector.

    Raises ``PenstockError`` (``unsupported``) for a language model that is not in ``TEXT``.
    """
    kind = str(raw["text_config"].get("model_type"))
    if kind not in TEXT:
        message = (
            f"{raw.get('model_type')} with the language model {kind[:40]!r} is not supported; use {', '.join(TEXT)}"
        )
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    config = find_family(TEXT[kind]).read_config(raw)
    return replace(config, vision_weights=tower + (inputs + config.hidden_size) * config.hidden_size)


def projector_activation(raw: ConfigJson) -> str:
    """Read ``projector_hidden_act``. Raises ``PenstockError`` (``unsupported``) for an unknown activation."""
    if (name := str(raw["projector_hidden_act"])) not in ACTIVATIONS:
        message = f"projector_hidden_act is {name[:40]!r}; supported are {', '.join(ACTIVATIONS)}"
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    return name


def find_stored(config: ModelConfig, name: str) -> Stored:
    """See ``Family.find_stored``."""
    if name.startswith(("model.", "lm_head")):
        return Stored(f"language_model.{name}")
    if name.startswith(f"{TOWER}."):  # older versions of transformers insert "vision_model" into the names
        return Stored(name, other=f"{TOWER}.vision_model{name.removeprefix(TOWER)}")
    return Stored(name)
