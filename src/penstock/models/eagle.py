"""EAGLE heads (Li et al., 2024 and 2025): one decoder layer that continues the model's hidden states token by token.

EAGLE-1 and -2 read the last hidden state, and use the language model head of the model. EAGLE-3 reads the hidden states
of three layers, and has a separate language model head, often with a smaller vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, Self
from weakref import proxy

import torch
from torch import Tensor

from penstock.checkpoint.composite_config import complete_config
from penstock.checkpoint.model_config import ModelConfig, dense_config
from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.layers import Attention, BuildContext, ColumnParallelLinear, Embedding, GatedMLP, RMSNorm
from penstock.ops import Batch
from penstock.parallel import shard_outputs

from .model import Model


@dataclass(frozen=True)
class EagleConfig:
    """Configuration of an EAGLE head."""

    decoder: ModelConfig
    """Configuration of the head's layer, with the vocabulary size of the model."""
    draft_vocab_size: int
    """Number of tokens in the vocabulary of the head."""
    aux_hidden_state_layers: tuple[int, ...]
    """Indices of model layers; the head reads the inputs of these layers (as in vLLM). Empty in EAGLE-1."""
    norm_before_residual: bool
    """True: the residual stream starts with the normalized hidden state; False: with the hidden state."""


def read_eagle_config(raw: Mapping[str, Any], method: str, num_layers: int) -> EagleConfig:
    """Read the ``config.json`` of an EAGLE head, in the published format or the format of ``speculators``.

    Args:
        method: ``eagle`` or ``eagle3``.
        num_layers: number of layers of the model.

    Raises ``KeyError``, ``TypeError`` or ``ValueError`` for a missing or invalid field, and ``PenstockError``
    (``unsupported``) for a head with more than one layer.
    """
    raw = {**raw, **complete_config(raw.get("transformer_layer_config") or {})}
    decoder = dense_config(raw)
    if decoder.num_layers != 1:
        message = f"the head has {decoder.num_layers} layers; only heads with one layer are supported"
        raise PenstockError(Code.UNSUPPORTED, message, "speculative_config")
    if method == "eagle":
        return EagleConfig(decoder, decoder.vocab_size, (), False)
    return EagleConfig(
        decoder,
        int(raw.get("draft_vocab_size") or decoder.vocab_size),
        _aux_hidden_state_layers(raw, num_layers),
        bool(raw.get("norm_before_residual")),
    )


