"""PyTorch functions whose bits do not depend on the number of tokens, for modules of transformers on CPUs.

PyTorch's matrix products sum in an order that depends on their shapes, and its vectorized functions compute the last
elements of a tensor with other instructions than those before. ``BatchInvariance`` replaces both within a forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from penstock.layers import BuildContext

WIDTH = 64
"""Number of elements that PyTorch's vectorized loops compute together, or a multiple of it."""
MAX_ROW_PRODUCT = 2**20
"""Maximum number of weights in a product with a part of a parameter, which is computed row by row."""
MATMUL = {torch.matmul, torch.mm, Tensor.matmul, Tensor.__matmul__, Tensor.mm}
NAMES = ("sigmoid", "exp", "tanh", "log", "log1p", "erf", "expm1", "sin", "cos", "rsqrt", "exp2")
ELEMENTWISE = {
    *(getattr(where, name) for where in (torch, Tensor) for name in NAMES),
    *(F.silu, F.gelu, F.softplus, F.mish, F.elu, F.logsigmoid, F.sigmoid, F.tanh, F.selu, torch.special.expit),
}
"""Functions of each element alone."""
IN_PLACE = {getattr(Tensor, f"{name}_"): getattr(Tensor, name) for name in NAMES}
CONVERSIONS = {Tensor.float, Tensor.to, Tensor.type, Tensor.t, Tensor.transpose, Tensor.contiguous, torch.t}
"""Functions whose result for a parameter is kept."""
TRANSPOSED = tuple(vars(torch._C.TensorBase)[name].__get__ for name in ("T", "mT"))
OTHER_PRODUCTS: Mapping[Callable[..., Any], str] = {
    function: name
    for name in ("bmm", "baddbmm", "einsum", "addmm", "addmv", "mv", "dot", "tensordot", "inner", "conv1d", "conv2d")
    for function in {getattr(torch, name), getattr(Tensor, name, None), getattr(F, name, None)} - {None}
} | {F.scaled_dot_product_attention: "scaled_dot_product_attention"}
"""Functions that sum in an order that may depend on the number of tokens → name."""


class BatchInvariance(TorchFunctionMode):
    """Context manager in which the results of a token do not depend on the number of tokens, as far as possible.

    Products with parameters are computed by our kernels, those with small parts of parameters row by row. Functions of
    each element compute rows of a multiple of ``WIDTH`` elements.
    """

    def __init__(self, context: BuildContext, model: nn.Module) -> None:
        super().__init__()
        self._ops = context.ops
        self._constants: dict[int, Tensor] = {id(each): each for each in model.parameters()}
        self._storages = {each.untyped_storage().data_ptr() for each in model.parameters()}
        self._converted: dict[Any, Tensor] = {}
        self._packed: dict[int, Any] = {}
        self.is_needed = False
        """Whether a function was replaced so far."""
        self.variant: set[str] = set()
        """Names of functions that were called so far and may depend on the number of tokens."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in ELEMENTWISE:
            return self._elementwise(func, args, kwargs)
        if func in IN_PLACE:
            return args[0].copy_(self._elementwise(IN_PLACE[func], args, kwargs))
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if func in MATMUL and len(args) == 2:
            return self._matmul(func, *args)
        if (func in CONVERSIONS or func in TRANSPOSED) and args and id(args[0]) in self._constants:
            return self._convert(func, args, kwargs)
        if func in OTHER_PRODUCTS and not _sums_one_element(func, args):
            self.variant.add(OTHER_PRODUCTS[func])
        return func(*args, **kwargs)

    def _elementwise(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        x, *more = args or (kwargs["input"],)
        kwargs = {name: value for name, value in kwargs.items() if name not in ("input", "inplace")}
        size = x.shape[-1] if x.dim() else 1
        if x.dim() and not size % WIDTH and x.stride(-1) == 1:
            return func(x, *more, **kwargs)  # type: ignore[no-any-return]
        self.is_needed = True
        rows = x.reshape(-1, size).contiguous()
        computed: Tensor = func(pad(rows, (0, -size % WIDTH), value=1), *more, **kwargs)
        return computed[:, :size].reshape(x.shape)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        product = self._matmul(torch.matmul, input, weight, transposed=True)
        return product if bias is None else product + bias

    def _matmul(self, func: Callable[..., Any], x: Tensor, weight: Tensor, transposed: bool = False) -> Tensor:
        """``x @ weight``, or ``x @ weight.T`` if ``transposed``."""
        if weight.dim() != 2 or x.dim() < 2:
            if not _sums_one_element(func, (x, weight)):
                self.variant.add("matmul")
            return func(x, weight.transpose(-1, -2) if transposed else weight)  # type: ignore[no-any-return]
        rows, self.is_needed = x.reshape(-1, x.shape[-1]).contiguous(), True
        matrix = weight if transposed else weight.T
        if id(weight) in self._constants and x.dtype == weight.dtype:
            if id(weight) not in self._packed:
                self._packed[id(weight)] = self._ops.pack([matrix.detach().contiguous()])
            out = self._ops.linear(rows, self._packed[id(weight)])
        elif weight.untyped_storage().data_ptr() in self._storages and weight.numel() <= MAX_ROW_PRODUCT:
            out = torch.cat([F.linear(row.clone(), matrix) for row in rows.split(1)])
        else:
            self.variant.add("matmul")
            out = F.linear(rows, matrix)
        return out.view(*x.shape[:-1], len(matrix))

    def _convert(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        key = func, id(args[0]), repr(args[1:]), repr(kwargs)
        if key not in self._converted:
            found = func(*args, **kwargs)
            self._converted[key] = found
            self._constants[id(found)] = found
        return self._converted[key]


def _sums_one_element(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether a product of two tensors has a single term per element, as in rotary embeddings."""
    return len(args) > 1 and func not in (torch.einsum,) and isinstance(args[0], Tensor) and args[0].shape[-1:] == (1,)
