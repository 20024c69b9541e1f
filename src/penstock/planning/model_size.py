"""The size of a model, from its ``config.json``: parameters of its matrices, and what a token keeps in the KV cache.

No torch, so that memory can be planned where no model runs. The engine reads ``config.json`` by family
(``checkpoint/model_config.py``); here, architectures that it does not run yet are understood, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.checkpoint.encoders import encoder_prefix, is_gated, max_encoder_len
from penstock.checkpoint.experts_config import sparse_layers
from penstock.checkpoint.gguf_file import TYPES
from penstock.checkpoint.model_config import COUNTED_WEIGHTS, padded_head_dim
from penstock.checkpoint.rope import max_model_len_of_config
from penstock.checkpoint.speech import cross_attention_weights, encoder_weights, is_speech
from penstock.checkpoint.stored_format import quantization_config_of, quantization_of, stored_format
from penstock.core.errors import invalid
from penstock.core.quantization import UNQUANTIZED, Format

from .vision_size import vision_weights


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a decoder. Numbers are counts of parameters or vector elements, not bytes."""

    architecture: str
    max_model_len: int
    """Longest sequence that the model is good for, in tokens."""
    dtype: str
    """Dtype of the checkpoint."""
    num_layers: int
    layer_weights: int
    """Parameters of all layers' matrices together."""
    hidden_size: int
    embedding_weights: int
    """Parameters of the embedding, and of the language model head where it is a matrix of its own."""
    head_weights: int
    """Parameters of the language model head, which are the embedding's, too, where the two are tied."""
    num_kv_heads: int
    """1 with ``latent``."""
    kv_dim: int
    """Numbers in a head's key, and in its value; with ``latent``, in the latent vector and its rotary key together."""
    latent: int
    """Numbers of the latent vector that a token keeps in place of keys and values (multi-head latent attention); 0
    where it keeps these."""
    mtp_weights: int
    """Parameters of the layers for multi-token prediction, which are loaded only where speculation uses them."""
    num_mtp_layers: int
    quantization: str
    """To quantize to at load where the user asks for nothing else, a name of ``SCHEMES``."""
    stored: Format = UNQUANTIZED
    """Format of the layers' matrices in a checkpoint that is quantized already."""
    gguf_layers: Mapping[Format, float] = field(default_factory=dict)
    """In a GGUF file, and where only experts are quantized, the shares of formats among the layers' weights."""
    gguf_head: Mapping[Format, float] = field(default_factory=dict)
    """Among the weights of embedding and language model head."""
    unquantized_weights: int = 0
    """Of the layers' weights, those that no format quantizes: latent attention's that are absorbed."""
    value_weights: int = 0
    """Parameters of all layers' value projections; with ``latent`` of the matrices that make latent vectors."""
    down_weights: int = 0
    """Parameters of all layers' down projections."""
    expert_weights: int = 0
    """Parameters of one expert, in all layers that have experts together."""
    vision_weights: int = 0
    """Parameters of the encoder of images or audio, which is not quantized; 0 for none."""
    encoder: bool = False
    """Whether it attends in both directions, and keeps keys and values of one layer only while a step runs."""

    def with_redundant_experts(self, count: int) -> ModelSize:
        """The same model with so many replicas of experts in each layer."""
        return replace(self, layer_weights=self.layer_weights + count * self.expert_weights)

    def on_cpu(self) -> ModelSize:
        """The same model on a CPU, where floating-point weights of 8 bits are dequantized."""
        return replace(self, stored=UNQUANTIZED) if self.stored.floating and not self.stored.is_mxfp4 else self


