"""The KServe v2 protocol, as Triton Inference Server speaks it, with the models that TensorRT-LLM has there."""

from .http_routes import SHAPE, add_routes
from .model import Answer, Call, Model
from .registry import Registry
from .tensors import BYTES, Spec, Tensor

__all__ = ["BYTES", "SHAPE", "Answer", "Call", "Model", "Registry", "Spec", "Tensor", "add_routes"]
