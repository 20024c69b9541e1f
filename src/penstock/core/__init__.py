"""Plain data that every floor shares: requests, sampling parameters, deltas, errors. No torch, no I/O."""

from .errors import Code, Failure, PenstockError
from .guided import GuidedDecodingParams
from .messages import EngineRequest, FinishReason, Logprob, Thought, TokenDelta, Vocabulary
from .sampling import SamplingParams

__all__ = [
    "Code",
    "EngineRequest",
    "Failure",
    "FinishReason",
    "GuidedDecodingParams",
    "Logprob",
    "PenstockError",
    "SamplingParams",
    "Thought",
    "TokenDelta",
    "Vocabulary",
]
