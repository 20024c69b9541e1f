"""Layers of vision transformers: patch embedding, bidirectional attention with 2-D rotary embedding, MLP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.ops.cores import usable_cores
from penstock.parallel import Shard
from penstock.quant import PackedMatrix

from .context import BuildContext
from .linear import ColumnParallelLinear
from .norm import Norm

MIN_SCORES = 2**16
"""Minimum number of attention scores, over all heads, for which threads are faster."""


class Linear(ColumnParallelLinear):
    """A linear layer that every rank computes completely.

    Args:
        context: context of a single rank.
        name: name of the matrix in the checkpoint, without ``.weight``.
        others: names of further matrices of the same shape, whose outputs are appended.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        inputs: int,
        outputs: int,
        bias: bool = True,
        others: Sequence[str] = (),
    ) -> None:
        names = [name, *others]
        super().__init__(context, names, inputs, [Shard(0, outputs, outputs)] * len(names), bias)


class PatchEmbed:
    """Patch embedding: a convolution in the checkpoint, computed as an unquantized linear layer.

    Args:
        name: name of the convolution in the checkpoint, without ``.weight``.
        patch: shape of a patch: channels, frames (for 3-D convolutions), height, width.
    """

    def __init__(
        self, context: BuildContext, name: str, outputs: int, patch: tuple[int, ...], bias: bool = False
    ) -> None:
        weight = context.read_weight(f"{name}.weight", outputs, *patch).flatten(1)
        biases = context.read_weight(f"{name}.bias", outputs) if bias else None
        self._matrix = PackedMatrix(context.ops, context.ops.pack([weight], biases))

    def __call__(self, patches: Tensor) -> Tensor:
        """Embed ``[patches, prod(patch)]`` to ``[patches, outputs]``."""
        return self._matrix.linear(patches)


