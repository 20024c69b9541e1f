"""The classes of the transformers library that a ``config.json`` names, without code from the checkpoint."""

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


def unsupported(architecture: str, why: object) -> PenstockError:
    """The error for a model that transformers knows, and that cannot be run here."""
    words = f"{architecture} cannot be run by the modules of transformers over a paged KV cache: {why}"
    return PenstockError(Code.UNSUPPORTED, words, "model")


def knows(architecture: str) -> bool:
    """Whether transformers, which must be installed, has a causal language model of this name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def architectures_of(model_type: str) -> list[str]:
    """The causal language model of a ``model_type``, where ``config.json`` names none; empty for an unknown one."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    return [found] if found else []


def unknown() -> str:
    """What an error says of an architecture that transformers does not know."""
    words = f"transformers {version('transformers')} has no causal language model of this name"
    return f"{words}: a later one may (pip install -U transformers)"


def model_class(architecture: str) -> Any:
    """The class of a causal language model.

    Raises ``PenstockError`` (``unsupported``) if transformers is missing, or has no such class.
    """
    if not is_installed():
        words = f"it is run by transformers, which is not installed: pip install '{EXTRA}'"
    elif not knows(architecture):
        words = unknown()
    else:
        import transformers

        return getattr(transformers, architecture)
    raise PenstockError(Code.UNSUPPORTED, f"architecture {architecture}: {words}", "model")


def library_config(architecture: str, raw: Mapping[str, Any]) -> Any:
    """The configuration that transformers makes of a ``config.json``; raises ``PenstockError`` (``invalid``)."""
    found = model_class(architecture).config_class
    try:
        return found.from_dict({name: value for name, value in raw.items() if name != "auto_map"})
    except Exception as error:  # of its own kinds, and of those of huggingface_hub
        raise invalid("model", f"transformers does not take this config.json: {first_line(error)}") from error


def cache_windows(architecture: str, configuration: Any) -> list[int]:
    """The sliding window of each layer of the library's own KV cache, 0 if absent; without the layers that
    attend over the keys and values of others.

    Raises ``PenstockError`` (``unsupported``) if a layer keeps something else than keys and values.
    """
    from transformers.cache_utils import DummyLayer, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    try:
        layers = [each for each in DynamicCache(config=configuration).layers if type(each) is not DummyLayer]
    except Exception as error:  # of configurations that have no such cache
        raise unsupported(architecture, f"it has no KV cache of its own ({first_line(error)})") from error
    for layer in layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise unsupported(architecture, f"it keeps more than keys and values ({type(layer).__name__})")
    return [int(getattr(layer, "sliding_window", 0) or 0) for layer in layers]


def first_line(error: Exception) -> str:
    """The first line of an error's message that says something."""
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    return next((line for line in lines if not line.endswith(":")), type(error).__name__)[:300]
