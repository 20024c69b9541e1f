"""Size of a model: number of parameters of its matrices, and KV cache entries of a token, from its configuration.

Imports no torch, so that memory can be planned on any machine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.checkpoint.gguf_file import TYPES
from penstock.checkpoint.model_config import COUNTED_WEIGHTS, ModelConfig
from penstock.checkpoint.state_spec import StateSpec
from penstock.checkpoint.stored_format import quantization_config_of, stored_format
from penstock.core.quantization import UNQUANTIZED, Format
from penstock.models.read_config import config_of


@dataclass(frozen=True)
class ModelSize:
    """Size of a model. Numbers count parameters or vector elements, not bytes."""

    architecture: str
    max_model_len: int
    """Context length in tokens."""
    dtype: str
    """Data type of the checkpoint."""
    num_layers: int
    layer_weights: int
    """Parameters of the matrices of all layers."""
    hidden_size: int
    embedding_weights: int
    """Parameters of the embedding, and of the LM head if it is a separate matrix."""
    head_weights: int
    """Parameters of the LM head, which may be tied to the embedding."""
    num_kv_heads: int
    """Number of KV heads; 1 with ``latent``."""
    kv_dim: int
    """Elements of a head's key or value; with ``latent``, of the latent vector plus its rotary key."""
    latent: int
    """Elements of the latent vector that replaces keys and values (multi-head latent attention); 0: not used."""
    mtp_weights: int
    """Parameters of the layers for multi-token prediction, which are loaded only if speculation uses them."""
    num_mtp_layers: int
    quantization: str
    """Default quantization at load, a key of ``SCHEMES``."""
    stored: Format = UNQUANTIZED
    """Format of the layers' matrices in the checkpoint."""
    gguf_layers: Mapping[Format, float] = field(default_factory=dict)
    """Share of each format among the layers' weights, in GGUF files and if only experts are quantized."""
    gguf_head: Mapping[Format, float] = field(default_factory=dict)
    """Share of each format among the weights of embedding and LM head, in GGUF files."""
    unquantized_weights: int = 0
    """Parameters of the layers' matrices that are never quantized: absorbed matrices of latent attention."""
    value_weights: int = 0
    """Parameters of all layers' value projections; with ``latent``, of the projections to latent vectors."""
    down_weights: int = 0
    """Parameters of all layers' down projections."""
    expert_weights: int = 0
    """Parameters of one expert, summed over all layers with experts."""
    vision_weights: int = 0
    """Parameters of the image or audio encoder, which is not quantized; 0: no encoder."""
    num_kv_layers: int = -1
    """Number of layers with keys and values; -1: all."""
    kv_shapes: tuple[tuple[int, int], ...] = ()
    """``num_kv_heads`` and ``kv_dim`` of each layer with keys and values, which are the first layers; empty: the same
    for all."""
    num_joined_layers: int = 0
    """Number of the last layers that must be in the same pipeline stage, because some of them attend to keys and values
    of others."""
    states: tuple[StateSpec, ...] = ()
    """Recurrent state of each layer that has one, on one rank for all heads."""
    encoder: bool = False
    """True for bidirectional models, which keep the keys and values of a single layer, and only during a step."""
    index_dim: int = 0
    """Elements of a token's index key (sparse attention), in addition to ``kv_dim``; 0: dense attention."""
    shared_layers: frozenset[int] = frozenset()
    """Layers that use the key selection of the layer before them, which must be in the same pipeline stage."""
    entry_dims: tuple[int, ...] = ()
    """Elements of a token's compressed entry and its index key in each layer (DeepSeek-V4); (): none."""

    def with_redundant_experts(self, count: int) -> ModelSize:
        """Size with ``count`` redundant experts in each layer."""
        return replace(self, layer_weights=self.layer_weights + count * self.expert_weights)

    def on_cpu(self) -> ModelSize:
        """Size on a CPU, where 8-bit floating-point weights are dequantized."""
        return replace(self, stored=UNQUANTIZED) if self.stored.floating and not self.stored.is_mxfp4 else self


