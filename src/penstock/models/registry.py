"""Families of models by the architecture that a checkpoint's ``config.json`` names. No torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules, resolve_name
from typing import Any

from penstock.checkpoint.model_config import ModelConfig
from penstock.core import Code, PenstockError

from .stored import Stored

logger = logging.getLogger(__name__)

ENTRY_POINTS = "penstock.models"
"""Group of entry points by which installed packages add families."""
OTHERS = (
    "Most others run, more slowly, with --model-impl auto and the extra for transformers: "
    "pip install 'penstock-llm[transformers]'"
)


def imported(path: str) -> Callable[..., Any]:
    """A function that is imported when it is called, as modules that import torch must be.

    Args:
        path: ``package.module:name``.
    """

    def call(*args: Any) -> Any:
        return resolve_name(path)(*args)

    return call


DECODER = imported("penstock.models.decoder:Decoder")
SCORE = imported("penstock.models.heads:score_classifier")


@dataclass(frozen=True)
class Family:
    """A family of models: how its architectures are configured and built. Importing it needs no torch."""

    architectures: tuple[str, ...]
    """Values of ``architectures`` in ``config.json``, with their head: ``LlamaForCausalLM``."""
    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    """From ``config.json``. May raise ``KeyError``, ``TypeError`` or ``ValueError``, which name what is wrong, and
    ``PenstockError`` (``unsupported``)."""
    build: Callable[..., Any] = DECODER
    """Makes the ``Model`` of a ``BuildContext``, the configuration, and the number of MTP heads to load."""
    build_classifier: Callable[..., Any] = SCORE
    """Makes the ``PoolerHead`` of architectures for sequence classification, of a ``BuildContext`` and the
    configuration."""
    find_stored: Callable[[ModelConfig, str], Stored] | None = None
    """Where in a checkpoint a module lies that layers ask for by its name; None if it lies under that name."""


TRANSFORMERS = Family(
    (),
    imported("penstock.models.transformers.config:read_config"),
    imported("penstock.models.transformers.model:build"),
)
"""Any architecture that the transformers library knows, run by its modules (``model_impl``)."""
_REGISTERED: dict[str, Family] = {}


@cache
def _installed() -> dict[str, Family]:
    """The families of ``models/families/``, and those of other packages, which replace them."""
    from importlib.metadata import entry_points  # which takes 20 ms to import: not all processes look families up

    package, found = import_module("penstock.models.families"), []
    for module in iter_modules(package.__path__):
        values = vars(import_module(f"{package.__name__}.{module.name}")).values()
        found += [value for value in values if isinstance(value, Family)]
    for point in entry_points(group=ENTRY_POINTS):
        try:
            family = point.load()
            if not isinstance(family, Family):
                raise TypeError(f"it is a {type(family).__name__}, and must be a penstock.models.Family")
            found.append(family)
        except Exception as error:  # of any kind: it is other people's code
            package_name = point.dist.name if point.dist else "unknown"
            message = "the model family %s of the package %s is left out: importing %s failed (%s: %s)"
            logger.warning(message, point.name, package_name, point.value, type(error).__name__, error)
    return {architecture: family for family in found for architecture in family.architectures}


def register(family: Family) -> None:
    """Register a family in this process; it replaces families of the same architectures."""
    _REGISTERED.update(dict.fromkeys(family.architectures, family))


def unregister(family: Family) -> None:
    """Remove a registered family."""
    for architecture in family.architectures:
        del _REGISTERED[architecture]


def architectures() -> list[str]:
    """The names of all architectures that have a family."""
    return sorted({*_installed(), *_REGISTERED})


def has_family(architecture: str) -> bool:
    """Whether an architecture has a family."""
    return architecture in _REGISTERED or architecture in _installed()


def find_family(architecture: str, name: str = "", others: str = OTHERS) -> Family:
    """The family of an architecture.

    Args:
        name: of the architecture in ``config.json``, for the error, where it is another one.
        others: for the error, what is to be known of other architectures.

    Raises ``PenstockError`` (``unsupported``) for an unknown architecture.
    """
    if family := _REGISTERED.get(architecture) or _installed().get(architecture):
        return family
    message = f"architecture {name or architecture}; known are {', '.join(architectures())}. {others}"
    raise PenstockError(Code.UNSUPPORTED, message, "model")


def family_of(config: ModelConfig) -> Family:
    """The family whose implementation computes a model."""
    return TRANSFORMERS if config.model_impl == "transformers" else find_family(config.architecture)
