"""The worker: model, KV cache and rows of one rank. It computes steps, and does not know scheduler and requests."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from penstock.checkpoint.kv_spec import KV_QUANTIZATION
from penstock.config.cuda_graphs import capture_sizes
from penstock.config.options import EngineOptions
from penstock.config.speculative import SpeculativeConfig
from penstock.core.errors import invalid
from penstock.core.expert_placement import num_redundant_experts
from penstock.models.model import Model
from penstock.models.whisper import Whisper
from penstock.parallel import SINGLE_RANK, SINGLE_STAGE, Group, PipelineStage
from penstock.planning.host_memory import free_host_bytes
from penstock.planning.kv_size import weight_bytes
from penstock.planning.model_size import size_of

from ..step import (
    AllocateCache,
    ChangeWeights,
    DeviceMemory,
    ExportKV,
    ExportState,
    FreeMemory,
    ImportKV,
    ImportState,
    InitCache,
    LoadLoRA,
    LoadModel,
    LoadWeights,
    MemoryProfile,
    ModelInfo,
    NewRow,
    ProfileMemory,
    Propose,
    ReadExpertLoad,
    RowUpdates,
    SampledTokens,
    StepInput,
    StepOutput,
    UnloadLoRA,
    WorkerCall,
)
from .adapter_slots import AdapterSlots
from .background_reads import BackgroundReads
from .host_copy import to_device
from .input_batch import InputBatch
from .kv_copies import KVCopies, export_places
from .loading import load_models
from .model_runner import ModelRunner
from .model_swap import ModelSwap, return_memory
from .multimodal import ImageFeatures
from .pending_step import PendingStep
from .prompt_outputs import PromptOutputs
from .row import Position
from .spec_decode.draft_model import DraftModel
from .spec_decode.drafter import VerifiedStep, WorkerDrafter
from .spec_decode.head_drafter import HeadDrafter
from .spec_decode.step_drafts import StepDrafts
from .spec_decode.tree_rows import TreeMemory, with_paths
from .speech import SpeechStates
from .states import RowStates

logger = logging.getLogger(__name__)

MAX_DRAFTER_ERRORS = 8
"""Number of errors of ``WorkerDrafter.after_step`` after which the worker does not call it anymore."""


class Worker:
    """Computes steps.

    ``call`` ``LoadModel``, ``ProfileMemory`` and ``InitCache`` once each, in this order, before ``execute``, all in the
    same thread. Only files of adapters and new weights are read in another thread. All ranks of a group get the same
    calls and compute the same, except that each rank computes a shard of the layers' outputs.

    Args:
        options: options of the engine.
        group: tensor-parallel group, as seen by this rank.
        stage: pipeline stage of this rank.
    """

    def __init__(self, options: EngineOptions, group: Group = SINGLE_RANK, stage: PipelineStage = SINGLE_STAGE) -> None:
        self._options = options
        self._group = group
        self._stage = stage
        self._runners: list[ModelRunner] = []
        """Runner of the model, then of the draft model if the options select one."""
        self._forks: dict[int, list[int]] = defaultdict(list)
        """Rows forked in the current step, by parent row."""
        self._drafter: WorkerDrafter | None = None
        self._drafter_errors = 0
        self._reads = BackgroundReads()
        self.asynchronous = False
        """True if ``submit`` returns before the device has computed the step."""
        self._in_flight: deque[PendingStep] = deque()
        """Steps that the device may still be computing, oldest first. Empty unless ``asynchronous``."""
        self._num_blocks = (0, 0)
        """Number of KV blocks on the device and in host memory."""
        self._num_snapshots = 0

    # --- Start ------------------------------------------------------------------------------------------------------

    def _load(self, weights: str) -> ModelInfo:
        """Load the models, and create everything that depends on them (``LoadModel``)."""
        options, loaded = self._options, load_models(self._options, self._group, self._stage, weights)
        self._ops, self._device, self._expert_load = loaded.ops, loaded.device, loaded.expert_load
        rows = options.max_num_seqs + 1  # ``probe_step`` uses the last row
        speculative = SpeculativeConfig.read(options.speculative_config)
        tree = speculative.tree if speculative else None
        num_scratch_blocks = tree.scratch_blocks(options.block_size) if tree else 0
        path_rows = range(rows, rows + num_scratch_blocks)  # one row per block suffices: a path has at least one block
        self._batch = InputBatch(path_rows.stop, loaded.max_model_len, options.block_size)
        self._tree_memory = TreeMemory(self._batch, options.block_size, path_rows, num_scratch_blocks)
        self._drafts = StepDrafts(self._batch, self._tree_memory)
        self._images = ImageFeatures(self._batch) if loaded.model.vision else None
        self._speech = (
            SpeechStates(loaded.model, loaded.ops, rows, options.block_size)
            if isinstance(loaded.model, Whisper)
            else None
        )

        self._states = None
        if state_specs := loaded.model.state_specs():
            max_drafts = speculative.max_draft_len if speculative else 0
            self._states = RowStates(state_specs, rows, max_drafts, loaded.device)

        def runner(model: Model, lora: bool, states: RowStates | None = None) -> ModelRunner:
            return ModelRunner(
                model,
                loaded.ops,
                loaded.device,
                model.kv_specs(options.block_size, KV_QUANTIZATION[options.kv_cache_dtype]),
                max_tokens=options.max_num_batched_tokens,
                max_rows=rows,
                max_len=loaded.max_model_len,
                block_size=options.block_size,
                state_cache=states.cache if states else None,
                lora=lora,
                graph_sizes=()
                if options.enforce_eager
                else capture_sizes(options.max_num_seqs, options.cudagraph_capture_sizes),
            )

        self._runner = runner(loaded.model, bool(loaded.max_loras), self._states)
        self._runners = [self._runner]
        self._prompt_outputs = PromptOutputs(self._runner, self._batch)
        self._adapters = AdapterSlots(self._runner, options.max_lora_rank)
        rank = self._stage.rank * self._group.size + self._group.rank
        self._kv_copies = KVCopies(self._runner, options.block_size, KV_QUANTIZATION[options.kv_cache_dtype], rank)
        info, model_size = loaded.info, size_of(loaded.model.config)
        redundant = num_redundant_experts(options.expert_placement, options.num_redundant_experts)
        model_size = model_size.with_redundant_experts(redundant)
        if loaded.device.type == "cpu":
            model_size = model_size.on_cpu()
        total = weight_bytes(model_size, info.quantization, info.dtype, bool(info.mtp_layers))
        self._swap = ModelSwap(
            self._runner,
            loaded.reload,
            loaded.device,
            total // (self._group.size * self._stage.size),
            self._local_ranks,
        )
        if loaded.draft:
            size, tokens = options.block_size, options.max_num_batched_tokens
            self._runners.append(runner(loaded.draft, False))
            self._drafter = DraftModel(self._runners[1], self._batch, size, tokens)
        elif loaded.model.draft_heads:
            self._drafter = HeadDrafter(self._runner, self._batch, tree, self._tree_memory)
        needs_tokens = self._drafter or self._images  # drafter and images need sampled tokens in host memory
        self.asynchronous = loaded.ops.ASYNCHRONOUS and self._stage.size == 1 and not needs_tokens
        return msgspec.structs.replace(loaded.info, drafts=self._drafter is not None, asynchronous=self.asynchronous)

    def use_device(self) -> None:
        """Select the model's GPU in this thread. Required in threads other than the one that executed ``LoadModel``."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def _profile(self) -> MemoryProfile:
        """Measure the memory that is free for KV blocks (``ProfileMemory``)."""
        runners = self._runners
        if self._states:
            self._states.allocate(0)
        activations = sum(runner.activation_bytes() for runner in runners)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info(self._device)
        else:  # the kernel counts weights mapped from a file as free memory, but every step needs them
            total = 0
            free = free_host_bytes() // self._local_ranks - sum(runner.model.mapped_bytes for runner in runners)
        if self._images:
            model = self._runner.model
            size = (1 + len(model.vision.deepstack if model.vision else ())) * model.config.hidden_size
            activations += self._options.encoder_cache_size * size * model.dtype.itemsize
        if self._speech:
            activations += self._speech.num_bytes
        if self._states:
            self._states.free()
            activations += self._states.row_bytes
            if free < self._states.row_bytes:
                limit = free // self._states.slot_bytes
                message = f"the recurrent states of {limit + 1} sequences take more than the free memory; lower it"
                raise invalid("max_num_seqs", message, limit)
        return MemoryProfile(
            free=max(free - activations, 0),
            total=total,
            block_bytes=sum(runner.block_bytes for runner in runners),
            host_block_bytes=self._runner.block_bytes,
            state_bytes=self._states.slot_bytes if self._states else 0,
            swapped_state_bytes=self._states.row_bytes // self._states.rows if self._states else 0,
        )

    def _init_cache(self, call: InitCache) -> None:
        """Allocate the KV cache, and map memory shared with the engine (``InitCache``)."""
        self._kv_copies.map(call.transfer, call.offload)
        self._num_blocks = call.blocks, call.host_blocks
        self._num_states = call.snapshots, call.swapped_states
        self._tree_memory.init_cache(call.blocks)
        self._allocate_cache()

    def _allocate_cache(self) -> None:
        blocks, host_blocks = self._num_blocks
        load = self._expert_load.read()  # ``init_cache`` computes steps to capture CUDA graphs: restore the counters
        if self._states:
            self._states.allocate(*self._num_states)
        self._runner.init_cache(blocks, host_blocks, self._kv_copies.exports)
        if self._drafter:
            self._drafter.init_cache(blocks)
        self._expert_load.write(load)

    @property
    def _local_ranks(self) -> int:
        """Number of ranks on this machine, including ranks of other replicas."""
        return self._group.size * self._stage.size // self._options.nnodes * self._options.data_parallel_size

    def close(self) -> None:
        """Free the KV caches and captured forward passes. The worker cannot be used afterwards. Weights are freed when
        this object is."""
        self._in_flight.clear()
        for runner in self._runners:
            runner.free()

    # --- Steps ------------------------------------------------------------------------------------------------------

    def execute(self, step: StepInput, grammar_bitmask: Future[np.ndarray] | None = None) -> StepOutput:
        """Compute a step. If it fails on one rank, it fails on all ranks. Only the last stage returns output.

        Args:
            grammar_bitmask: see ``Executor.submit``. The worker waits for it after the forward pass.
        """
        return self.submit(step, grammar_bitmask)()

    def submit(self, step: StepInput, grammar_bitmask: Future[np.ndarray] | None = None) -> Callable[[], StepOutput]:
        """Compute a step, or only start it if ``asynchronous``. See ``execute`` for the arguments. Returns a function
        that waits for the step and returns its output, or raises its error."""
        try:
            return self._submit(step, grammar_bitmask)
        except Exception as error:
            return partial(_raise, error)

    def _submit(self, step: StepInput, grammar_bitmask: Future[np.ndarray] | None) -> Callable[[], StepOutput]:
        if not self.asynchronous:
            with self._stage.step(), self._step():
                output, verified = self._start(step, grammar_bitmask)()
            if verified:
                self._after_step(verified)
            return lambda: output
        # A step may use tokens that the previous step is still sampling, unless the host needs their values.
        reads_tokens = len(step.drafts) or any([self._batch.needs_token_values(row) for row in step.rows.tolist()])
        while len(self._in_flight) > (0 if reads_tokens else 1):
            self._in_flight.popleft().complete()
        with self._step():
            finish = self._start(step, grammar_bitmask)
        pending = PendingStep(lambda: finish()[0])
        self._in_flight.append(pending)
        if len(step.drafts):
            pending.complete()
        return pending.result

    @contextmanager
    def _step(self) -> Iterator[None]:
        """Context of a computation that fails on all ranks if it fails on one rank."""
        try:
            with torch.inference_mode(), self._group.step():
                yield
        except BaseException:
            if self._drafter:
                self._drafter.reset()
            raise

    def _start(
        self, step: StepInput, grammar_bitmask: Future[np.ndarray] | None
    ) -> Callable[[], tuple[StepOutput, VerifiedStep | None]]:
        """Start a step. Returns a function that waits for the step, and returns its output and the input of the drafter
        (None without a drafter)."""
        self.poll()
        self._apply(step.updates)
        if self._images:
            self._images.update(self._runner.model, step)
        if self._speech:
            self._speech.update(self._runner.model, step.updates.new)
        forks = dict(self._forks)
        if not len(step.rows):
            self._stage.pass_on()
            return lambda: (StepOutput([]), None)
        num_tokens, num_states = step.lengths, step.needs_sample.astype(np.int64)
        if len(step.drafts) or self._drafts.trees:
            self._drafts.write(step)
        if len(step.drafts):
            num_tokens, num_states = num_tokens + step.drafts, num_states + step.drafts
        if not self._stage.is_last:
            self._stage.send(self._forward(step, num_tokens, num_tokens)[0])
            return lambda: (StepOutput([]), None)
        prompt_states: dict[int, int] = {}
        if self._batch.any_prompt_outputs:
            prompt_states = self._prompt_outputs.count_states(step, num_states)
        if self._drafter and self._drafter.needs_all_hidden_states:
            num_states = num_tokens
        hidden, aux_hidden_states = self._forward(step, num_tokens, num_states)
        ends = num_states.cumsum()
        output = StepOutput([], {}, {}, {})
        for i, count in prompt_states.items():
            self._prompt_outputs.collect(
                output, i, self._batch.row(int(step.rows[i])), step, hidden[ends[i] - count : ends[i]]
            )
            if self._speech and (times := self._speech.take_times(int(step.rows[i]))) is not None:
                output.pooler_hidden_states[i] = times
        sampling = self._sample(step, ends, forks, hidden, grammar_bitmask.result() if grammar_bitmask else None)

        def finish() -> tuple[StepOutput, VerifiedStep | None]:
            sampled = sampling()
            output.sampled.extend(sampled.values())
            if not self._drafter:
                return output, None
            drafts = step.drafts if len(step.drafts) else np.zeros_like(step.rows)
            states = torch.cat(aux_hidden_states, -1) if aux_hidden_states else hidden
            accepted = {row: tree.accepted for row, tree in self._drafts.trees.items()}
            return output, VerifiedStep(step.rows, step.starts, step.lengths, drafts, sampled, forks, states, accepted)

        return finish

    def call(self, call: WorkerCall) -> Future[Any]:
        """Execute a call between two steps. The returned future is done, except for ``LoadLoRA`` and ``LoadWeights``:
        ``poll`` completes their futures once the files have been read."""
        done: Future[Any] = Future()
        result: Any = None
        match call:
            case LoadLoRA(slot, path):
                return self._reads.submit(partial(self._adapters.read, path), partial(self._adapters.fill, slot))
            case LoadWeights(path):
                self._swap.check_memory()
                return self._reads.submit(partial(self._swap.read, path), self._swap.keep)
            case LoadModel(weights):
                result = self._load(weights)
            case ProfileMemory():
                result = self._profile()
            case InitCache():
                self._init_cache(call)
            case ChangeWeights(action):
                self._change_weights(action)
            case FreeMemory(level):
                result = self._free_memory(level)
            case AllocateCache():
                self._allocate_cache()
            case UnloadLoRA(slot):
                self._adapters.empty(slot)
            case Propose():
                result = self._propose(call)
            case ExportKV(first, last, slots, places):
                self._kv_copies.export_tokens(first, last, slots, places)
            case ImportKV(first, last, slots, places):
                self._kv_copies.import_tokens(first, last, slots, places)
            case ExportState(snapshot, slots):
                self._export_state(snapshot, slots)
            case ImportState():
                self._import_state(call)
            case ReadExpertLoad(reset):
                result = self._expert_load.read()
                if reset:
                    self._expert_load.write({})
            case DeviceMemory():
                result = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
        done.set_result(result)
        return done

    @property
    def pending_loads(self) -> list[Future[Any]]:
        """Futures of the files being read. Call ``poll`` when one is done."""
        return self._reads.pending

    def poll(self) -> None:
        """Put loaded adapters into their slots, keep loaded weights, and complete the futures of their calls."""
        if self._reads.unfinished:
            self._reads.poll()

    # --- Parts of a step --------------------------------------------------------------------------------------------

    def _apply(self, updates: RowUpdates) -> None:
        """Apply updates. Rows are updated first, as this cannot fail, so they are up to date if moving blocks fails."""
        self._forks.clear()
        self._batch.apply(updates)
        for row, parent, _ in updates.forks.reshape(-1, 3).tolist():
            self._forks[parent].append(row)
        if len(updates.stores):
            self._kv_copies.store_blocks(updates.stores[::2], updates.stores[1::2])
        if self._states:
            for state in updates.state_stores:
                self._states.read(state.snapshot, self._kv_copies.host_slots, self._share(state.slots))
            self._states.swap_out(updates.state_swap_out)
        self._runner.move_blocks(updates.swap_out, updates.swap_in, updates.copies)
        if len(updates.loads):
            self._kv_copies.load_blocks(updates.loads[1::2], updates.loads[::2])
        if self._states:
            self._states.begin(updates, self._load_state)
        if self._drafter:
            self._drafter.apply(updates)

    def _load_state(self, row: NewRow) -> None:
        """Load the snapshot from which a row starts from the host tier."""
        assert self._states
        self._states.write(row.snapshot, self._kv_copies.host_slots, self._share(row.state_slots))

    def _share(self, slots: list[int]) -> list[int]:
        """This rank's share of the slots of a state, which are in order of pipeline stage and rank."""
        count = len(slots) // (self._group.size * self._stage.size)
        rank = self._stage.rank * self._group.size + self._group.rank
        return slots[rank * count : (rank + 1) * count]

    def _export_state(self, snapshot: int, slots: np.ndarray) -> None:
        """Copy a snapshot to this rank's share of ``slots`` of the transfer buffer (``ExportState``)."""
        if self._states is None:  # no layer of this pipeline stage has a state
            return
        self._complete_steps()
        self._states.read(snapshot, self._kv_copies.transfer_slots, self._share(slots.tolist()))

    def _import_state(self, call: ImportState) -> None:
        """Copy a part of a snapshot from the transfer buffer, if it is of this rank (``ImportState``)."""
        if self._states is None:
            return
        indices = self._share(list(range(call.count)))
        if call.index in indices:
            first = call.index - indices[0]
            self._states.write(call.snapshot, self._kv_copies.transfer_slots, [call.slot], first)

    def _forward(
        self, step: StepInput, num_tokens: np.ndarray, num_states: np.ndarray
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute the tokens of a step with this stage's layers. Returns the hidden states of the last ``num_states``
        tokens of each item (on the last stage) or the input of the next stage (on other stages), and
        ``Batch.aux_hidden_states``."""
        first_states = None
        if self._batch.any_prompt_outputs:
            first_states = np.array([self._batch.row(row).pooling == "cls" for row in step.rows.tolist()])
        rows, starts, lengths = step.rows, step.starts, num_tokens
        if self._drafts.trees:
            rows, starts, lengths, num_states, first_states = with_paths(
                self._drafts.trees, rows, starts, lengths, num_states, first_states
            )
        batch = self._batch.flatten(rows, starts, lengths, num_states, first_states=first_states)
        if self._drafts.trees:
            copies = self._drafts.shared_copies()
            batch.slot_copies = torch.from_numpy(copies.sources), torch.from_numpy(copies.targets)
        if len(step.export_places):
            batch.export_step = step.export_step
            batch.export_places = torch.from_numpy(export_places(step, num_tokens))
        if not self._stage.is_first:
            model = self._runner.model
            hidden = self._stage.receive(model.config.stream_size, model.dtype)
            batch.hidden_states = hidden
        if self._images:
            self._images.prepare(self._runner.model, batch, rows, starts, lengths)
        if self._speech:
            batch.cross_attention = self._speech.cross_attention(rows, batch.attention.query_start_loc)
        if self._states:
            batch.states = self._states.batch(step)
        hidden = self._runner.forward(batch)
        if self._states:
            self._states.fork(step.updates)
        if self._speech and batch.cross_attention:
            self._speech.collect(rows, batch.cross_attention)
        return hidden, batch.aux_hidden_states

    def _sample(
        self,
        step: StepInput,
        ends: np.ndarray,
        forks: dict[int, list[int]],
        hidden: Tensor,
        grammar_bitmask: np.ndarray | None,
    ) -> Callable[[], dict[int, SampledTokens]]:
        """Sample tokens for each row. Returns a function that waits for the tokens, writes them to the batch, and
        returns them by row, in the order of ``StepOutput.sampled``.

        Args:
            ends: end index of the hidden states of each item in ``hidden``, ``[items]``.
            forks: rows forked in this step, by parent row.
            hidden: trailing hidden states of each item, ``[states, hidden]``.
        """
        positions: list[Position] = []
        states: list[int] = []
        sampling: list[tuple[int, int, int]] = []
        drafts = step.drafts.tolist() if len(step.drafts) else repeat(0)
        lengths = (step.starts + step.lengths).tolist()
        items = zip(step.needs_sample.tolist(), step.rows.tolist(), lengths, drafts, ends.tolist(), strict=False)
        for samples, number, length, drafted, end in items:
            if not samples:
                continue
            for row_number in (number, *forks[number]) if number in forks else (number,):
                row = self._batch.row(row_number)
                sampling.append((row_number, length, drafted))
                for i, depth in enumerate(self._drafts.depths(row_number, drafted) if drafted else (0,)):
                    positions.append(row.position(length + depth))
                    states.append(end - 1 - drafted + i)
        if not positions:
            return dict
        if states != list(range(len(hidden))):
            hidden = hidden[to_device(states, hidden.device)]
        samples = self._runner.sample(hidden, positions, grammar_bitmask)
        if self.asynchronous and not len(step.drafts):
            self._runner.keep_sampled(samples.token_ids)
            self._batch.set_in_flight([row for row, _, _ in sampling], [length for _, length, _ in sampling])
        return lambda: self._record(sampling, samples.result())

    def _record(self, sampling: list[tuple[int, int, int]], sampled: list[SampledTokens]) -> dict[int, SampledTokens]:
        """Accept drafts, and write the sampled tokens to the batch. Returns the sampled tokens by row.

        Args:
            sampling: row number, length before the sampled token, and number of draft tokens of each row.
            sampled: result of each position.
        """
        tokens, by_row, at = self._batch.tokens, dict[int, SampledTokens](), 0
        for row_number, length, drafted in sampling:
            result = sampled[at]
            if drafted:
                result = self._drafts.accept(row_number, length, sampled[at : at + drafted + 1])
                if counts := self._batch.row(row_number).counts:
                    counts.rewind(length)
            tokens[row_number, length : length + len(result.token_ids)] = result.token_ids
            by_row[row_number] = result
            at += drafted + 1
        if self._drafts.trees:
            self._runner.copy_slots(*self._drafts.accepted_copies())
        if self.asynchronous:
            self._batch.clear_in_flight([row for row, _, _ in sampling], [length for _, length, _ in sampling])
        return by_row

    # --- Drafts -----------------------------------------------------------------------------------------------------

    def _propose(self, call: Propose) -> list[list[int] | None]:
        """Execute ``Propose``. An error of the drafter is logged and yields no drafts, as it must not end requests."""
        assert self._drafter is not None
        with self._step():
            self._apply(call.updates)
        try:
            with self._step():
                return self._drafter.propose(call.rows, call.lengths, call.counts, call.trees)
        except Exception:
            logger.warning("the drafter has failed: %d sequences get no draft", len(call.rows), exc_info=True)
            return [None] * len(call.rows)
        finally:  # remove draft tokens from the counts, as they may not be accepted
            for row, length in zip(call.rows.tolist(), call.lengths.tolist(), strict=True):
                if counts := self._batch.row(row).counts:
                    counts.rewind(length)

    def _after_step(self, step: VerifiedStep) -> None:
        """Pass a computed step to the drafter. An error of the drafter is only logged, as it must not end requests."""
        assert self._drafter is not None
        if self._drafter_errors >= MAX_DRAFTER_ERRORS:
            return
        try:
            with self._step():
                self._drafter.after_step(step)
        except Exception:
            self._drafter_errors += 1
            message = "the drafter could not process a step (error %d; it gets no more steps after %d errors)"
            logger.exception(message, self._drafter_errors, MAX_DRAFTER_ERRORS)

    # --- Weights and memory ------------------------------------------------------------------------------------------

    def _change_weights(self, action: Literal["swap", "commit", "revert"]) -> None:
        """Swap weights, or commit or revert a swap, once all steps are complete (``ChangeWeights``)."""
        self._complete_steps()
        if self._speech:
            self._speech.clear()
        match action:
            case "swap":
                self._swap.swap()
            case "commit":
                self._swap.commit()
            case "revert":
                self._swap.revert()
        if self._drafter:
            self._drafter.reset()

    def _free_memory(self, level: int) -> bool:
        """Execute ``FreeMemory``. Returns True if the weights were also dropped. On a CPU, level 1 keeps the weights,
        as a copy would be in the same memory."""
        drops = level > 1 or self._device.type == "cuda"
        self._complete_steps()
        for runner in self._runners:
            runner.free()
        if self._images:
            self._images.clear()
        if self._speech:
            self._speech.clear()
        if self._states:
            self._states.free()
        if self._drafter:
            self._drafter.reset()
        if drops:
            self._swap.drop()
        return_memory()
        return drops

    def _complete_steps(self) -> None:
        while self._in_flight:
            self._in_flight.popleft().complete()


def _raise(error: Exception) -> StepOutput:
    raise error
