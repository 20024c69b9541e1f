"""Classes of the transformers library for a ``config.json``. Code from checkpoints is never run."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid

EXTRA = "penstock-llm[transformers]"


def is_installed() -> bool:
    """Whether transformers can be imported."""
    return find_spec("transformers") is not None


def unsupported(architecture: str, reason: object) -> PenstockError:
    """The error for a model of transformers that cannot be run with a paged KV cache."""
    message = f"{architecture} cannot be run by the modules of transformers over a paged KV cache: {reason}"
    return PenstockError(Code.UNSUPPORTED, message, "model")


def has_causal_lm(architecture: str) -> bool:
    """Whether transformers has a causal language model of this architecture. transformers must be installed."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def architectures_of(model_type: str) -> list[str]:
    """Default of ``architectures``: the causal language model of a ``model_type``; empty for an unknown type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    return [found] if found else []


def unknown_message() -> str:
    """End of the error message for an architecture that transformers does not have."""
    message = f"transformers {version('transformers')} has no causal language model of this name"
    return f"{message}: a later version may have it (pip install -U transformers)"


def model_class(architecture: str) -> Any:
    """The class of a causal language model.

    Raises ``PenstockError`` (``unsupported``) if transformers is missing, or lacks the class.
    """
    if not is_installed():
        message = f"it is run by transformers, which is not installed: pip install '{EXTRA}'"
    elif not has_causal_lm(architecture):
        message = unknown_message()
    else:
        import transformers

        return getattr(transformers, architecture)
    raise PenstockError(Code.UNSUPPORTED, f"architecture {architecture}: {message}", "model")


def library_config(architecture: str, raw: Mapping[str, Any]) -> Any:
    """Configuration object of transformers for a ``config.json``. A rejected value raises ``PenstockError``."""
    found = model_class(architecture).config_class
    try:
        values = found._decode_special_floats({name: value for name, value in raw.items() if name != "auto_map"})
        return found.from_dict(values)
    except Exception as error:  # transformers and huggingface_hub raise exceptions of several classes
        raise invalid("model", f"transformers rejects this config.json: {first_line(error)}") from error


def cache_windows(configuration: Any) -> list[int] | None:
    """Sliding window of each layer in transformers' KV cache (0: full attention), without the layers that share the
    keys and values of another layer. None if the model has no such cache, or layers with other state."""
    from transformers.cache_utils import DummyLayer, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    try:
        layers = [each for each in DynamicCache(config=configuration).layers if type(each) is not DummyLayer]
    except Exception:  # transformers raises for configurations without a KV cache
        return None
    if any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers):
        return None
    return [int(getattr(layer, "sliding_window", 0) or 0) for layer in layers]


def first_line(error: Exception) -> str:
    """The first line of an error message that is not only a heading (no colon at its end)."""
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    return next((line for line in lines if not line.endswith(":")), type(error).__name__)[:300]