class HeadThreads:
    """Thread pool for attention, with one head per task.

    PyTorch's threads are not used: they busy-wait after every operation, on cores that the kernels need.

    Args:
        context: build context with the number of threads (``threads``; 0: one for each usable core).
    """

    def __init__(self, context: BuildContext) -> None:
        self._count = context.threads or usable_cores()
        self._pool: ThreadPoolExecutor | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention within segments. Arguments and result are ``[heads, segments, length, head_dim]``."""
        heads, segments, length, _ = q.shape
        if self._count == 1 or heads * segments * length**2 < MIN_SCORES:
            return torch.cat([_attend(*each) for each in zip(q.split(1), k.split(1), v.split(1), strict=True)])
        if self._pool is None:
            initializer = partial(torch.set_num_threads, 1)
            self._pool = ThreadPoolExecutor(self._count, "vision-attention", initializer)
        return torch.cat(list(self._pool.map(_attend, q.split(1), k.split(1), v.split(1))))


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.inference_mode():
        return F.scaled_dot_product_attention(q, k, v)


class VisionAttention:
    """Multi-head attention of each patch to all patches of its segment.

    Args:
        name: module in the checkpoint with ``qkv`` and ``proj``.
        threads: thread pool, shared by the layers of a tower.
        qkv: names of the query, key and value matrices: one fused, or three.
        proj: name of the output matrix.
        bias: whether ``qkv`` has a bias, and whether ``proj`` has one.
        qk_norms: norms of queries and keys, over all heads of a patch together.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        size: int,
        heads: int,
        threads: HeadThreads,
        *,
        qkv: Sequence[str] = ("qkv",),
        proj: str = "proj",
        bias: tuple[bool, bool] = (True, True),
        qk_norms: tuple[Norm, Norm] | None = None,
    ) -> None:
        self._heads = heads
        self._threads = threads
        self._qk_norms = qk_norms
        first, *others = [f"{name}.{part}" for part in qkv]
        self._qkv = Linear(context, first, size, 3 * size // len(qkv), bias[0], others)
        self._proj = Linear(context, f"{name}.{proj}", size, size, bias[1])

    def __call__(self, x: Tensor, rope: Tensor | None, segments: Sequence[int]) -> Tensor:
        """Compute attention, ``[patches, size]`` to ``[patches, size]``.

        Args:
            rope: ``[2, patches, head_dim]`` float32: cosines and sines; None: no rotary embedding.
            segments: lengths of the consecutive segments.
        """
        parts = self._qkv(x).view(len(x), 3, -1).unbind(1)
        if self._qk_norms:
            norms = zip(self._qk_norms, parts, strict=False)
            parts = (*(norm(part.contiguous()) for norm, part in norms), parts[2])
        q, k, v = (part.view(len(x), self._heads, -1).transpose(0, 1) for part in parts)  # [heads, patches, head_dim]
        if rope is not None:
            q, k = _rotate(q, rope), _rotate(k, rope)
        attended, start = [], 0
        for length, group in groupby(segments):  # consecutive segments of equal length are computed together
            end = start + length * sum(1 for _ in group)
            qkv = (each[:, start:end].unflatten(1, (-1, length)).contiguous() for each in (q, k, v))
            attended.append(self._threads.attend(*qkv).flatten(1, 2))
            start = end
        whole = torch.cat(attended, 1) if attended[1:] else attended[0]
        return self._proj(whole.transpose(0, 1).flatten(1))


class VisionMLP:
    """MLP without a gate, ``fc2(activation(fc1(x)))``.

    Args:
        fc1, fc2: names of the matrices in the checkpoint, without ``.weight``.
        sizes: input, intermediate and output size.
        bias: both matrices have a bias.
    """

    def __init__(
        self,
        context: BuildContext,
        fc1: str,
        fc2: str,
        sizes: tuple[int, int, int],
        activation: Callable[[Tensor], Tensor],
        bias: bool = True,
    ) -> None:
        inputs, intermediate, outputs = sizes
        self._fc1 = Linear(context, fc1, inputs, intermediate, bias)
        self._fc2 = Linear(context, fc2, intermediate, outputs, bias)
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the MLP, ``[rows, inputs]`` to ``[rows, outputs]``."""
        return self._fc2(self._activation(self._fc1(x)))


class VisionBlock:
    """Attention and MLP with residual connections and pre-norms.

    Args:
        mlp: function from ``[patches, size]`` to ``[patches, size]``.
        scales: factors of the attention and MLP outputs (LayerScale), ``[size]`` each; empty: 1.
    """

    def __init__(
        self,
        norms: Sequence[Norm],
        attention: VisionAttention,
        mlp: Callable[[Tensor], Tensor],
        scales: Sequence[Tensor] = (),
    ) -> None:
        self._norms = norms
        self._attention = attention
        self._mlp = mlp
        self._scales = scales

    def __call__(self, x: Tensor, rope: Tensor | None, segments: Sequence[int]) -> Tensor:
        """Map ``[patches, size]`` to ``[patches, size]``. ``rope``, ``segments``: see ``VisionAttention``."""
        x = x + self._scaled(self._attention(self._norms[0](x), rope, segments), 0)
        return x + self._scaled(self._mlp(self._norms[1](x)), 1)

    def _scaled(self, x: Tensor, index: int) -> Tensor:
        return x * self._scales[index] if self._scales else x


def quick_gelu(x: Tensor) -> Tensor:
    """GELU approximated with the logistic function (Hendrycks and Gimpel, 2016)."""
    return x * torch.sigmoid(1.702 * x)


def _rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate ``[heads, patches, head_dim]``, with pairs of elements from both halves of a head (GPT-NeoX)."""
    cosines, sines = rope
    wide = x.float()
    first, second = wide.chunk(2, -1)
    rotated: Tensor = (wide * cosines + torch.cat((-second, first), -1) * sines).to(x.dtype)
    return rotated


def axial_rope(rows: Tensor, columns: Tensor, head_dim: int, theta: float) -> Tensor:
    """Cosines and sines of a 2-D rotary embedding, ``[2, patches, head_dim]`` float32: the first quarter of the
    elements by row, the second by column; the second half repeats the first.

    Args:
        rows, columns: position of each patch, ``[patches]`` int64.
    """
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim // 2, 2, dtype=torch.float32) / (head_dim // 2))
    angles = torch.cat([torch.outer(each.float(), frequencies) for each in (rows, columns)], -1)
    angles = torch.cat((angles, angles), -1)
    return torch.stack((angles.cos(), angles.sin()))