def model_size_of(config: Mapping[str, Any]) -> ModelSize:
    """Read a ``config.json``. Raises ``PenstockError`` (``invalid``) where it lacks a size."""
    try:
        size = _model_size(config)
        return replace(size, **config[COUNTED_WEIGHTS]) if COUNTED_WEIGHTS in config else size
    except KeyError as error:
        raise invalid("model", f"config.json lacks {error}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise invalid("model", f"config.json has a value of the wrong kind: {error}") from error


def _model_size(config: Mapping[str, Any]) -> ModelSize:
    hidden, heads, layers = (int(config[k]) for k in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    vocabulary, latent = int(config["vocab_size"]), int(config.get("kv_lora_rank") or 0)
    kv_heads = 1 if latent else int(config.get("num_key_value_heads") or heads)
    head_dim = padded_head_dim(int(config.get("head_dim") or hidden // heads))
    if latent:
        attention, absorbed, kv_dim = _latent_attention(config, hidden, heads)
    else:
        attention = 2 * hidden * head_dim * (heads + kv_heads)
        absorbed, kv_dim = 0, head_dim
    speech = is_speech(config)
    if speech:
        attention += cross_attention_weights(config)
    matrices = 2 if speech or config.get("model_type") == "starcoder2" or not is_gated(config) else 3  # without a gate
    dense = matrices * hidden * int(config.get("intermediate_size_mlp") or config["intermediate_size"])  # of Llama 4
    sparse, of_expert = _experts(config, hidden), 3 * hidden * _expert_size(config)
    plain = layers - _num_sparse_layers(config, layers) if sparse else layers
    mtp = int(config.get("num_nextn_predict_layers") or 0)
    encoder = encoder_prefix(config) is not None
    longest = max_encoder_len(config) if encoder else max_model_len_of_config(config)
    embeddings = vocabulary * hidden * (1 if encoder or config.get("tie_word_embeddings") else 2)
    if encoder:
        embeddings += _added_weights(config, longest) * hidden
    stored, layer_weights = stored_format(quantization_config_of(config)), layers * attention + plain * dense
    layer_weights += (layers - plain) * sparse
    shares = _gguf_shares(config, "layers")
    if stored.is_mxfp4:
        share = (layers - plain) * (sparse - _num_experts(config) * hidden) / layer_weights  # without routers
        shares = {stored: share, UNQUANTIZED: 1 - share}
    of_mtp_layer = dense if config.get("moe_num_experts") else sparse or dense  # ERNIE's has no experts
    return ModelSize(
        architecture=str(next(iter(config.get("architectures") or ["unknown"]))),
        max_model_len=longest,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
        num_layers=layers,
        layer_weights=layer_weights,
        hidden_size=hidden,
        embedding_weights=embeddings,
        head_weights=vocabulary * hidden,
        num_kv_heads=kv_heads,
        kv_dim=kv_dim,
        latent=latent,
        mtp_weights=mtp * (attention + of_mtp_layer + 2 * hidden * hidden),
        num_mtp_layers=mtp,
        quantization=quantization_of(config) or "none",
        stored=stored,
        gguf_layers=shares,
        gguf_head=_gguf_shares(config, "head"),
        unquantized_weights=layers * absorbed,
        value_weights=layers * hidden * (kv_dim if latent else head_dim * kv_heads),
        down_weights=plain * dense // matrices + (layers - plain) * sparse // 3,
        expert_weights=(layers - plain) * of_expert,
        vision_weights=encoder_weights(config) if speech else vision_weights(config),
        encoder=encoder,
    )


def _added_weights(config: Mapping[str, Any], max_len: int) -> int:
    """Rows of the table of positions and token types that an encoder adds to its embedding (``models/encoder.py``)."""
    types = 0 if encoder_prefix(config) == "model" else int(config.get("type_vocab_size") or 0)
    return max_len * max(types, 1 if encoder_prefix(config) in ("bert", "roberta") else 0)


def _gguf_shares(config: Mapping[str, Any], part: str) -> dict[Format, float]:
    """Shares of formats, of the numbers of weights by type that ``gguf_config`` has counted."""
    given = dict(config["gguf"][part]) if config.get("gguf") else {}
    counts = {name: max(int(count), 1) for name, count in given.items()}
    formats = {type.name: type.format for type in TYPES.values()}
    shares: dict[Format, float] = {}
    for name, count in counts.items():
        shares[formats[name]] = shares.get(formats[name], 0.0) + count / sum(counts.values())
    return shares


def _latent_attention(config: Mapping[str, Any], hidden: int, heads: int) -> tuple[int, int, int]:
    """Parameters of a layer's latent attention (DeepSeek-V2, section 2.1), those among them of the matrix that makes
    keys and values of latent vectors, and elements of a token's latent vector."""
    rope, nope = int(config["qk_rope_head_dim"]), int(config["qk_nope_head_dim"])
    rank, value, queries = int(config["kv_lora_rank"]), int(config["v_head_dim"]), heads * (nope + rope)
    low = int(config.get("q_lora_rank") or 0)
    q = low * (hidden + queries) if low else hidden * queries
    absorbed = rank * heads * (nope + value)
    return q + hidden * (rank + rope) + absorbed + heads * value * hidden, absorbed, rank + rope


def _experts(config: Mapping[str, Any], hidden: int) -> int:
    """Parameters of a layer's experts and their router; 0 where the model has none."""
    if not (routed := _num_experts(config)):
        return 0
    given = config.get("moe_intermediate_size") or config["intermediate_size"]
    if isinstance(given, list) and "moe_topk" not in config:  # ERNIE 4.5 VL: as many experts for text and for images
        routers, shared = 2 * routed * hidden, int(given[0]) * int(config.get("moe_num_shared_experts") or 0)
        return routers + 3 * hidden * (routed * sum(map(int, given)) + shared)
    size = _first(given)
    shared = size * int(config.get("n_shared_experts") or config.get("moe_num_shared_experts") or 0)
    if config.get("intermediate_size_mlp"):  # Llama 4
        shared = size
    if "moe_topk" in config:  # Hunyuan
        shared = size * _first(config.get("num_shared_expert") or 1)
    gated = int(config.get("shared_expert_intermediate_size") or 0)  # by a matrix of one output
    return (routed + bool(gated)) * hidden + 3 * hidden * (routed * size + (gated or shared))


def _num_experts(config: Mapping[str, Any]) -> int:
    """Experts of a layer that a router chooses from; 0 where the model has none."""
    names = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
    return next((_first(config[name]) for name in names if config.get(name)), 0)


def _first(value: Any) -> int:
    """A number, or that of the first layer where each has one."""
    return int(value[0] if isinstance(value, list) else value)


def _expert_size(config: Mapping[str, Any]) -> int:
    """Intermediate size of an expert, of a model that has any; of several kinds their sum."""
    given = config.get("moe_intermediate_size") or config["intermediate_size"]
    return sum(map(int, given)) if isinstance(given, list) else int(given)


def _num_sparse_layers(config: Mapping[str, Any], layers: int) -> int:
    """Layers with experts, of a model that has any."""
    if config.get("moe_num_experts") and (kinds := config.get("mlp_layer_types")):
        return list(kinds).count("sparse")
    if isinstance(config.get("moe_intermediate_size"), list) and "moe_topk" not in config:  # ERNIE 4.5 VL
        return layers - 1
    if (given := config.get("moe_layers")) is not None:
        return len(given)
    if config.get("n_routed_experts"):
        return len(sparse_layers(config, layers))
    dense = config.get("mlp_only_layers") or ()
    step = int(config.get("decoder_sparse_step") or config.get("interleave_moe_layer_step") or 1)
    first = int(config.get("moe_layer_start_index") or 0)
    end, interval = int(config.get("moe_layer_end_index") or -1), int(config.get("moe_layer_interval") or 1)
    numbers = range(first, layers if end < 0 else min(end + 1, layers))
    return sum(number not in dense and (number + 1) % step == 0 == (number + 1) % interval for number in numbers)
