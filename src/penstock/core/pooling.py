"""Parameters of pooling requests: embeddings, classification and scores."""

from __future__ import annotations

from typing import Literal

import msgspec

from .errors import invalid
from .named_parameters import NamedParameters

PoolingType = Literal["last", "cls", "mean", "all"]


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, metaclass=NamedParameters):
    """Pooling of a prompt's hidden states (after the last norm). None selects the checkpoint's value.

    Raises ``PenstockError`` (``invalid``) if a value is out of range.
    """

    pooling_type: PoolingType | None = None
    """Result: the hidden state of the last or first (``cls``) token, the mean over all tokens, or the states of all
    tokens. Default: ``last``."""
    normalize: bool | None = None
    """Scale the vector to length 1. Default: True."""
    dimensions: int | None = None
    """Number of leading dimensions to keep, before normalization. Default: all."""
    use_activation: bool | None = None
    """Convert a classifier's outputs to probabilities. Default: True."""
    head: Literal["", "dense", "classifier"] | None = None
    """Layers applied to the pooled state: the dense layers of sentence-transformers, the classifier, or none."""
    activation: Literal["none", "sigmoid", "softmax"] | None = None
    """Activation that converts a classifier's outputs to probabilities."""
    token_ids: tuple[int, ...] | None = None
    """Tokens for "no" and "yes" of a reranker: the logit of the second minus that of the first replaces the hidden
    state. Empty or None: not used."""

    def __post_init__(self) -> None:
        if self.dimensions is not None and self.dimensions < 1:
            raise invalid("dimensions", f"must be at least 1, is {self.dimensions}", 1)
        if self.token_ids is not None and len(self.token_ids) not in (0, 2):
            message = f"must be two tokens, for no and for yes; has {len(self.token_ids)}"
            raise invalid("token_ids", message, 2)

    def with_defaults(self, defaults: PoolingParams) -> PoolingParams:
        """Replace None by the values of ``defaults``."""
        given = {name: getattr(self, name) for name in self.__struct_fields__ if getattr(self, name) is not None}
        return msgspec.structs.replace(defaults, **given)
