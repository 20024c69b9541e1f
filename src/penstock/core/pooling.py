"""Parameters of requests whose prompts are pooled: embeddings, classes and scores."""

from __future__ import annotations

from typing import Literal

import msgspec

from .errors import invalid

PoolingType = Literal["last", "cls", "mean", "all"]


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a prompt's hidden states (after the last norm) are pooled. What is None is as the checkpoint says.

    Raises ``PenstockError`` (``invalid``) where a value is out of range.
    """

    pooling_type: PoolingType | None = None
    """The hidden state of the last or first (``cls``) token, the mean over all tokens, or those of all tokens; by
    default the last token's."""
    normalize: bool | None = None
    """Scale the vector to length 1; by default true."""
    dimensions: int | None = None
    """Number of leading dimensions to keep, before normalization; None is all."""
    use_activation: bool | None = None
    """Whether a classifier's outputs become probabilities; by default true."""
    head: Literal["", "dense", "classifier"] | None = None
    """What is computed of the pooled state: the checkpoint's dense layers of sentence-transformers, its classifier, or
    nothing."""
    activation: Literal["none", "sigmoid", "softmax"] | None = None
    """What makes probabilities of a classifier's outputs."""
    token_ids: tuple[int, ...] | None = None
    """Two tokens: how much larger the second one's logit is takes the place of the hidden state."""

    def __post_init__(self) -> None:
        if self.dimensions is not None and self.dimensions < 1:
            raise invalid("dimensions", f"must be at least 1, is {self.dimensions}", 1)
        if self.token_ids is not None and len(self.token_ids) not in (0, 2):
            raise invalid("token_ids", "must be two tokens, the one for no and the one for yes", 2)

    def with_defaults(self, defaults: PoolingParams) -> PoolingParams:
        """These parameters, and those of ``defaults`` in place of None."""
        given = {name: getattr(self, name) for name in self.__struct_fields__ if getattr(self, name) is not None}
        return msgspec.structs.replace(defaults, **given)
