"""The architecture of a GGUF file."""

from penstock.core import Code, PenstockError

from . import gguf_alibi as alibi
from . import gguf_gemma as gemma
from . import gguf_states as states
from .gguf_architectures import ARCHITECTURES, DEEPSEEK_V3, MISTRAL, MIXTRAL, OLMO3, ROUTER_BIAS, Architecture
from .gguf_metadata import Metadata

ALL = ARCHITECTURES | alibi.ARCHITECTURES | gemma.ARCHITECTURES | states.ARCHITECTURES
SIGMOID = 2
"""``expert_gating_func`` of routers with sigmoid scores."""


def architecture_of(metadata: Metadata) -> Architecture:
    """The architecture of a file. Where several architectures share a name, metadata and tensors decide.

    Raises ``PenstockError`` (``unsupported``) for an unknown architecture.
    """
    if (name := metadata.architecture) not in ALL:
        known = ", ".join(ALL)
        message = f"{metadata.file.path} has architecture {name!r}, which is not supported; supported: {known}"
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    match name:
        case "llama" if metadata.size("expert_count", 0):
            return MIXTRAL
        case "llama" if metadata.size("attention.sliding_window", 0):
            return MISTRAL
        case "olmo2" if metadata.size("attention.sliding_window", 0):
            return OLMO3
        case "deepseek2" if metadata.size("expert_gating_func", 0) == SIGMOID or metadata.has_any(ROUTER_BIAS):
            return DEEPSEEK_V3
        case "mamba" if metadata.flag("ssm.dt_b_c_rms", False):
            return states.FALCON_MAMBA
        case "granitehybrid" if metadata.flag("rope.scaling.finetuned", False) and not metadata.number(
            "embedding_scale", 0.0
        ):
            return states.BAMBA
    return ALL[name]
