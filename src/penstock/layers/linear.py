"""Matrices and what they are shared among ranks by."""

from __future__ import annotations

import torch
from torch import Tensor

from .context import Context


class Linear:
    """One or several of a checkpoint's matrices with the same input, multiplied as one.

    Args:
        names: of the matrices, without ``.weight`` and ``.bias``.
        outputs: rows of each.
    """

    def __init__(self, context: Context, names: list[str], inputs: int, outputs: list[int], bias: bool = False) -> None:
        def shards(kind: str, *rest: int) -> list[Tensor]:
            parts = [context.take(f"{n}.{kind}", out, *rest) for n, out in zip(names, outputs, strict=True)]
            return [context.group.shard(part, 0) for part in parts]

        self._ops = context.ops
        self._adapted = context.adapted(names, inputs, outputs)
        own = sum(context.group.part(out) for out in outputs)
        added = torch.cat(shards("bias")) if bias else None
        self._matrix = context.matrix(
            "+".join(names), inputs, own, context.scheme.layers, lambda: shards("weight", inputs), added
        )

    def __call__(self, x: Tensor, adapters: Tensor | None = None) -> Tensor:
        """``[tokens, in]`` to ``[tokens, out]``.

        Args:
            adapters: ``[tokens]`` int32, the slot of each row's adapter, -1 for none; None where no row has one.
        """
        out = self._matrix.multiply(x)
        return out if adapters is None or self._adapted is None else self._adapted(out, x, adapters)

    def gated(self, x: Tensor, adapters: Tensor | None = None) -> Tensor:
        """SiLU of the first of two matrices' outputs by the other's; rows without an adapter get the same bits as
        where there is none at all."""
        return self._matrix.gated(x) if adapters is None else self._ops.silu_mul(self(x, adapters))


class Reduced:
    """A matrix whose input is shared among ranks: each multiplies its part, and the parts are summed."""

    def __init__(self, context: Context, name: str, inputs: int, outputs: int, bias: bool = False) -> None:
        self._group = context.group
        self._adapted = context.adapted([name], inputs, [outputs])
        own = context.group.part(inputs)
        added = context.take(f"{name}.bias", outputs) if bias and context.group.rank == 0 else None

        def shard() -> list[Tensor]:
            return [context.group.shard(context.take(f"{name}.weight", outputs, inputs), 1)]

        self._matrix = context.matrix(name, own, outputs, context.scheme.layers, shard, added)

    def __call__(self, x: Tensor, adapters: Tensor | None = None) -> Tensor:
        """As ``Linear``."""
        out = self._group.sum(self._matrix.multiply(x))
        return out if adapters is None or self._adapted is None else self._adapted(out, x, adapters)


class Embedding:
    """Token ids to vectors, and, where the two are tied, vectors to scores with the same matrix."""

    def __init__(self, context: Context, name: str, vocabulary: int, hidden: int) -> None:
        def whole() -> list[Tensor]:
            return [context.take(f"{name}.weight", vocabulary, hidden)]

        self._matrix = context.matrix(name, hidden, vocabulary, context.scheme.head, whole)

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self._matrix.gather(token_ids)

    def scores(self, x: Tensor) -> Tensor:
        """``[rows, hidden]`` to ``[rows, vocabulary]`` float32."""
        return self._matrix.multiply(x, wide=True)

    def likeliest(self, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        """``[rows, hidden]`` to the token of the best score, ``[rows]`` int64, without keeping the others.

        Args:
            allowed: ``[rows, vocabulary / 32]`` int32, a bit for each token that may be chosen; None is all.
        """
        return self._matrix.likeliest(x, allowed)
