"""The KServe v2 protocol, as Triton Inference Server speaks it, with the models that TensorRT-LLM has there."""

from .http_routes import ERROR_FORMAT, add_routes
from .model import Model, ModelCall, ModelResponse
from .repository import ModelRepository
from .tensors import BYTES, Spec, Tensor

__all__ = [
    "BYTES",
    "ERROR_FORMAT",
    "Model",
    "ModelCall",
    "ModelRepository",
    "ModelResponse",
    "Spec",
    "Tensor",
    "add_routes",
]
