"""Plain data that every floor shares: requests, sampling parameters, deltas, errors. No torch, no I/O."""

from .errors import Code, Failure, PenstockError
from .messages import EngineRequest, FinishReason, Logprob, TokenDelta
from .sampling import SamplingParams

__all__ = [
    "Code",
    "EngineRequest",
    "Failure",
    "FinishReason",
    "Logprob",
    "PenstockError",
    "SamplingParams",
    "TokenDelta",
]
