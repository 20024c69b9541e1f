"""Plain data that all packages share: requests, sampling parameters, deltas, errors. No torch, no I/O."""

from .errors import Code, Failure, PenstockError
from .guided import GuidedDecodingParams, Vocabulary
from .lora import LoRARequest
from .outputs import FinishReason, Logprob, PerfMetrics, TokenDelta
from .pooling import PoolingParams
from .requests import EngineRequest, ReasoningSpan
from .sampling import SamplingParams
