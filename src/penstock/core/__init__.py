"""Data classes shared by all packages: requests, sampling parameters, outputs, errors. Imports no torch."""

from .errors import Code, Failure, PenstockError
from .guided import GuidedDecodingParams, Vocabulary
from .lora import LoRARequest
from .outputs import FinishReason, Logprob, PerfMetrics, TokenDelta
from .pooling import PoolingParams
from .requests import EngineRequest, GeneratedSequence, ReasoningSpan
from .sampling import SamplingParams
from .tool_calls import MessageHeader, ToolCallParams
