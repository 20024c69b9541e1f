"""Linear layers, which ranks split by outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from .context import BuildContext


class ColumnParallelLinear:
    """A linear layer of which each rank computes some outputs. Several matrices of the same input may be merged, as
    query, key and value projections are.

    Args:
        names: of the checkpoint's matrices, without ``.weight`` and ``.bias``.
        inputs: size of the input.
        outputs: rows of each matrix.
        gather_output: whether every rank gets the outputs of all ranks; for a single matrix.
    """

    def __init__(
        self,
        context: BuildContext,
        names: list[str],
        inputs: int,
        outputs: list[int],
        bias: bool = False,
        gather_output: bool = False,
    ) -> None:
        group = context.group

        def read(kind: str, *rest: int) -> list[Tensor]:
            matrices = zip(names, outputs, strict=True)
            return [context.take(f"{name}.{kind}", size, *rest, rows=group.shard(size)) for name, size in matrices]

        self._ops = context.ops
        self._group = group
        self._gather = gather_output
        self._lora = context.lora(names, inputs, outputs)
        own_outputs = sum(group.shard_size(size) for size in outputs)
        bias_tensor = torch.cat(read("bias")) if bias else None
        self._matrix = context.matrix(
            "+".join(names), inputs, own_outputs, context.scheme.layers, lambda: read("weight", inputs), bias_tensor
        )

    def __call__(self, x: Tensor, lora_slots: Tensor | None = None) -> Tensor:
        """``[tokens, in]`` to ``[tokens, out]``, of this rank's outputs unless they are gathered.

        Args:
            lora_slots: ``[tokens]`` int32, LoRA slot of each row, -1 for none; None where no row has an adapter.
        """
        out = self._matrix.linear(x)
        if lora_slots is not None and self._lora is not None:
            out = self._lora(out, x, lora_slots)
        return self._group.all_gather(out) if self._gather else out

    def silu_and_mul(self, x: Tensor, lora_slots: Tensor | None = None) -> Tensor:
        """SiLU of the first of two merged matrices' outputs times the second's. A row without an adapter has the same
        bits with ``lora_slots`` as without."""
        if lora_slots is None:
            return self._matrix.linear_silu_and_mul(x)
        return self._ops.silu_and_mul(self(x, lora_slots))


class Embedding:
    """A vocabulary's matrix: embeds token ids, and, as a language model head, gives logits."""

    def __init__(self, context: BuildContext, name: str, vocab_size: int, hidden_size: int) -> None:
        def read() -> list[Tensor]:
            return [context.take(f"{name}.weight", vocab_size, hidden_size)]

        self._matrix = context.matrix(name, hidden_size, vocab_size, context.scheme.head, read)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """``[tokens]`` int64 to ``[tokens, hidden]``."""
        return self._matrix.embedding(token_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[rows, hidden]`` to ``[rows, vocabulary]`` float32."""
        return self._matrix.linear(hidden, out_float32=True)

    def argmax(self, hidden: Tensor, bitmask: Tensor | None = None) -> Tensor:
        """``[rows, hidden]`` to the token of the largest logit, ``[rows]`` int64, without computing all logits.

        Args:
            bitmask: ``[rows, ceil(vocabulary / 32)]`` int32, a bit for each allowed token; None allows all.
        """
        return self._matrix.argmax(hidden, bitmask)
