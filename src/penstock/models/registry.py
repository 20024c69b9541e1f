"""Registry of model families by architecture. No torch."""

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
"""Entry point group with which installed packages add families."""
RUN_BY_TRANSFORMERS = (
    "Most other architectures run, more slowly, with --model-impl auto and the extra for transformers: "
    "pip install 'penstock-llm[transformers]'"
)
"""End of the error for an architecture without a family."""


def imported(path: str) -> Callable[..., Any]:
    """A function that is imported at its first call. Required for functions in modules that import torch.

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
    """A family of models: functions that read configurations and build models. Its module must not import torch."""

    architectures: tuple[str, ...]
    """Architectures in ``config.json``, with a language model head (``LlamaForCausalLM``)."""
    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    """Function from ``config.json`` to the configuration. The function may raise ``KeyError``, ``TypeError`` or
    ``ValueError`` with a message, and ``PenstockError`` (``unsupported``)."""
    build: Callable[..., Any] = DECODER
    """Function from a ``BuildContext``, the configuration, and the number of MTP heads to load, to the ``Model``."""
    build_classifier: Callable[..., Any] = SCORE
    """Function from a ``BuildContext`` and the configuration to the ``PoolerHead`` of a sequence classifier."""
    find_stored: Callable[[ModelConfig, str], Stored] | None = None
    """Function from the configuration and a module's name in the layers to its location in the checkpoint; None: the
    names are the same."""
    find_gguf: Callable[[ModelConfig, str], Stored] | None = None
    """Like ``find_stored``, for GGUF files, whose reader has the names of modules in the layers."""


TRANSFORMERS = Family(
    (),
    imported("penstock.models.transformers.config:read_config"),
    imported("penstock.models.transformers.model:build"),
)
"""Any architecture of the transformers library, run by its modules (``model_impl``)."""
_REGISTERED: dict[str, Family] = {}


@cache
def _installed() -> dict[str, Family]:
    """Families by architecture, from ``models/families/`` and from other packages, which take precedence."""
    from importlib.metadata import entry_points  # this import takes 20 ms; not all processes need families

    package, found = import_module("penstock.models.families"), []
    for module in iter_modules(package.__path__):
        values = vars(import_module(f"{package.__name__}.{module.name}")).values()
        found += [value for value in values if isinstance(value, Family)]
    for point in entry_points(group=ENTRY_POINTS):
        try:
            family = point.load()
            if not isinstance(family, Family):
                raise TypeError(f"the object is a {type(family).__name__}; it must be a penstock.models.Family")
            found.append(family)
        except Exception as error:  # third-party code may raise any exception
            package_name = point.dist.name if point.dist else "unknown"
            message = "model family %s of package %s is not available: importing %s failed (%s: %s)"
            logger.warning(message, point.name, package_name, point.value, type(error).__name__, error)
    return {architecture: family for family in found for architecture in family.architectures}


def register(family: Family) -> None:
    """Register a family in this process. The family replaces other families of its architectures."""
    _REGISTERED.update(dict.fromkeys(family.architectures, family))


def unregister(family: Family) -> None:
    """Remove a registered family."""
    for architecture in family.architectures:
        del _REGISTERED[architecture]


def architectures() -> list[str]:
    """Names of all architectures with a family."""
    return sorted({*_installed(), *_REGISTERED})


def has_family(architecture: str) -> bool:
    """Whether an architecture has a family."""
    return architecture in _REGISTERED or architecture in _installed()


def find_family(architecture: str, name: str = "", hint: str = RUN_BY_TRANSFORMERS) -> Family:
    """The family of an architecture.

    Args:
        name: architecture in ``config.json``, for the error message; empty: same as ``architecture``.
        hint: end of the error message: what to do for an unknown architecture.

    Raises ``PenstockError`` (``unsupported``) for an unknown architecture.
    """
    if family := _REGISTERED.get(architecture) or _installed().get(architecture):
        return family
    supported = ", ".join(architectures())
    message = f"architecture {name or architecture} is not supported; supported: {supported}. {hint}"
    raise PenstockError(Code.UNSUPPORTED, message, "model")


def family_of(config: ModelConfig) -> Family:
    """The family of a model, or ``TRANSFORMERS``."""
    return TRANSFORMERS if config.model_impl == "transformers" else find_family(config.architecture)