def model_size_of(raw: Mapping[str, Any]) -> ModelSize:
    """Size of a model of any architecture, from its ``config.json``.

    Raises ``PenstockError`` (``invalid``) if a size is missing.
    """
    return size_of(config_of(raw))


def size_of(config: ModelConfig) -> ModelSize:
    """Size of a model, from its parsed configuration."""
    hidden, layers, latent, raw = config.hidden_size, config.num_layers, config.latent, config.raw
    attention, absorbed = _attention(config)
    kv_heads, kv_dim = config.num_kv_heads, config.head_dim
    if latent:
        kv_heads, kv_dim = 1, latent.kv_lora_rank + latent.qk_rope_head_dim
    compressed = config.compressed
    matrices = 3 if config.options.gated_mlp else 2
    dense = matrices * hidden * config.intermediate_size
    sparse = routers = expert = 0
    dense_layers: Collection[int] = range(layers + config.num_mtp_layers)
    if experts := config.experts:
        dense_layers, kinds = experts.dense_layers, 2 if experts.vision_intermediate_size else 1
        matrices = 3 if experts.projections[0] else 2
        inputs = experts.latent_size or hidden
        expert = matrices * inputs * (experts.intermediate_size + experts.vision_intermediate_size)
        routers = (kinds * experts.num_experts + bool(experts.shared_gate)) * hidden
        sparse = routers + experts.num_experts * expert + matrices * hidden * experts.shared_size
        sparse += 2 * hidden * experts.latent_size
    with_mlp = list(filter(config.has_mlp, range(layers)))
    plain = sum(layer in dense_layers for layer in with_mlp)
    num_sparse, with_kv = len(with_mlp) - plain, list(filter(config.has_kv, range(layers)))
    num_kv = len(with_kv)
    shared = [source for layer, source in enumerate(config.kv_sources) if source != layer]
    states = state_specs_of(config)
    state_weights, plain_state_weights = (
        len(states) * each for each in (config.state.num_weights(hidden) if config.state else (0, 0))
    )
    attentions = num_kv * attention + _indexers(config)
    if compressed:
        each = (compressed.num_weights(layer, hidden, config.num_heads) for layer in range(layers))
        attentions = sum(each) + compressed.hyper.streams**2 * hidden  # and those of the head's weights of streams
        absorbed = config.num_heads * compressed.head_dim * compressed.group_rank
    layer_weights = attentions + state_weights + plain * dense + num_sparse * sparse
    stored, shares = stored_format(quantization_config_of(raw)), _gguf_shares(raw, "layers")
    if stored.is_mxfp4:
        share = num_sparse * (sparse - routers) / layer_weights
        shares = {stored: share, UNQUANTIZED: 1 - share}
    mtp = dense if layers in dense_layers else sparse
    head = config.vocab_size * hidden
    size = ModelSize(
        architecture=str(next(iter(raw.get("architectures") or ["unknown"]))),
        max_model_len=config.max_model_len,
        dtype=config.dtype,
        num_layers=layers,
        layer_weights=layer_weights,
        hidden_size=hidden,
        embedding_weights=head * (1 if config.tie_word_embeddings else 2) + _position_weights(config),
        head_weights=head,
        num_kv_heads=kv_heads,
        kv_dim=kv_dim,
        latent=latent.kv_lora_rank if latent else compressed.head_dim if compressed else 0,
        entry_dims=config.entry_dims,
        index_dim=config.index_dim,
        shared_layers=config.shared_layers,
        mtp_weights=config.num_mtp_layers * (attention + _indexer(config) + mtp + 2 * hidden * hidden),
        num_mtp_layers=config.num_mtp_layers,
        quantization=config.quantization,
        stored=stored,
        gguf_layers=shares,
        gguf_head=_gguf_shares(raw, "head"),
        unquantized_weights=num_kv * absorbed + plain_state_weights,
        value_weights=num_kv * hidden * kv_dim * kv_heads,
        down_weights=plain * dense // matrices + num_sparse * sparse // matrices,
        expert_weights=num_sparse * expert,
        vision_weights=_speech_weights(config) if config.speech else config.vision_weights,
        num_kv_layers=num_kv,
        kv_shapes=tuple(config.layer_heads[layer] for layer in with_kv) if config.layer_heads else (),
        num_joined_layers=layers - min(shared) if shared else 0,
        states=states,
        encoder=config.encoder is not None,
    )
    return replace(size, **config.counted_weights, **raw.get(COUNTED_WEIGHTS, {}))


