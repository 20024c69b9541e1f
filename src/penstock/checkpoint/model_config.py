"""Configuration of a model, read from ``config.json`` by its family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.core import Code, PenstockError

from .compressed_config import CompressedConfig
from .config_defaults import CLASSIFIER
from .decoder_options import DecoderOptions
from .encoders import EncoderConfig, architecture_name, encoder_prefix, is_classifier, num_labels
from .experts_config import ExpertsConfig
from .latent_config import LatentConfig
from .rope import max_model_len_of_config, rope_parameters_of
from .speech import SpeechConfig
from .state_config import StateConfig
from .stored_format import quantization_config_of, quantization_of

COUNTED_WEIGHTS = "counted_weights"
"""Key of the in-memory ``config.json`` of a model run by transformers, with counted parameters (fields of
``ModelSize``)."""
PADDED_TO = 16
"""Head sizes are padded with zeros to a multiple of this number, which the kernels require."""
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
"""``hidden_act`` → key of ``ops.activations.ACTIVATIONS``."""
DTYPES = {name: name for name in ("float32", "bfloat16", "float16", "float64")}
DTYPES |= {"float": "float32", "half": "float16", "double": "float64"}
"""``dtype`` → name of the dtype in torch."""
LayerKind = Literal["attention", "state", "both", "mlp"]
"""Parts of a layer before its MLP: attention, a part with recurrent state, both in parallel, or neither."""
ConfigJson = Mapping[str, Any]
"""``config.json`` as completed by ``read_config_json``."""
MAX_COUNT = 2**24
"""Maximum number of layers, heads, tokens in the vocabulary, and elements of a vector; no known model has more."""


@dataclass(frozen=True)
class ModelConfig:
    """Configuration of a model. Fields without a description have their meaning in ``config.json``."""

    architecture: str
    """Architecture with a language model head: ``LlamaForCausalLM``, also for a checkpoint of ``LlamaModel``."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Elements per head in the computation. Decoders pad heads to a multiple of ``PADDED_TO``."""
    max_model_len: int
    """Maximum sequence length in tokens, with positions extended by ``rope_parameters``."""
    max_position_embeddings: int
    rms_norm_eps: float
    """Epsilon of all norms, including layer norms."""
    rope_parameters: Mapping[str, Any]
    tie_word_embeddings: bool
    has_lm_head: bool
    """False for embedding models and classifiers."""
    num_mtp_layers: int
    """Number of layers for multi-token prediction, which follow the decoder's layers (``num_nextn_predict_layers``)."""
    dtype: str
    """Dtype of the checkpoint, as named by torch: ``bfloat16``."""
    quantization: str
    """Quantization at load requested by ``config.json``: a key of ``SCHEMES``. The option ``quantization`` overrides
    it."""
    sliding_windows: tuple[int, ...]
    """Sliding window of each layer in tokens; 0: full attention."""
    raw: Mapping[str, Any]
    """The completed ``config.json``."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """True if queries and keys are normalized (``options.qk_norm``)."""
    experts: ExpertsConfig | None = None
    """Mixture of experts; None for dense models."""
    latent: LatentConfig | None = None
    """Multi-head latent attention; None: grouped-query attention."""
    compressed: CompressedConfig | None = None
    """Compressed attention and hyper-connections (DeepSeek-V4); None: not used."""
    layer_kinds: tuple[LayerKind, ...] = ()
    """Kind of each layer; empty: attention in all layers."""
    layer_heads: tuple[tuple[int, int], ...] = ()
    """Number of KV heads, and elements per head, of each layer (Gemma 4); empty: ``num_kv_heads`` and ``head_dim``."""
    kv_sources: tuple[int, ...] = ()
    """For each layer, the layer whose keys and values it attends to: itself, or an earlier one. The layers with keys
    and values come first (Gemma 4). Empty: itself."""
    residual_streams: int = 1
    """Number of residual streams (DeepSeek-V4, Gemma 3n)."""
    state: StateConfig | None = None
    """Layers with recurrent state; None: no such layers."""
    options: DecoderOptions = field(default_factory=DecoderOptions)
    local_rope_parameters: Mapping[str, Any] | None = None
    """Rotary parameters of layers with a sliding window; None: same as ``rope_parameters``."""
    counted_weights: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``ModelSize`` of a family whose layers differ from those that ``size_of`` counts."""
    vision_weights: int = 0
    """Number of parameters in the matrices of the vision tower and its projector; 0: no tower."""
    encoder: EncoderConfig | None = None
    """Encoder (bidirectional attention); None: decoder."""
    speech: SpeechConfig | None = None
    """Audio encoder of a transcription model; None for other models."""
    stored_head_dim: int = 0
    """Elements per head in the checkpoint, if ``head_dim`` is padded; else 0."""
    num_labels: int = 0
    """Number of outputs of the classifier; 0: no classifier."""
    model_impl: Literal["penstock", "transformers"] = "penstock"
    """Implementation: Penstock's family, or the modules of transformers."""

    @property
    def index_dim(self) -> int:
        """Elements of a token's index key (sparse attention); 0: dense attention."""
        return self.latent.indexer.dim if self.latent and self.latent.indexer else 0

    @property
    def shared_layers(self) -> frozenset[int]:
        """Layers that attend to the keys selected by the layer before them (sparse attention)."""
        return self.latent.indexer.shared_layers if self.latent and self.latent.indexer else frozenset()

    @property
    def stream_size(self) -> int:
        """Elements of a token's residual stream, or of all its residual streams."""
        return self.hidden_size * self.residual_streams

    @property
    def entry_dims(self) -> tuple[int, ...]:
        """Elements of a token's compressed entry and its index key in each layer (DeepSeek-V4); (): none."""
        return tuple(map(self.compressed.entry_dim, range(self.num_layers))) if self.compressed else ()

    def has_attention(self, layer: int) -> bool:
        """Whether a layer, or MTP layer, has attention."""
        return layer >= len(self.layer_kinds) or self.layer_kinds[layer] in ("attention", "both")

    def has_kv(self, layer: int) -> bool:
        """Whether a layer, or MTP layer, has keys and values."""
        return self.has_attention(layer) and self.kv_source(layer) == layer

    def kv_source(self, layer: int) -> int:
        """The layer whose keys and values a layer attends to."""
        return self.kv_sources[layer] if layer < len(self.kv_sources) else layer

    def kv_heads_of(self, layer: int) -> int:
        """Number of KV heads of a layer, or MTP layer."""
        return self.layer_heads[layer][0] if layer < len(self.layer_heads) else self.num_kv_heads

    def head_dim_of(self, layer: int) -> int:
        """Elements per head of a layer, or MTP layer."""
        return self.layer_heads[layer][1] if layer < len(self.layer_heads) else self.head_dim

    @property
    def kv_head_counts(self) -> set[int]:
        """Numbers of KV heads of the layers."""
        return {self.num_kv_heads, *(heads for heads, _ in self.layer_heads)}

    def has_state(self, layer: int) -> bool:
        """Whether a layer has recurrent state."""
        return layer < len(self.layer_kinds) and self.layer_kinds[layer] in ("state", "both")

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has an MLP."""
        only = self.options.separate_mlps and layer < len(self.layer_kinds)
        return not only or self.layer_kinds[layer] == "mlp"

    @property
    def has_vision(self) -> bool:
        """Whether prompts may have images."""
        return self.vision_weights > 0

    @property
    def rotary_dim(self) -> int:
        """Number of rotated elements per head."""
        if self.latent:
            return self.latent.qk_rope_head_dim
        if self.compressed:
            return self.compressed.rope_dim
        if self.rope_parameters["rope_type"] == "proportional":  # this type has frequencies for the whole head
            return self.checkpoint_head_dim
        return int(self.checkpoint_head_dim * self.options.partial_rotary_factor)

    @property
    def checkpoint_head_dim(self) -> int:
        """Elements per head in the checkpoint."""
        return self.stored_head_dim or self.head_dim

    def rope_of(self, layer: int) -> Mapping[str, Any] | None:
        """The rotary parameters of a layer, or MTP layer; None: no rotary embedding."""
        if layer < len(self.options.rope_layers) and not self.options.rope_layers[layer]:
            return None
        if layer >= self.num_layers:
            return self.rope_parameters
        if self.local_rope_parameters is not None and self.sliding_windows[layer]:
            return self.local_rope_parameters
        return self.rope_parameters

    @property
    def quantization_config(self) -> Mapping[str, Any] | None:
        """``quantization_config`` of a checkpoint with quantized weights; None for other checkpoints."""
        return quantization_config_of(self.raw) if quantization_of(self.raw) is None else None


def dense_config(raw: Mapping[str, Any], **overrides: Any) -> ModelConfig:
    """The configuration of a dense decoder with the usual field names.

    Args:
        raw: ``config.json``.
        overrides: fields of ``ModelConfig`` that override those read from ``raw``.

    Raises ``KeyError``, ``TypeError`` or ``ValueError`` for a missing or invalid field.
    """
    hidden, vocabulary, intermediate, heads, layers = (
        _count(raw, name)
        for name in ("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    )
    max_position_embeddings, rope = int(raw.get("max_position_embeddings") or 2048), rope_parameters_of(raw)
    bias = bool(raw.get("attention_bias", False))
    architecture, has_lm_head = architecture_of(raw)
    fields: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": _count(raw, "num_key_value_heads") if raw.get("num_key_value_heads") else heads,
        "head_dim": _count(raw, "head_dim") if raw.get("head_dim") else hidden // heads,
        "max_model_len": max_model_len_of_config(raw),
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": float(raw.get("rms_norm_eps") or 1e-6),
        "rope_parameters": rope,
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings")),
        "has_lm_head": has_lm_head,
        "num_mtp_layers": int(raw.get("num_nextn_predict_layers") or 0),
        "dtype": dtype_of(raw),
        "quantization": quantization_of(raw) or "none",
        "sliding_windows": sliding_windows_by_layer_types(raw, layers) or (0,) * layers,
        "raw": raw,
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": bool(raw.get("mlp_bias", False)),
        "num_labels": num_labels(raw) if is_classifier(raw) else 0,
    }
    if "options" not in overrides:
        fields["options"] = options_of(raw)
    return ModelConfig(**fields | overrides)


def options_of(raw: Mapping[str, Any], **options: Any) -> DecoderOptions:
    """Decoder options with the activation of ``config.json``.

    Args:
        options: further fields of ``DecoderOptions``.

    Raises ``PenstockError`` (``unsupported``) for an unknown activation.
    """
    return DecoderOptions(**{"activation": activation_of(str(raw.get("hidden_act") or "silu"))} | options)


def activation_of(name: str) -> str:
    """The key of ``ops.activations.ACTIVATIONS`` for a ``hidden_act``.

    Raises ``PenstockError`` (``unsupported``) for an unknown activation.
    """
    if name not in ACTIVATIONS:
        message = f"activation {name[:40]!r} is not supported; supported are {', '.join(ACTIVATIONS)}"
        raise PenstockError(Code.UNSUPPORTED, message, "model")
    return ACTIVATIONS[name]


def _count(raw: Mapping[str, Any], name: str) -> int:
    if not 1 <= (value := int(raw[name])) <= MAX_COUNT:
        raise ValueError(f"{name} is {value}; it must be from 1 to {MAX_COUNT}")
    return value


def dtype_of(raw: Mapping[str, Any]) -> str:
    """The dtype of a checkpoint, as named by torch. Raises ``ValueError`` for an unknown dtype."""
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16")
    if name not in DTYPES:
        raise ValueError(f"dtype is {name[:40]!r}; supported are {', '.join(DTYPES)}")
    return DTYPES[name]


def architecture_of(raw: Mapping[str, Any]) -> tuple[str, bool]:
    """The architecture of a ``config.json``, and whether the checkpoint has a language model head."""
    architecture = architecture_name(raw)
    if encoder_prefix(raw) is not None:
        return architecture, False
    if is_classifier(raw):
        return architecture.removesuffix(CLASSIFIER) + "ForCausalLM", False
    if architecture.endswith("Model"):
        return architecture.removesuffix("Model") + "ForCausalLM", False
    return architecture, True


def sliding_windows_by_layer_types(raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...] | None:
    """Sliding window of each layer from ``layer_types``; None if absent."""
    window = raw.get("sliding_window") or 0
    if types := raw.get("layer_types"):
        return tuple(window if kind == "sliding_attention" else 0 for kind in types)
    return None


def sliding_windows_by_pattern(raw: Mapping[str, Any], pattern: int) -> tuple[int, ...]:
    """Sliding window of each layer from ``layer_types``; if absent, every ``pattern``-th layer has full attention."""
    layers, window = int(raw["num_hidden_layers"]), int(raw.get("sliding_window") or 0)
    if windows := sliding_windows_by_layer_types(raw, layers):
        return windows
    return tuple(0 if pattern and (layer + 1) % pattern == 0 else window for layer in range(layers))


def padded_head_dim(head_dim: int) -> int:
    """Elements per head in the computation and the KV cache: ``head_dim`` rounded up to a multiple of ``PADDED_TO``."""
    return -(-head_dim // PADDED_TO) * PADDED_TO
