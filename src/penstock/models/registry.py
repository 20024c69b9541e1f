"""Families of models by the architecture that a checkpoint's ``config.json`` names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from penstock.checkpoint.model_config import ModelConfig
from penstock.core import Code, PenstockError
from penstock.layers import BuildContext, PoolerHead
from penstock.layers.pooler import dense

from .model import Model
from .stored import Stored


def score_classifier(context: BuildContext, config: ModelConfig) -> PoolerHead:
    """The classifier of decoders: a matrix without bias."""
    return PoolerHead([dense(context, "score", config.hidden_size, config.num_labels, bias=False)], config.num_labels)


@dataclass(frozen=True)
class Family:
    """A family of models: how its architectures are configured and built. Each module of ``models/`` has one."""

    architectures: tuple[str, ...]
    """Values of ``architectures`` in ``config.json``, with their head: ``LlamaForCausalLM``."""
    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    """From ``config.json``. May raise ``KeyError``, ``TypeError`` or ``ValueError``, which name what is wrong, and
    ``PenstockError`` (``unsupported``)."""
    build: Callable[[BuildContext, ModelConfig, int], Model]
    """Takes the context, the configuration, and the number of MTP heads to load."""
    build_classifier: Callable[[BuildContext, ModelConfig], PoolerHead] = score_classifier
    """Of architectures for sequence classification."""
    find_stored: Callable[[ModelConfig, str], Stored] | None = None
    """Where in a checkpoint a module lies that layers ask for by its name; None where it lies under that name."""


OTHERS = (
    "Most others run, more slowly, with --model-impl auto and the extra for transformers: "
    "pip install 'penstock-llm[transformers]'"
)
_FAMILIES: dict[str, Family] = {}


def register(family: Family) -> None:
    """Register a family; it replaces families of the same architectures."""
    _FAMILIES.update(dict.fromkeys(family.architectures, family))


def unregister(family: Family) -> None:
    """Remove a registered family."""
    for architecture in family.architectures:
        del _FAMILIES[architecture]


def find_family(architecture: str, name: str, others: str = OTHERS) -> Family:
    """The family of an architecture.

    Args:
        name: of the architecture in ``config.json``, for the error.
        others: for the error, what is to be known of other architectures.

    Raises ``PenstockError`` (``unsupported``) for an unknown architecture.
    """
    if architecture not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        words = f"architecture {name}; known are {known}. {others}"
        raise PenstockError(Code.UNSUPPORTED, words, "model")
    return _FAMILIES[architecture]


def has_family(architecture: str) -> bool:
    """Whether a family is registered for an architecture."""
    return architecture in _FAMILIES


def family_of(config: ModelConfig) -> Family:
    """The family whose implementation computes a model."""
    if config.model_impl == "transformers":
        family: Family = resolve_name("penstock.models.transformers:FAMILY")
        return family
    return find_family(config.architecture, config.architecture)
