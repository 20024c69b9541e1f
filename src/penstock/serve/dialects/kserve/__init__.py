"""The KServe v2 protocol as in Triton Inference Server, with the models of Triton's TensorRT-LLM backend."""

from .http_routes import add_routes
from .model import Model, ModelCall, ModelResponse
from .repository import ModelRepository
from .tensors import BYTES, Spec, Tensor
