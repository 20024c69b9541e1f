"""The dense decoder that Llama, Mistral, Qwen2 and Qwen3 are, each with its own switches.

Llama (Touvron et al., 2023): RMS norms before attention and MLP, rotary positions, grouped queries, SiLU gates.
Mistral adds a sliding window, Qwen2 biases on queries, keys and values, Qwen3 norms on queries and keys instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.layers import Context, Embedding, Linear, Reduced, RMSNorm, rope_table
from penstock.ops import Batch, KVSpec

from .config import DecoderConfig


class Attention:
    def __init__(self, context: Context, config: DecoderConfig, name: str, layer: int, rope: Tensor) -> None:
        self._ops = context.ops
        self._rope = rope
        self._dim = dim = config.head_dim
        self._window = config.windows[layer] if layer < config.layers else 0
        self._heads = [context.group.part(heads) for heads in (config.heads, config.kv_heads, config.kv_heads)]
        names = [f"{name}.{part}_proj" for part in "qkv"]
        outputs = [heads * dim for heads in (config.heads, config.kv_heads, config.kv_heads)]
        self._qkv = Linear(context, names, config.hidden, outputs, config.qkv_bias)
        self._o = Reduced(context, f"{name}.o_proj", config.heads * dim, config.hidden, config.output_bias)
        self._norms = None
        if config.qk_norm:
            self._norms = [RMSNorm(context, f"{name}.{part}_norm", dim, config.eps) for part in "qk"]

    def __call__(self, x: Tensor, cache: Any, batch: Batch, last: bool) -> Tensor:
        adapters = batch.adapters
        qkv = self._qkv(x, adapters).split([heads * self._dim for heads in self._heads], -1)
        q, k, v = (part.unflatten(-1, (-1, self._dim)) for part in qkv)
        if self._norms:
            q, k = self._norms[0](q), self._norms[1](k)
        q, k = (self._ops.rope(part, batch.positions, self._rope) for part in (q, k))
        self._ops.store(cache, k, v, batch.slots)
        queries = batch.queries
        if last:
            q, queries, adapters = self._ops.take(q, batch.logit_rows), batch.logit_queries, batch.logit_adapters
        return self._o(self._ops.attention(q, cache, queries, self._dim**-0.5, self._window).flatten(1), adapters)


class MLP:
    def __init__(self, context: Context, config: DecoderConfig, name: str) -> None:
        names, size = [f"{name}.gate_proj", f"{name}.up_proj"], config.intermediate
        self._gate_up = Linear(context, names, config.hidden, [size, size], config.mlp_bias)
        self._down = Reduced(context, f"{name}.down_proj", size, config.hidden, config.mlp_bias)

    def __call__(self, x: Tensor, adapters: Tensor | None) -> Tensor:
        return self._down(self._gate_up.gated(x, adapters), adapters)


class Layer:
    def __init__(self, context: Context, config: DecoderConfig, layer: int, rope: Tensor) -> None:
        name = f"model.layers.{layer}"
        self._ops = context.ops
        self._last = layer == config.layers - 1
        self._before = RMSNorm(context, f"{name}.input_layernorm", config.hidden, config.eps)
        self._attention = Attention(context, config, f"{name}.self_attn", layer, rope)
        self._between = RMSNorm(context, f"{name}.post_attention_layernorm", config.hidden, config.eps)
        self._mlp = MLP(context, config, f"{name}.mlp")

    def __call__(self, x: Tensor, residual: Tensor | None, cache: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """What this layer adds, and the residual stream that it is to be added to; of the last layer only for
        tokens whose scores are wanted, as nothing reads the others."""
        x, residual = (self._before(x), x) if residual is None else self._before.add(x, residual)
        x = self._attention(x, cache, batch, self._last)
        if self._last:
            residual = self._ops.take(residual, batch.logit_rows)
        x, residual = self._between.add(x, residual)
        return self._mlp(x, batch.logit_adapters if self._last else batch.adapters), residual


class HeadAhead:
    """A layer that guesses the token after the next one (multi-token prediction; DeepSeek-AI, 2024).

    Its input is what the model, or the head before it, made of a token, and the embedding of the token that came next.
    Embedding and scores are the model's own.

    Args:
        number: which of the heads, from 0 on.
    """

    def __init__(
        self, context: Context, config: DecoderConfig, number: int, rope: Tensor, embedding: Embedding
    ) -> None:
        name, size = f"model.layers.{config.layers + number}", config.hidden
        self._embedding = embedding
        self._of_token = RMSNorm(context, f"{name}.enorm", size, config.eps)
        self._of_state = RMSNorm(context, f"{name}.hnorm", size, config.eps)
        self._join = Linear(context, [f"{name}.eh_proj"], 2 * size, [size])
        self._layer = Layer(context, config, config.layers + number, rope)
        self._norm = RMSNorm(context, f"{name}.shared_head.norm", size, config.eps)

    @torch.inference_mode()
    def hidden(self, batch: Batch, states: Tensor, cache: Any) -> Tensor:
        """Hidden states ``[tokens, hidden]``, whose scores are those of the token after the next one.

        Args:
            batch: its token ids are those that come next, each at the position of the token before.
            states: ``[tokens, hidden]``, of those tokens before.
        """
        token = self._of_token(self._embedding(batch.token_ids))
        x, residual = self._layer(self._join(torch.cat((token, self._of_state(states)), -1)), None, cache, batch)
        hidden, _ = self._norm.add(x, residual)
        return hidden


class Decoder:
    """A model: token ids and a KV cache to hidden states, and those to scores.

    Args:
        longest: tokens a sequence may have.
        heads_ahead: of those that the checkpoint has, so many are read.
    """

    def __init__(self, context: Context, config: DecoderConfig, longest: int, heads_ahead: int = 0) -> None:
        self.config = config
        rope = rope_table(config.head_dim, longest, config.rope, config.trained, context.device)
        self._embedding = Embedding(context, "model.embed_tokens", config.vocabulary, config.hidden)
        self._layers = [Layer(context, config, layer, rope) for layer in range(config.layers)]
        self._norm = RMSNorm(context, "model.norm", config.hidden, config.eps)
        self._head = None
        if not config.tied and not config.headless:
            self._head = Embedding(context, "lm_head", config.vocabulary, config.hidden)
        self.heads_ahead = [HeadAhead(context, config, i, rope, self._embedding) for i in range(heads_ahead)]
        self._kv_heads = context.group.part(config.kv_heads)
        self.dtype = context.dtype
        self.targets = context.targets
        """What adapters may add to, by the names of the checkpoint's matrices."""
        self.mapped_bytes = context.kept.mapped_bytes if context.kept else 0
        """Of its matrices on disk, which the system counts as free memory, since it could read them again."""

    def kv_spec(self, block_size: int, rounded: bool = False) -> KVSpec:
        """What its KV cache holds."""
        config = self.config
        return KVSpec(
            config.layers + len(self.heads_ahead), self._kv_heads, config.head_dim, self.dtype, block_size, rounded
        )

    @torch.inference_mode()
    def hidden(self, batch: Batch, cache: list[Any]) -> Tensor:
        """The last hidden states of tokens whose scores are wanted, ``[rows, hidden]``. The cache gets all tokens'
        keys and values."""
        x, residual = self._embedding(batch.token_ids), None
        for layer, kept in zip(self._layers, cache, strict=False):  # those of the heads come after
            x, residual = layer(x, residual, kept, batch)
        assert residual is not None
        hidden, _ = self._norm.add(x, residual)
        return hidden

    @torch.inference_mode()
    def scores(self, hidden: Tensor) -> Tensor:
        """``[rows, hidden]`` to a score for each token of the vocabulary, ``[rows, vocabulary]`` float32."""
        return (self._head or self._embedding).scores(hidden)

    @torch.inference_mode()
    def likeliest(self, hidden: Tensor, allowed: Tensor | None = None) -> Tensor:
        """``[rows, hidden]`` to the token of the best score, ``[rows]`` int64.

        Args:
            allowed: ``[rows, vocabulary / 32]`` int32, a bit for each token that may be chosen; None is all.
        """
        return (self._head or self._embedding).likeliest(hidden, allowed)
