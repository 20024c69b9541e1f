"""A ``Model`` that runs modules of transformers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from penstock.checkpoint.model_config import ModelConfig
from penstock.checkpoint.state_spec import StateSpec
from penstock.core import PenstockError
from penstock.core.errors import invalid
from penstock.layers import BuildContext
from penstock.ops import Batch, KVSpec, LayerExport, TransferLayout

from ..model import BaseModel
from .attention import CausalMask, InconsistentWindows, RecordedAttentions, UnsupportedAttention, attending
from .check import check_gathered, check_paged, is_batch_invariant
from .config import GATHERED, LIBRARY_CONFIG, POSITION_OFFSET
from .experts import pack_experts
from .gathered import GatheredBody
from .invariance import BatchInvariance
from .library import cache_windows, first_line, library_config, unsupported
from .linear import has_other_matrices, pack_linears
from .loading import fix_rope, load_module
from .paged import PagedBody

logger = logging.getLogger(__name__)


class TransformersModel(BaseModel):
    """A ``Model`` that runs a causal language model of transformers. Its hidden states are the output of the model's
    body; the other modules compute the logits. The body runs over our attention kernels (``PagedBody``), or one
    sequence at a time (``GatheredBody``).

    Raises ``PenstockError`` (``unsupported``) for a model that cannot be run with a paged KV cache. To detect this, the
    constructor compares results for a few tokens with those of transformers.
    """

    def __init__(self, context: BuildContext, config: ModelConfig) -> None:
        super().__init__(context, config)
        self.batch_invariant = False
        self._device = context.device
        self._model, sources = load_module(context, config)
        head, embedding = self._model.get_output_embeddings(), self._model.get_input_embeddings()
        pack_linears(context, self._model, head, embedding, sources)
        pack_experts(context, self._model, sources.experts if sources else {})
        if sources:
            sources.check(self._model)
        threads = torch.get_num_threads()
        if context.ops.NAME == "cpu":
            # PyTorch's threads busy-wait after each call, on cores that the kernels need; and the order of its sums
            # depends on their number, which must not differ between ranks.
            torch.set_num_threads(1)
        self._invariance: BatchInvariance | nullcontext[None] = nullcontext()
        reasons = []
        for build in (self._build_gathered,) if config.raw[GATHERED] else (self._build_paged, self._build_gathered):
            try:
                with _reasons(), context.group.step():
                    build(context)
                if not self.batch_invariant and context.group.size == 1 and has_other_matrices(self._model):
                    torch.set_num_threads(threads)
                return
            except UnsupportedAttention as error:
                reasons.append(str(error))
                if isinstance(error, InconsistentWindows):
                    break
        raise unsupported(config.architecture, "; one sequence at a time: ".join(reasons))

    def _build_paged(self, context: BuildContext) -> None:
        config = self.config
        windows = cache_windows(library_config(config.architecture, config.raw[LIBRARY_CONFIG]))
        assert windows is not None, "read_config selects GATHERED without a plain cache"
        fix_rope(self._model, context.max_len)
        self._find_body()
        offset = config.raw[POSITION_OFFSET]
        self._runner: PagedBody | GatheredBody
        self._runner = PagedBody(self._body, windows, offset, context)
        check_paged(self, self._model, context, offset)
        self._check_invariance(context)

    def _check_invariance(self, context: BuildContext) -> None:
        """Decide whether the results of a request depend on the other requests of a step (``batch_invariant``)."""
        architecture = self.config.architecture
        if not context.ops.BATCH_INVARIANT or context.device.type != "cpu":
            reason = "only the CPU kernels make PyTorch's sums independent of the number of tokens"
        else:
            self._invariance = found = BatchInvariance(context, self._model)
            has_equal_bits = is_batch_invariant(self, self._model, context)
            if has_equal_bits and not found.variant:
                self.batch_invariant = True
                self._invariance = found if found.is_needed else nullcontext()
                logger.info("%s is batch-invariant, as far as checked: see docs/transformers.md", architecture)
                return
            self._invariance = nullcontext()
            names = ", ".join(sorted(found.variant)) or "bits differed between steps with other tokens"
            reason = f"PyTorch's {names}" if found.variant else names
        message = "%s is not batch-invariant: other requests can change the last bits of a result (%s)"
        logger.warning(message, architecture, reason)

    def _build_gathered(self, context: BuildContext) -> None:
        self._invariance = nullcontext()
        self._model.set_attn_implementation("eager")
        fix_rope(self._model, context.max_len)
        self._find_body()
        offset = self.config.raw[POSITION_OFFSET]
        self._runner = body = GatheredBody(self._ops, self._body, self._model.config, offset, self.dtype, self._device)
        try:
            check_gathered(self, self._model, context)
        except Exception:  # modules that ignore a state in steps with several tokens may raise any exception
            if not body.state_specs():
                raise
            body.single_tokens = True
            check_gathered(self, self._model, context)
        logger.warning(
            "%s computes one sequence of a step after the other: its attention cannot be replaced by a kernel. It is "
            "not batch-invariant: the steps in which a prompt is computed can change the last bits of a result",
            self.config.architecture,
        )

    @torch.inference_mode()
    def _find_body(self) -> None:
        """Find the body, which is the first module that runs, and the class of its output."""
        started: list[nn.Module] = []
        outputs: dict[nn.Module, Any] = {}
        hooks = [
            hook
            for module in self._model.modules()
            if module is not self._model
            for hook in (
                module.register_forward_pre_hook(lambda module, _: started.append(module)),
                module.register_forward_hook(lambda module, _, output: outputs.update({module: output})),
            )
        ]
        ids = torch.zeros(1, 2, dtype=torch.int64, device=self._device)
        try:
            with attending(RecordedAttentions(self.max_len)):
                self._model(input_ids=ids, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        self._body = started[0]
        self._output = type(outputs[self._body])

    def kv_specs(self, block_size: int, quantization: str = "") -> list[KVSpec]:
        return self._runner.kv_specs(block_size, quantization)

    def state_specs(self) -> list[StateSpec]:
        return self._runner.state_specs()

    def transfer_layouts(self, slot_tokens: int, quantization: str = "") -> list[TransferLayout]:
        raise invalid("role", "models run by transformers do not support KV cache transfer: omit role")

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: list[Any], export: Sequence[LayerExport] = ()) -> Tensor:
        with self._invariance:
            return self._runner.forward(batch, cache)[batch.logits_indices]

    @torch.inference_mode()
    def embed(self, token_ids: Tensor) -> Tensor:
        with self._invariance:
            embedded: Tensor = self._model.get_input_embeddings()(token_ids)
        return embedded

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """See ``Model.logits``. Runs the causal language model with these hidden states as the output of its body."""
        output = self._output(last_hidden_state=hidden[None])
        ids = torch.zeros(1, hidden.shape[0], dtype=torch.int64, device=self._device)
        self._body.forward = lambda *args, **options: output
        try:
            with self._invariance:
                logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        finally:
            del self._body.forward
        return logits.float()

    @torch.inference_mode()
    def argmax(self, hidden: Tensor, bitmask: Tensor | None = None) -> Tensor:
        logits = self.logits(hidden)
        logits = logits if bitmask is None else self._ops.apply_bitmask(logits, bitmask)
        return self._ops.argmax_of_logits(logits)[0]


@contextmanager
def _reasons() -> Iterator[None]:
    """Context manager that raises ``UnsupportedAttention`` for all errors."""
    try:
        yield
    except UnsupportedAttention:
        raise
    except PenstockError as error:
        raise UnsupportedAttention(str(error)) from error
    except Exception as error:  # a model's code may raise any exception for a mask or layer of Penstock
        reason = first_line(error)
        if CausalMask.__name__ in reason:
            reason = "its modules do arithmetic with the attention mask (position biases)"
        elif reason == type(error).__name__:
            reason = f"its modules raise {reason}"
        raise UnsupportedAttention(reason) from error


def build(context: BuildContext, config: ModelConfig, num_mtp_heads: int) -> TransformersModel:
    return TransformersModel(context, config)
