"""Linear layers and embeddings, split by outputs among ranks (column parallel)."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.core.quantization import Format
from penstock.parallel import Shard, shard_outputs

from .context import BuildContext


class ColumnParallelLinear:
    """A linear layer whose outputs are split among ranks. Matrices with the same input may be merged, e.g. query, key
    and value projections.

    Args:
        names: names of the matrices in the checkpoint, without ``.weight`` and ``.bias``.
        inputs: size of the input.
        shards: this rank's outputs of each matrix.
        gather_output: return the outputs of all ranks on every rank; requires a single matrix.
        format: format of matrices that the checkpoint does not quantize; None: as in the scheme.
    """

    def __init__(
        self,
        context: BuildContext,
        names: list[str],
        inputs: int,
        shards: list[Shard],
        bias: bool = False,
        gather_output: bool = False,
        format: Format | None = None,
    ) -> None:
        self._ops = context.ops
        self._group = context.group
        self._dtype = context.dtype
        self._gathered = shards[0] if gather_output else None
        self._lora = context.lora(names, inputs, shards)
        matrices = zip(names, shards, strict=True)
        biases = [context.read_weight(f"{name}.bias", shard.total, rows=shard.rows) for name, shard in matrices if bias]
        self._matrix = context.matrix(names, inputs, shards, format, torch.cat(biases) if biases else None)

    def __call__(self, x: Tensor, lora_slots: Tensor | None = None) -> Tensor:
        """Map ``[tokens, in]`` to ``[tokens, out]``: this rank's outputs; all outputs with ``gather_output``.

        Args:
            lora_slots: ``[tokens]`` int32: LoRA slot of each row, -1: no adapter. None: no row has an adapter.
        """
        if self._gathered is None:
            return self._rank_outputs(x, lora_slots)
        return self._group.all_gather(
            lambda out: self._rank_outputs(x, lora_slots, out), x.shape[0], self._gathered, self._dtype
        )

    def _rank_outputs(self, x: Tensor, lora_slots: Tensor | None, out: Tensor | None = None) -> Tensor:
        product = self._matrix.linear(x, out=out)
        if lora_slots is None or self._lora is None:
            return product
        return self._lora(product, x, lora_slots)

    def activation_and_mul(
        self, x: Tensor, function: str, lora_slots: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """``function(gate) * up`` for the outputs of two merged matrices, gate and up, on this rank. Rows without an
        adapter have the same bits with ``lora_slots`` as without.

        Args:
            function: a key of ``ops.activations.ACTIVATIONS``.
            out: destination of the result.
        """
        if lora_slots is None:
            return self._matrix.linear_activation_and_mul(x, function, out)
        return self._ops.activation_and_mul(self(x, lora_slots), function, out)


class Embedding:
    """A vocabulary matrix, used as embedding or as language model head. The vocabulary is split among ranks."""

    def __init__(self, context: BuildContext, name: str, vocab_size: int, hidden_size: int) -> None:
        self._ops = context.ops
        self._group = context.group
        self._shard = shard = shard_outputs(context.group, vocab_size)
        self._hidden_size = hidden_size
        self._dtype = context.dtype
        self._matrix = context.vocabulary_matrix(name, hidden_size, shard)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Look up ``[tokens]`` int64. Returns ``[tokens, hidden]``, a tensor that the caller may modify."""
        rows = self._group.gather_rows(
            lambda out: self._matrix.embedding(token_ids, self._shard.first, out),
            token_ids,
            self._shard,
            self._hidden_size,
            self._dtype,
        )
        return rows if self._group.size == 1 else self._ops.clone(rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states, ``[rows, hidden]`` to ``[rows, vocabulary]`` float32."""
        return self._group.all_gather(
            lambda out: self._matrix.linear(hidden, True, out), hidden.shape[0], self._shard, torch.float32
        )

    def argmax(self, hidden: Tensor, bitmask: Tensor | None = None) -> Tensor:
        """Token with the largest logit, ``[rows, hidden]`` to ``[rows]`` int64, without storing all logits.

        Args:
            bitmask: ``[rows, ceil(vocabulary / 32)]`` int32 with a bit for each allowed token; None: all are allowed.
        """
        if self._group.size == 1:
            return self._matrix.argmax(hidden, bitmask)[0]
        shard, rows, size = self._shard, hidden.shape[0], self._group.size
        shard_bitmask = None if bitmask is None else _shard_bitmask(bitmask, shard)

        def best(out: Tensor | None) -> Tensor:
            token_ids, logits = self._matrix.argmax(hidden, shard_bitmask)
            pairs = torch.stack((logits.double(), (token_ids + shard.first).double()), 1)  # exact up to 2**53
            return pairs if out is None else out.copy_(pairs)

        pair_shard = Shard(2 * self._group.rank, 2 * self._group.rank + 2, 2 * size)
        logits, token_ids = self._group.all_gather(best, rows, pair_shard, torch.float64).view(rows, size, 2).unbind(-1)
        largest = logits.amax(1, keepdim=True)  # a tie goes to the lowest token id, as on one rank
        return token_ids.where(logits == largest, float("inf")).amin(1).nan_to_num(posinf=0.0).long()


def _shard_bitmask(bitmask: Tensor, shard: Shard) -> Tensor:
    """The bitmask of a rank's shard of the vocabulary."""
    integers = bitmask[:, shard.first // 32 : -(-shard.end // 32)]
    if shard.first % 32 == 0:
        return integers
    # The shard begins within an integer, e.g. in a vocabulary with fewer panels than ranks.
    positions = torch.arange(32, device=bitmask.device)
    bits = (integers[:, :, None] >> positions & 1).flatten(1)[:, shard.first % 32 :][:, : shard.size]
    bits = torch.nn.functional.pad(bits, (0, -shard.size % 32)).unflatten(1, (-1, 32))
    packed: Tensor = (bits.long() << positions).sum(-1)
    return packed.to(torch.int32)
