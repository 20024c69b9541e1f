"""Outputs for prompts: log probabilities and logits of prompt tokens, and pooled hidden states."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..step import StepInput, StepOutput, sum_states
from .host_copy import to_device
from .input_batch import InputBatch
from .model_runner import ModelRunner
from .row import Row


class PromptOutputs:
    """Computes outputs for prompts from hidden states.

    Args:
        runner: runner of the model.
        batch: the worker's rows.
    """

    def __init__(self, runner: ModelRunner, batch: InputBatch) -> None:
        self._runner = runner
        self._batch = batch

    def count_states(self, step: StepInput, num_states: np.ndarray) -> dict[int, int]:
        """Number of hidden states needed for prompt outputs, by item. Items without prompt outputs are absent.

        Args:
            num_states: number of trailing hidden states of each item needed for sampling, ``[items]``. Overwritten
                with the returned numbers.
        """
        needed: dict[int, int] = {}
        for i in np.flatnonzero(self._batch.prompt_outputs[step.rows]).tolist():
            row, start, length = self._batch.row(int(step.rows[i])), int(step.starts[i]), int(step.lengths[i])
            logprobs_or_logits = row.num_prompt_logprobs(start, length) or row.num_context_logits(start, length)
            if row.pooling in ("mean", "all") or logprobs_or_logits:
                count = length
            elif row.pooling == "cls":
                count = int(start == 0)
            elif row.pooling:
                count = int(start + length == row.prompt_length)
            else:
                continue
            if count:
                needed[i] = num_states[i] = count
        return needed

    def collect(self, output: StepOutput, item: int, row: Row, step: StepInput, hidden: Tensor) -> None:
        """Add an item's prompt outputs to ``output``.

        Args:
            hidden: the item's hidden states counted by ``count_states``, ``[tokens, hidden]``.
        """
        start, length = int(step.starts[item]), int(step.lengths[item])
        if row.pooling:
            output.pooler_hidden_states[item] = self._pool(row, hidden)
        if count := row.num_prompt_logprobs(start, length):
            tokens = row.tokens[start + 1 : start + 1 + count]
            output.prompt_logprobs[item] = self._runner.prompt_logprobs(
                hidden[:count], tokens, row.prompt_logprobs or 0
            )
        if count := row.num_context_logits(start, length):
            output.context_logits[item] = b"".join(self._runner.logits_bytes(hidden[:count]))

    def _pool(self, row: Row, hidden: Tensor) -> np.ndarray:
        """Hidden states for pooling, or the output of the row's head for them, ``[states, size]`` float32."""
        model = self._runner.model
        if not row.head and not row.pooling_token_ids:
            return hidden.to("cpu", torch.float32, copy=True).numpy()
        if row.pooling == "mean":  # ``hidden`` covers the whole prompt, as one step computes it
            mean = sum_states(hidden.to("cpu", torch.float32).numpy()) / len(hidden)
            hidden = torch.from_numpy(np.asarray(mean)[None]).to(hidden.device, torch.float32)
        if row.head:
            return model.heads[row.head](hidden.to(torch.float32)).numpy(force=True).copy()
        logits = model.logits(hidden.to(model.dtype))[:, to_device(row.pooling_token_ids, hidden.device)]
        return logits.numpy(force=True).copy()
