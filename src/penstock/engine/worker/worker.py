"""A worker: one rank's model, KV cache and rows. It computes steps, and knows no scheduler and no request."""

from __future__ import annotations

import logging
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from penstock.config.options import EngineOptions
from penstock.models import LoRAAdapter, Model, load_lora
from penstock.planning.host_memory import free_host_bytes

from ..step import (
    DeviceMemory,
    Draw,
    LoadLoRA,
    MemoryProfile,
    ModelInfo,
    Op,
    Propose,
    RowUpdates,
    StepInput,
    StepOutput,
    UnloadLoRA,
)
from .draft_model import DraftModel
from .drafter import ModelDrafter
from .input_batch import InputBatch
from .loading import LoadedModels, load_models
from .model_runner import ModelRunner
from .mtp import MTPDrafter
from .row import Position, Row

logger = logging.getLogger(__name__)

MOST_DRAFTER_FAILURES = 8
"""After a step, since the worker started, after which its drafter is left alone."""


class Worker:
    """Loads, then computes steps one after the other, all in one thread but for reading adapters.

    Raises ``PenstockError`` with one sentence where the options or a checkpoint do not allow a start.
    """

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._loaded: LoadedModels | None = None
        self._forks: dict[int, list[int]] = defaultdict(list)
        self._drafter: ModelDrafter | None = None
        self._drafter_failures = 0
        self._reader = ThreadPoolExecutor(1, "read-adapter")
        self._reading: list[tuple[LoadLoRA, Future[LoRAAdapter], Future[Any]]] = []
        self._adapters: dict[int, LoRAAdapter] = {}

    # --- The start --------------------------------------------------------------------------------------------------

    def load(self) -> ModelInfo:
        """Read the checkpoints."""
        options, loaded = self._options, load_models(self._options)
        self._loaded = loaded
        rows = options.max_num_seqs + 1  # one to find out with whether anything can be computed
        self._batch = InputBatch(rows, loaded.max_model_len, options.block_size, loaded.device)

        def runner(model: Model, lora: bool) -> ModelRunner:
            return ModelRunner(
                model,
                loaded.ops,
                loaded.device,
                model.kv_specs(options.block_size, options.kv_cache_dtype == "int8"),
                max_tokens=options.max_num_batched_tokens,
                max_rows=rows,
                max_len=loaded.max_model_len,
                lora=lora,
            )

        self._runner = runner(loaded.model, bool(loaded.max_loras))
        self._runners = [self._runner]
        if loaded.draft:
            size, tokens = options.block_size, options.max_num_batched_tokens
            self._runners.append(runner(loaded.draft, False))
            self._drafter = DraftModel(self._runners[1], self._batch, size, tokens)
        elif loaded.model.mtp_heads:
            self._drafter = MTPDrafter(self._runner, self._batch)
        return msgspec.structs.replace(loaded.info, drafts=self._drafter is not None)

    def profile(self) -> MemoryProfile:
        """What the KV cache may take beside weights and the largest step."""
        loaded, runners = self._models, self._runners
        activations = sum(runner.activation_bytes() for runner in runners)
        if loaded.device.type == "cuda":
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info(loaded.device)
        else:  # weights that are mapped from a disk count as free, but every step needs them
            total = 0
            free = free_host_bytes() - sum(runner.model.mapped_bytes for runner in runners)
        return MemoryProfile(
            free=max(free - activations, 0),
            total=total,
            block_bytes=sum(runner.block_bytes for runner in runners),
            host_block_bytes=self._runner.block_bytes,
        )

    def init_cache(self, blocks: int, host_blocks: int) -> None:
        """Allocate the KV cache; from then on steps can be computed."""
        self._runner.init_cache(blocks, host_blocks)
        if self._drafter:
            self._drafter.init_cache(blocks)

    # --- Steps ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute(self, step: StepInput, masks: Future[np.ndarray] | None = None) -> StepOutput:
        """Compute a step.

        Args:
            masks: grammar masks of the rows that sample, and of their drafts, ``[positions, vocabulary / 32]`` int32.
                They are waited for only once the forward pass is done.
        """
        self._settle()
        self._apply(step.updates)
        forks = dict(self._forks)
        if not len(step.rows):
            return StepOutput([])
        both, wanted = step.lengths, step.samples.astype(np.int64)
        if len(step.drafts):
            self._write_drafts(step)
            both, wanted = both + step.drafts, wanted + step.drafts
        telling = self._prompt_outputs_wanted(step, wanted) if self._batch.any_telling else {}
        if self._drafter and self._drafter.needs_all_states:
            wanted = both
        hidden = self._runner.forward(self._batch.flatten(step.rows, step.starts, both, wanted))
        ends = wanted.cumsum()
        output = StepOutput([], {}, {}, {})
        for i, count in telling.items():
            self._collect_prompt_outputs(
                output, i, self._batch.row(int(step.rows[i])), step, hidden[ends[i] - count : ends[i]]
            )
        draws = self._sample(step, ends, forks, hidden, masks.result() if masks else None)
        output.draws.extend(draws.values())
        if self._drafter:
            self._after_step(self._drafter, step, draws, forks, hidden)
        return output

    def call(self, op: Op) -> Future[Any]:
        """Do something between two steps; the future is done at once, but for what reads files."""
        done: Future[Any] = Future()
        match op:
            case LoadLoRA():
                self._reading.append((op, self._reader.submit(self._load_lora, op.path), done))
                return done
            case UnloadLoRA(slot):
                self._adapters.pop(slot).deactivate(slot)
                done.set_result(None)
            case Propose():
                done.set_result(self._propose(op))
            case DeviceMemory():
                done.set_result(torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0)
        return done

    @property
    def reading(self) -> list[Future[LoRAAdapter]]:
        """Adapters that are being read."""
        return [reading for _, reading, _ in self._reading]

    def poll(self) -> None:
        """Put adapters that have been read into their slots."""
        self._settle()

    # --- Parts of a step --------------------------------------------------------------------------------------------

    @property
    def _models(self) -> LoadedModels:
        assert self._loaded is not None, "load it first"
        return self._loaded

    def _apply(self, updates: RowUpdates) -> None:
        """Rows first, which cannot fail: should blocks not be moved, the rows are right all the same."""
        self._forks.clear()
        self._batch.apply(updates)
        for row, parent, _ in updates.forks.reshape(-1, 3).tolist():
            self._forks[parent].append(row)
        self._runner.move_blocks(updates.swap_out, updates.swap_in, updates.copies)
        if self._drafter:
            self._drafter.apply(updates)

    def _write_drafts(self, step: StepInput) -> None:
        at = 0
        for i in np.flatnonzero(step.drafts).tolist():
            first, count = int(step.starts[i] + step.lengths[i]), int(step.drafts[i])
            self._batch.tokens[step.rows[i], first : first + count] = step.draft_token_ids[at : at + count]
            at += count

    def _prompt_outputs_wanted(self, step: StepInput, wanted: np.ndarray) -> dict[int, int]:
        """Items of whose prompt something is told, and how many trailing hidden states that takes: more than
        ``wanted``, which is raised."""
        found: dict[int, int] = {}
        for i in np.flatnonzero(self._batch.telling[step.rows]).tolist():
            row, start, length = self._batch.row(int(step.rows[i])), int(step.starts[i]), int(step.lengths[i])
            if row.pooling == "mean" or row.prompt_tokens(start, length) or row.context_tokens(start, length):
                count = length
            elif row.pooling:
                count = int(start + length == row.prompt_length)
            else:
                continue
            if count:
                found[i] = wanted[i] = count
        return found

    def _collect_prompt_outputs(self, output: StepOutput, item: int, row: Row, step: StepInput, hidden: Tensor) -> None:
        """What is told of a prompt, made of an item's hidden states."""
        start, length = int(step.starts[item]), int(step.lengths[item])
        if row.pooling:
            output.states[item] = hidden.to("cpu", torch.float32, copy=True).numpy()
        if count := row.prompt_tokens(start, length):
            tokens = row.tokens[start + 1 : start + 1 + count]
            output.prompt_logprobs[item] = self._runner.prompt_logprobs(
                hidden[:count], tokens, row.prompt_logprobs or 0
            )
        if count := row.context_tokens(start, length):
            output.context_logits[item] = b"".join(self._runner.logits(hidden[:count]))

    def _sample(
        self,
        step: StepInput,
        ends: np.ndarray,
        forks: dict[int, list[int]],
        hidden: Tensor,
        masks: np.ndarray | None,
    ) -> dict[int, Draw]:
        """What each row samples, by row; its tokens are in the batch then."""
        positions: list[Position] = []
        states: list[int] = []
        sampling: list[tuple[int, int, int]] = []
        drafts = step.drafts.tolist() if len(step.drafts) else repeat(0)  # as many as there are items
        lengths = (step.starts + step.lengths).tolist()
        items = zip(step.samples.tolist(), step.rows.tolist(), lengths, drafts, ends.tolist(), strict=False)
        for samples, number, length, drafted, end in items:
            if not samples:
                continue
            for own in (number, *forks[number]) if number in forks else (number,):
                row = self._batch.row(own)
                sampling.append((own, length, drafted))
                for place in range(drafted + 1):
                    positions.append(row.position(length + place))
                    states.append(end - 1 - drafted + place)
        if not positions:
            return {}
        if states != list(range(len(hidden))):
            hidden = hidden[states]
        draws = self._runner.sample(hidden, positions, masks)
        tokens, found, at = self._batch.tokens, dict[int, Draw](), 0
        for row_number, length, drafted in sampling:
            draw = draws[at]
            if drafted:
                draw = _accepted(draws[at : at + drafted + 1], tokens[row_number, length : length + drafted].tolist())
                if counts := self._batch.row(row_number).counts:
                    counts.rewind(length)
            tokens[row_number, length : length + len(draw.token_ids)] = draw.token_ids
            found[row_number] = draw
            at += drafted + 1
        return found

    # --- Drafts -----------------------------------------------------------------------------------------------------

    def _propose(self, op: Propose) -> list[list[int]]:
        """No lists where the drafter fails: an error would be the step's."""
        assert self._drafter is not None
        self._apply(op.updates)
        try:
            with torch.inference_mode():
                return self._drafter.propose(op.rows, op.lengths, op.counts)
        except Exception:
            logger.warning("the drafter has failed", exc_info=True)
            return []
        finally:  # drafts are no tokens of a row yet
            for row, length in zip(op.rows.tolist(), op.lengths.tolist(), strict=True):
                if counts := self._batch.row(row).counts:
                    counts.rewind(length)

    def _after_step(
        self,
        drafter: ModelDrafter,
        step: StepInput,
        draws: dict[int, Draw],
        forks: dict[int, list[int]],
        hidden: Tensor,
    ) -> None:
        """A drafter that fails costs drafts, and nothing else."""
        if self._drafter_failures >= MOST_DRAFTER_FAILURES:
            return
        try:
            drafts = step.drafts if len(step.drafts) else np.zeros_like(step.rows)
            drafter.after_step(step.rows, step.starts, step.lengths, drafts, draws, forks, hidden)
        except Exception:
            self._drafter_failures += 1
            logger.exception("the drafter has failed after a step (%d times now)", self._drafter_failures)

    # --- Adapters ---------------------------------------------------------------------------------------------------

    def _load_lora(self, path: str) -> LoRAAdapter:
        model = self._runner.model
        return load_lora(Path(path), model.lora_targets, model.dtype, self._models.device, self._options.max_lora_rank)

    def _settle(self) -> None:
        for entry in [entry for entry in self._reading if entry[1].done()]:
            self._reading.remove(entry)
            op, reading, done = entry
            if error := reading.exception():
                done.set_exception(error)
                continue
            try:
                reading.result().activate(op.slot)
            except Exception as error:
                done.set_exception(error)
                continue
            self._adapters[op.slot] = reading.result()
            done.set_result(None)


def _accepted(draws: list[Draw], draft: list[int]) -> Draw:
    """What a row sampled for itself: as long as that is what was drafted, the draw after it counts, too."""
    first, *later = draws
    if first.failure:
        return first
    token_ids, told, logits = list(first.token_ids), list(first.logprobs or []), list(first.logits or [])
    for drafted, draw in zip(draft, later, strict=True):
        if token_ids[-1] != drafted or draw.failure:  # which it comes to again in the next step
            break
        token_ids += draw.token_ids
        told += draw.logprobs or []
        logits += draw.logits or []
    return Draw(token_ids, None if first.logprobs is None else told, None if first.logits is None else logits)
