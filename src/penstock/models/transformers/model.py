"""A ``Model`` that runs modules of transformers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.checkpoint.model_config import ModelConfig
from penstock.core import PenstockError
from penstock.core.errors import invalid
from penstock.layers import BuildContext
from penstock.ops import Batch, KVSpec, LayerExport, TransferLayout

from ..model import BaseModel
from .attention import CausalMask, PagedAttentions, RecordedAttentions, UnsupportedAttention, attending
from .check import check
from .config import LIBRARY_CONFIG
from .library import cache_windows, first_line, library_config, unsupported
from .linear import ModuleWeights, has_other_matrices, pack_linears
from .loading import fix_rope, load_module

logger = logging.getLogger(__name__)


class TransformersModel(BaseModel):
    """A ``Model`` that runs a causal language model of transformers. Its hidden states are the output of the model's
    body; the other modules compute the logits.

    Raises ``PenstockError`` (``unsupported``) for a model that cannot be run with a paged KV cache. To detect this, the
    constructor compares results for a few tokens with those of transformers.
    """

    def __init__(self, context: BuildContext, config: ModelConfig) -> None:
        super().__init__(context, config)
        self._device = context.device
        self._windows = cache_windows(
            config.architecture, library_config(config.architecture, config.raw[LIBRARY_CONFIG])
        )
        self._model = load_module(context, config)
        head, embedding = self._model.get_output_embeddings(), self._model.get_input_embeddings()
        weights = ModuleWeights(self._model, context.weights.version)
        pack_linears(replace(context, weights=weights, weight_cache=None), self._model, head, embedding)
        if context.ops.NAME == "cpu" and not has_other_matrices(self._model):
            torch.set_num_threads(1)  # PyTorch's threads busy-wait after each call, on cores that the kernels need
        with self._checked():
            fix_rope(self._model, context.max_len)
            self._record()
            check(self, self._model, context)

    @contextmanager
    def _checked(self) -> Iterator[None]:
        """Context manager that raises ``PenstockError`` (``unsupported``), with the architecture, for all errors."""
        architecture = self.config.architecture
        try:
            yield
        except (UnsupportedAttention, PenstockError) as error:
            raise unsupported(architecture, error) from error
        except Exception as error:  # a model's code may raise any exception for a mask or layer of Penstock
            reason = first_line(error)
            if CausalMask.__name__ in reason:
                reason = "its modules do arithmetic with the attention mask (position biases)"
            raise unsupported(architecture, reason) from error

    @torch.inference_mode()
    def _record(self) -> None:
        """Find the body, which is the first module that runs, and record its attentions."""
        started: list[nn.Module] = []
        hooks = [
            module.register_forward_pre_hook(lambda module, _: started.append(module))
            for module in self._model.modules()
            if module is not self._model
        ]
        recorded, ids = RecordedAttentions(self.max_len), torch.zeros(1, 2, dtype=torch.int64, device=self._device)
        try:
            with attending(recorded):
                self._model(input_ids=ids, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        self._body = started[0]
        recorded = RecordedAttentions(self.max_len)
        with attending(recorded):
            self._output = self._run_body(ids[0], torch.arange(2, device=self._device))
        if not recorded.calls:
            raise UnsupportedAttention("its attention does not use the attention interface of transformers")
        self._calls, self._masks = recorded.calls, recorded.masks
        expected = [window if window < self.max_len else 0 for window in self._windows]
        found = [call.window for call in recorded.calls]
        if found != expected if len(found) == len(expected) else not {*found} <= {*expected}:
            raise UnsupportedAttention("the sliding windows of its masks differ from those of its KV cache")

    def _run_body(self, token_ids: Tensor, positions: Tensor) -> Any:
        """Run the body of the model for token ids and their positions, ``[tokens]`` int64 each."""
        return self._body(
            input_ids=token_ids[None],
            attention_mask=torch.ones_like(token_ids)[None],
            position_ids=positions[None],
            use_cache=False,
            return_dict=True,
        )

    def kv_specs(self, block_size: int, quantization: str = "") -> list[KVSpec]:
        dtype = str(self.dtype).removeprefix("torch.")
        return [
            KVSpec(call.num_kv_heads, call.head_dim, dtype, block_size, quantization, call.window)
            for call in self._calls
        ]

    def transfer_layouts(self, slot_tokens: int, quantization: str = "") -> list[TransferLayout]:
        raise invalid("role", "models run by transformers do not support KV cache transfer: omit role")

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: list[Any], export: Sequence[LayerExport] = ()) -> Tensor:
        attentions = PagedAttentions(self._ops, self._calls, self._masks, batch, cache)
        with attending(attentions):
            hidden: Tensor = self._run_body(batch.token_ids, batch.positions).last_hidden_state[0]
        attentions.finish()
        return hidden[batch.logits_indices]

    @torch.inference_mode()
    def embed(self, token_ids: Tensor) -> Tensor:
        embedded: Tensor = self._model.get_input_embeddings()(token_ids)
        return embedded

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """See ``Model.logits``. Runs the causal language model with these hidden states as the output of its body."""
        output = type(self._output)(last_hidden_state=hidden[None])
        ids = torch.zeros(1, hidden.shape[0], dtype=torch.int64, device=self._device)
        self._body.forward = lambda *args, **options: output
        try:
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        finally:
            del self._body.forward
        return logits.float()

    @torch.inference_mode()
    def argmax(self, hidden: Tensor, bitmask: Tensor | None = None) -> Tensor:
        logits = self.logits(hidden)
        return (logits if bitmask is None else self._ops.apply_bitmask(logits, bitmask)).argmax(-1)


def build(context: BuildContext, config: ModelConfig, num_mtp_heads: int) -> TransformersModel:
    return TransformersModel(context, config)