def state_specs_of(config: ModelConfig) -> tuple[StateSpec, ...]:
    """Recurrent states of a model's layers, without tensor parallelism."""
    state, compressed = config.state, config.compressed
    if compressed:
        layers = filter(compressed.rate, range(config.num_layers))
        return tuple(compressed.state_spec(layer, config.dtype) for layer in layers)
    if state is None:
        return ()
    return (state.spec(config.dtype),) * sum(map(config.has_state, range(config.num_layers)))


def _attention(config: ModelConfig) -> tuple[int, int]:
    """Parameters of a layer's attention, and of its KV up projection alone, which latent attention absorbs
    (DeepSeek-V2, section 2.1)."""
    hidden, heads, latent = config.hidden_size, config.num_heads, config.latent
    if latent is None:
        cross = 4 * hidden**2 if config.speech else 0
        gates = heads if config.options.attention_gate else 0
        return hidden * config.head_dim * (2 * (heads + config.num_kv_heads) + gates) + cross, 0
    queries, rank = heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim), latent.kv_lora_rank
    q = latent.q_lora_rank * (hidden + queries) if latent.q_lora_rank else hidden * queries
    absorbed = rank * heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    outputs = heads * latent.v_head_dim * hidden
    return q + hidden * (rank + latent.qk_rope_head_dim) + absorbed + outputs, absorbed


def _indexer(config: ModelConfig) -> int:
    """Parameters of an indexer of sparse attention."""
    if config.latent is None or (indexer := config.latent.indexer) is None:
        return 0
    queries = (config.latent.q_lora_rank or 0) * indexer.heads * indexer.dim
    return queries + config.hidden_size * (indexer.dim + indexer.heads)


def _indexers(config: ModelConfig) -> int:
    """Parameters of all layers' indexers."""
    return _indexer(config) * (config.num_layers - len(config.shared_layers))


def _position_weights(config: ModelConfig) -> int:
    """Parameters of an encoder's position and token type embeddings, stored as one table."""
    if config.encoder is None or config.encoder.prefix == "model":
        return 0
    rows = max(config.encoder.type_vocab_size, 1 if config.encoder.prefix in ("bert", "roberta") else 0)
    return config.max_model_len * rows * config.hidden_size


def _speech_weights(config: ModelConfig) -> int:
    """Parameters of the audio encoder, and of the decoder's position embedding."""
    size, speech = config.hidden_size, config.speech
    assert speech
    convolutions = 3 * size * (speech.num_bins + size)
    layer = 4 * size**2 + 2 * size * speech.intermediate_size
    return convolutions + (speech.num_positions + config.max_position_embeddings) * size + speech.num_layers * layer


def _gguf_shares(config: Mapping[str, Any], part: str) -> dict[Format, float]:
    """Share of each format, computed from the number of weights per GGUF type (entry ``gguf`` of ``config.json``)."""
    given = dict(config["gguf"][part]) if config.get("gguf") else {}
    counts = {name: max(int(count), 1) for name, count in given.items()}
    formats = {type.name: type.format for type in TYPES.values()}
    shares: dict[Format, float] = {}
    for name, count in counts.items():
        shares[formats[name]] = shares.get(formats[name], 0.0) + count / sum(counts.values())
    return shares
