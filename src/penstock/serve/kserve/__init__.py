"""The KServe v2 protocol, as Triton Inference Server speaks it, with the models that TensorRT-LLM has there."""

from penstock.serve.service import Service

from .http import SHAPE, add_routes
from .model import Answer, Call, Model
from .registry import Registry
from .tensors import BYTES, Spec, Tensor
from .text import Text
from .tokens import Postprocessing, Preprocessing, Tokens

__all__ = ["BYTES", "SHAPE", "Answer", "Call", "Model", "Registry", "Spec", "Tensor", "add_routes", "registry_of"]


def registry_of(service: Service, *others: Model) -> Registry:
    """The models of a server, which HTTP and gRPC answer for; ``others`` are those of other systems."""
    return Registry(
        service,
        [
            Text(service, "ensemble"),
            Text(service, "tensorrt_llm_bls", service.options.accumulate_tokens),
            Preprocessing(service),
            Tokens(service),
            Postprocessing(service),
            *others,
        ],
    )
