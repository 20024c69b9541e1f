"""Plain data that all packages share: requests, sampling parameters, deltas, errors. No torch, no I/O."""

from .errors import Code, Failure, PenstockError
from .guided import GuidedDecodingParams
from .lora import LoRARequest
from .messages import EngineRequest, FinishReason, Logprob, PerfMetrics, ReasoningSpan, TokenDelta, Vocabulary
from .pooling import PoolingParams
from .sampling import SamplingParams

__all__ = [
    "Code",
    "EngineRequest",
    "Failure",
    "FinishReason",
    "GuidedDecodingParams",
    "LoRARequest",
    "Logprob",
    "PenstockError",
    "PerfMetrics",
    "PoolingParams",
    "ReasoningSpan",
    "SamplingParams",
    "TokenDelta",
    "Vocabulary",
]