def _aux_hidden_state_layers(raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The layers in ``eagle_aux_hidden_state_layer_ids``, in ascending order. An id means the input of the layer; in
    ``eagle_config`` (SGLang), the output. The default is that of the published EAGLE-3 heads."""
    nested = raw.get("eagle_config") or {}
    if nested.get("use_aux_hidden_state") is False:
        raise ValueError("use_aux_hidden_state is false; EAGLE-3 heads require true")
    if given := raw.get("eagle_aux_hidden_state_layer_ids"):
        layers = [int(layer) for layer in given]
    elif given := nested.get("eagle_aux_hidden_state_layer_ids"):
        layers = [int(layer) + 1 for layer in given]
    else:
        layers = [2, num_layers // 2, num_layers - 3]
    layers.sort()
    if len(set(layers)) != len(layers) or not 0 <= layers[0] <= layers[-1] < num_layers:
        message = f"the head reads the inputs of layers {layers} (eagle_aux_hidden_state_layer_ids); these must be"
        raise invalid("speculative_config", f"{message} different layers from 0 to {num_layers - 1} of the model")
    return tuple(layers)


class EagleHead:
    """A ``DraftHead`` of EAGLE-1 or -2. It has no norms before attention and before the language model head."""

    layer_name = "layers.0"
    recurrent = True

    def __init__(self, context: BuildContext, config: EagleConfig, model: Model) -> None:
        decoder = config.decoder
        self._ops = context.ops
        self._model: Model = proxy(model)
        bias = context.weights.has("fc.bias")
        self._fc = _linear(context, "fc", decoder.hidden_size + model.config.hidden_size, decoder.hidden_size, bias)
        self._build_layer(context, decoder, decoder.hidden_size)

    def _build_layer(self, context: BuildContext, decoder: ModelConfig, input_size: int) -> None:
        name, size = self.layer_name, decoder.hidden_size
        self.attention = Attention(
            context,
            f"{name}.self_attn",
            hidden_size=size,
            num_heads=decoder.num_heads,
            num_kv_heads=decoder.num_kv_heads,
            head_dim=decoder.head_dim,
            rope=context.rope_table(decoder.head_dim, decoder.rope_parameters, decoder.max_position_embeddings),
            qkv_bias=decoder.qkv_bias,
            output_bias=decoder.output_bias,
            input_size=input_size,
        )
        self._post_attention_norm = RMSNorm(context, f"{name}.post_attention_layernorm", size, decoder.rms_norm_eps)
        activation = decoder.options.activation
        self._mlp = GatedMLP(context, f"{name}.mlp", size, decoder.intermediate_size, decoder.mlp_bias, activation)

    def with_model(self, model: Model) -> Self:
        """Copy of the head that uses the embedding and language model head of ``model`` (other weights)."""
        other = copy(self)
        other._model = proxy(model)
        return other

    def combine_hidden_states(self, states: Tensor) -> Tensor:
        return states

    @torch.inference_mode()
    def forward(self, batch: Batch, states: Tensor, cache: Any) -> Tensor:
        x = self._fc(torch.cat((self._model.embed(batch.token_ids), states), -1))
        return self._layer(x, x, batch, cache)

    def _layer(self, x: Tensor, residual: Tensor, batch: Batch, cache: Any) -> Tensor:
        """Compute the layer. Returns the residual stream of ``batch.logits_indices``, ``[rows, hidden]``.

        Args:
            x: input of attention, ``[tokens, inputs]``.
            residual: residual stream, ``[tokens, hidden]``.
        """
        attended = self.attention(x, cache, batch, logits_only=True)
        residual = self._ops.index_select(residual, batch.logits_indices)
        x, residual = self._post_attention_norm.add(attended, residual)
        return self._ops.add_residual(self._mlp(x, None), residual)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)

    def argmax(self, hidden: Tensor, bitmask: Tensor | None = None) -> Tensor:
        return self._model.argmax(hidden, bitmask)


class Eagle3Head(EagleHead):
    """EAGLE-3's ``DraftHead``. It uses the model's embedding and language model head if its checkpoint lacks them."""

    def __init__(self, context: BuildContext, config: EagleConfig, model: Model) -> None:
        decoder, weights = config.decoder, context.weights
        size, eps = decoder.hidden_size, decoder.rms_norm_eps
        self._ops = context.ops
        self._model: Model = proxy(model)
        self._norm_before_residual = config.norm_before_residual
        self._vocab_size = decoder.vocab_size
        self._fc = _linear(context, "fc", len(config.aux_hidden_state_layers) * model.config.hidden_size, size)
        self.layer_name = "midlayer" if weights.has("midlayer.hidden_norm.weight") else "layers.0"
        self._input_norm = RMSNorm(context, f"{self.layer_name}.input_layernorm", size, eps)
        self._hidden_norm = RMSNorm(context, f"{self.layer_name}.hidden_norm", size, eps)
        self._build_layer(context, decoder, 2 * size)
        self._norm = RMSNorm(context, "norm", size, eps)
        self._embedding: Embedding | None = None
        if weights.has("embed_tokens.weight"):
            self._embedding = Embedding(context, "embed_tokens", decoder.vocab_size, size)
        self._lm_head: Embedding | None = None
        if weights.has("lm_head.weight"):
            self._lm_head = Embedding(context, "lm_head", config.draft_vocab_size, size)
        shared = [name for name in ("_embedding", "_lm_head") if getattr(self, name) is None]
        if shared and size != model.config.hidden_size:
            message = f"the head has hidden_size {size}, the model {model.config.hidden_size}"
            raise invalid(
                "speculative_config", f"{message}; such a head needs a separate embedding and language model head"
            )
        self._target_ids = _target_ids(context, config) if self._lm_head else None
        """``[draft vocabulary]`` int64: token id of each row of the language model head; None: the index of the row."""

    def combine_hidden_states(self, states: Tensor) -> Tensor:
        return self._fc(states)

    @torch.inference_mode()
    def forward(self, batch: Batch, states: Tensor, cache: Any) -> Tensor:
        embed = self._embedding or self._model.embed
        normed = self._hidden_norm(states)
        x = torch.cat((self._input_norm(embed(batch.token_ids)), normed), -1)
        return self._layer(x, normed if self._norm_before_residual else states, batch, cache)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """See ``LanguageModelHead.logits``. Tokens outside the draft vocabulary have -infinity."""
        logits = (self._lm_head or self._model).logits(self._norm(hidden))
        if self._target_ids is None:
            return logits
        expanded = logits.new_full((len(logits), self._vocab_size), float("-inf"))
        expanded[:, self._target_ids] = logits
        return expanded

    @torch.inference_mode()
    def argmax(self, hidden: Tensor, bitmask: Tensor | None = None) -> Tensor:
        assert bitmask is None  # drafts are not restricted by a grammar
        rows = (self._lm_head or self._model).argmax(self._norm(hidden))
        return rows if self._target_ids is None else self._target_ids[rows]


def _linear(context: BuildContext, name: str, inputs: int, outputs: int, bias: bool = False) -> ColumnParallelLinear:
    shards = [shard_outputs(context.group, outputs)]
    return ColumnParallelLinear(context, [name], inputs, shards, bias, gather_output=True)


def _target_ids(context: BuildContext, config: EagleConfig) -> Tensor | None:
    """Token id of each row of a head with a smaller vocabulary, from the tensor ``d2t``: token id minus row. None if
    the head has the vocabulary of the model.

    Raises ``PenstockError`` (``invalid``) for ids outside the vocabulary, or a missing or wrongly shaped ``d2t``.
    """
    rows, vocabulary = config.draft_vocab_size, config.decoder.vocab_size
    if rows == vocabulary and not context.weights.has("d2t"):
        return None
    differences = context.weights.read("d2t", rows, as_stored=True).to(torch.int64)
    token_ids = torch.arange(rows) + differences
    if int(token_ids.min()) < 0 or int(token_ids.max()) >= vocabulary:
        message = f"d2t of the head has token ids from {int(token_ids.min())} to {int(token_ids.max())}"
        raise invalid("speculative_config", f"{message}; they must be from 0 to {vocabulary - 1}")
    return token_ids.to(context.device)


EAGLE_HEADS: Mapping[str, type[EagleHead]] = {"eagle": EagleHead, "eagle3": Eagle3Head}
"""Head classes by ``method`` of ``speculative_config``."""
