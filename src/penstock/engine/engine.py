"""The engine: takes requests, computes them step by step, and returns their output tokens as deltas."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock import demo
from penstock.config.options import EngineOptions, LogOptions, SchedulerOptions
from penstock.config.progress import Progress
from penstock.config.speculative import DEFAULT, SpeculativeConfig
from penstock.core import (
    Code,
    EngineRequest,
    Failure,
    GuidedDecodingParams,
    PenstockError,
    TokenDelta,
    Vocabulary,
)
from penstock.core.errors import invalid
from penstock.core.expert_placement import num_redundant_experts
from penstock.core.guided import disallow_additional_properties
from penstock.core.lora import parse_lora_modules
from penstock.models import read_config
from penstock.planning.kv_size import CachePlan, weight_bytes
from penstock.planning.model_size import size_of
from penstock.planning.pipeline import split_layers

from .checks.options import checked_options
from .checks.requests import check_request
from .checks.speculation import why_off
from .checks.whole_prompts import scratch_blocks
from .draft_folder import draft_size
from .executor.base import WorkerLostError
from .executor.start import start_executor
from .guided import BitmaskBuilder, Grammar, GrammarCompiler
from .guided.reasoning_guide import make_guide
from .kv.block_pool import BlockPool
from .kv.memory import count_blocks, count_snapshots, swap_sizes
from .kv.offloading import KVOffloading, new_host_tier, start_offloading
from .kv.snapshots import StateSnapshots
from .kv.swap_space import SwapSpace
from .kv_transfer.connector import KVConnector, model_layouts, new_transfer_buffer
from .lora import LoRAManager
from .request_spans import RequestSpans
from .scheduling.prerequisites import Prerequisite
from .scheduling.scheduler import Scheduler
from .scheduling.step_builder import add_drafts, probe_step
from .sequence.plan import Plan
from .sequence.sequence import Sequence
from .sleep import SleepManager
from .spec_decode.speculation import Speculation
from .spec_decode.suffix import SuffixDrafter
from .step import DeviceMemory, InitCache, LoadModel, MemoryProfile, ModelInfo, ProfileMemory, ReadExpertLoad
from .step_statistics import StepCounts
from .warm_up import warm_up_requests
from .weights import WeightsManager

if TYPE_CHECKING:
    from penstock.tracing import Tracer

logger = logging.getLogger(__name__)

STEP_FAILED = Failure(Code.INTERNAL, "the step failed; the server's log has the traceback")
ENGINE_FAILED = Failure(Code.UNAVAILABLE, "the engine cannot compute steps any more and has to be restarted")
MAX_FAILED_STEPS = 8
"""Number of consecutive failed steps after which the engine gives up and sets ``failure``."""
PREREQUISITES_TIMEOUT = 0.02
"""Maximum seconds that ``step`` waits for prerequisites of requests while no step can be computed."""


class Engine:
    """Serves many requests at once with one model: ``add`` requests, then call ``step`` while ``busy``.

    Args:
        logs: log settings of worker processes; None does not configure logging, as in a library.
        weights: folder of the weights to start with; empty for the model's folder.

    Raises ``PenstockError`` if the engine cannot start with these options or this checkpoint.
    """

    def __init__(self, options: EngineOptions, logs: LogOptions | None = None, weights: str = "") -> None:
        folder = Path(options.model) if options.model else demo.CHAT
        self._config = read_config(folder, options.model_impl)
        self._options = options = checked_options(options, self._config, folder)
        self.max_model_len = options.max_model_len or self._config.max_model_len
        scheduling = options.scheduler(self.max_model_len)  # reports invalid options before weights are read
        lora_modules = parse_lora_modules(options.lora_modules)
        self._in_flight: deque[tuple[Plan, float]] = deque()
        """Plan and time of submission (``time.perf_counter``) of each step in flight, the oldest first."""
        self._collected = 0.0
        """Time at which the last step was collected, ``time.perf_counter``."""
        self._failed_steps = 0
        """Number of consecutive failed steps."""
        self.failure: Failure | None = None
        """Cause of the engine's failure, after which it accepts no requests; None while it works."""
        self.steps = 0
        """Number of steps submitted since the start."""
        self.step_counts = StepCounts()
        self.last_plan = Plan()
        """Plan of the last submitted step."""
        self.before_step: Callable[[int], None] = lambda tokens: None
        """Callback before the engine submits a step or waits for one; gets the number of tokens in flight."""
        self.record_step: Callable[[Iterable[tuple[int, int]]], None] = lambda requests: None
        """Callback with ``uid`` and ``deaths`` of the requests in flight: before a step is submitted, and when none is
        in flight any more."""
        self.after_step: Callable[[Plan, float, float], None] | None = None
        """Callback after each step; gets its plan, start and end, seconds of ``time.perf_counter``."""
        self._gpu_memory = 0
        """Last known value of ``gpu_memory``."""
        self._expert_load: dict[int, list[int]] = {}
        """Last known value of ``expert_load``."""
        self._expert_load_answer: Future[dict[int, list[int]]] | None = None
        """Pending reply of the workers to ``ReadExpertLoad``."""
        self._max_concurrent_batches = options.max_concurrent_batches or options.pipeline_parallel_size
        self._executor = start_executor(options, self._max_concurrent_batches, logs)
        loading = "the model"
        try:
            self._load_model(weights)
            self._start_scheduler(scheduling)
            self.weights = WeightsManager(self._executor, self.scheduler, weights)
            self.sleeper = SleepManager(self._executor, self.scheduler, self.weights)
            max_loras = options.max_loras if options.enable_lora or lora_modules else 0
            self.adapters = LoRAManager(self._executor, self.scheduler, max_loras)
            loading = "LoRA adapters"
            for loaded in [self.adapters.load(name, path) for name, path in lora_modules.items()]:
                self.adapters.wait(loaded)
        except WorkerLostError as error:
            raise PenstockError(Code.UNAVAILABLE, f"{loading} could not be loaded: {error}") from error
        except BaseException:
            self._executor.close()
            raise
        self.kv_connector = self._start_transfers()
        """KV transfers to and from other instances; None with the role ``mixed``."""
        self._grammar_compiler = GrammarCompiler(options.guided_decoding_backend, self.info.vocab_size)
        self._bitmasks = BitmaskBuilder(self.info.vocab_size)
        if options.use_warmup:
            self._warm_up()

    def _load_model(self, weights: str) -> None:
        """Load the model in the workers, and measure the memory that it leaves."""
        self.info: ModelInfo = self._executor.run(LoadModel(weights))
        if self.info.asynchronous and not self._options.max_concurrent_batches:
            self._max_concurrent_batches = max(self._max_concurrent_batches, 2)
        self._memory: MemoryProfile = self._executor.run(ProfileMemory())
        options = self._options
        split = options.pipeline_parallel_size, options.pipeline_parallel_layers, options.quantization, options.dtype
        self._stages = split_layers(size_of(self._config), *split)
        """Layers of each pipeline stage."""

    def _start_scheduler(self, scheduling: SchedulerOptions) -> None:
        """Allocate the KV cache and its host and disk tiers, and create the scheduler."""
        options, info = self._options, self.info
        blocks = count_blocks(options, self._memory, self.max_model_len)
        if self._config.encoder:
            blocks = min(blocks, scratch_blocks(options, self._max_concurrent_batches))
        self.num_allocated_blocks = blocks
        """Number of KV blocks on the device, with those of draft token trees."""
        swap = swap_sizes(options, self._memory)
        speculative = SpeculativeConfig.read(options.speculative_config)
        self._transfer_buffer = None
        if options.role != "mixed":
            self._transfer_buffer = new_transfer_buffer(
                options, model_layouts(options, self._config, info), self._memory.state_bytes
            )
        layouts = model_layouts(options, self._config, info, options.block_size)
        host_tier = new_host_tier(options, layouts, self._memory.state_bytes)
        transfer = self._transfer_buffer.memory if self._transfer_buffer else None
        offload = host_tier.memory if host_tier else None
        num_snapshots = count_snapshots(options, self._memory)
        if self._memory.state_bytes and options.role != "mixed" and not num_snapshots:
            message = (
                f"must be at least 1 with role {options.role}, to transfer recurrent states; there is memory for 0"
            )
            raise invalid("num_state_snapshots", message, 1)
        self._executor.run(
            InitCache(blocks, swap.blocks, transfer, num_snapshots, swap.states, offload)
        )  # raises if memory is too small
        has_kv = self._memory.host_block_bytes > 0
        snapshots = StateSnapshots(num_snapshots, needs_kv=has_kv) if self._memory.state_bytes else None
        device_pool = BlockPool(blocks - _tree_blocks(speculative, options, blocks), options.block_size)
        self.kv_offloading: KVOffloading | None = None
        """Host and disk tiers of the prefix cache; None without them."""
        if host_tier:
            self.kv_offloading = start_offloading(
                options,
                layouts,
                info.fingerprint,
                device_pool,
                host_tier,
                snapshots,
                self._memory.state_bytes,
                self._stages,
            )
        self.scheduler = Scheduler(
            scheduling,
            device_pool,
            SwapSpace(swap.blocks, options.block_size, swap.states if self._memory.state_bytes else None)
            if swap.blocks
            else None,
            weights=info.weights_version,
            pipeline_stages=options.pipeline_parallel_size,
            max_concurrent_batches=self._max_concurrent_batches,
            offloading=self.kv_offloading,
            snapshots=snapshots,
        )
        self.speculation = self.scheduler.speculation = self._new_speculation(speculative)
        self._log_memory(blocks)

    def _new_speculation(self, config: SpeculativeConfig | None) -> Speculation | None:
        """Speculative decoding with ``config``, or by default; None if nothing is drafted."""
        options = self._options
        if not options.speculative_config:
            reason = why_off(options, self._config, self.info)
            config = None if reason else DEFAULT
            logger.info("speculative decoding: %s", f"off ({reason})" if reason else DEFAULT.method)
        if not config:
            return None
        drafter = None
        if config.method == "ngram":
            drafter = SuffixDrafter(config.prompt_lookup_min, config.prompt_lookup_max, answers=False)
        elif not self.info.drafts:
            drafter = SuffixDrafter(
                longest=config.suffix_decoding_max_tree_depth, answers=config.suffix_decoding_max_cached_requests > 0
            )
        return Speculation(drafter, config.max_draft_len, config.adaptive, config.tree, options.block_size)

    def _start_transfers(self) -> KVConnector | None:
        """Connect to the other prefill and decode instances; None with the role ``mixed``."""
        if not self._transfer_buffer:
            return None
        return KVConnector(
            self._options,
            self._config,
            self.info,
            self._transfer_buffer,
            self._executor,
            self.scheduler,
            add=self.add,
            adapter_version=self.adapters.key,
            state_bytes=self._memory.state_bytes,
            stages=self._stages,
        )

    def set_tracer(self, tracer: Tracer) -> None:
        """Record the spans of traced requests."""
        self.scheduler.after_request = RequestSpans(tracer).record
        if self.kv_connector:
            self.kv_connector.imports.tracer = tracer

    def close(self) -> None:
        """Stop the KV transfers, the offloading and the workers."""
        if self.kv_connector:
            self.kv_connector.close()
        if self.kv_offloading:
            self.kv_offloading.close()
        self._executor.close()

    def _warm_up(self) -> None:
        """Compute the requests of ``warm_up_requests``. Raises ``PenstockError`` if a step fails."""
        started, requests = time.monotonic(), warm_up_requests(self.scheduler.options, self.info)
        tokens, shown = sum(len(request.prompt) for request in requests), logger.isEnabledFor(logging.INFO)
        with Progress("warm-up", len(requests), "request", logger.info, shown=shown) as progress:
            while requests or self.busy:
                while requests and self.try_add(requests[0]):
                    del requests[0]
                for delta in self.step():
                    if delta.failure:
                        raise PenstockError.of(delta.failure)
                    progress.update(delta.finished is not None)
        if self._options.expert_load:
            self._executor.run(ReadExpertLoad(reset=True))
        logger.info("warmed up with %d tokens in %.1f seconds", tokens, time.monotonic() - started)

    def _log_memory(self, blocks: int) -> None:
        """Log the model and its memory, with the numbers that ``penstock plan memory`` prints."""
        info, options, on_cpu = self.info, self._options, not self._memory.total
        logger.info(
            "%s, %d KV blocks of %d tokens, kernels %s (%sbatch-invariant)",
            info.architecture,
            blocks,
            options.block_size,
            info.fingerprint,
            "" if info.batch_invariant else "not ",
        )
        redundant = num_redundant_experts(options.expert_placement, options.num_redundant_experts)
        model_size = size_of(self._config).with_redundant_experts(redundant)
        if on_cpu:
            model_size = model_size.on_cpu()
        weights = weight_bytes(model_size, info.quantization, info.dtype, bool(info.mtp_layers))
        if draft := draft_size(SpeculativeConfig.read(options.speculative_config), options.model, model_size):
            weights += weight_bytes(draft.on_cpu() if on_cpu else draft, info.quantization, options.dtype)
        if state := self._memory.state_bytes:
            rows, snapshots = options.max_num_seqs + 1, count_snapshots(options, self._memory)
            message = "memory: recurrent states of %d sequences %.2f GB, %d snapshots for the prefix cache %.2f GB"
            logger.info(message, rows - 1, rows * state / 1e9, snapshots, snapshots * state / 1e9)
        size = self._memory.block_bytes // options.block_size
        cache = CachePlan(blocks, options.block_size, size, self.max_model_len, options.kv_cache_ratio)
        logger.info(
            "memory: weights %.2f GB, KV cache %.2f GB (%d bytes per token) for %d tokens or %.1f sequences of %d "
            "tokens, %d blocks for prompts",
            weights / 1e9,
            cache.bytes / 1e9,
            cache.bytes_per_token,
            cache.tokens,
            cache.sequences,
            cache.max_len,
            cache.prompt_blocks,
        )
        num_ranks = options.tensor_parallel_size * options.pipeline_parallel_size
        tiers = options.host_tier_bytes + swap_sizes(options, self._memory).bytes * num_ranks
        self.host_bytes = weights + cache.bytes * num_ranks + tiers if on_cpu else 0
        """Bytes of host memory for weights and all tiers of the KV cache on all ranks; 0 on a GPU."""

    def validate(self, request: EngineRequest) -> None:
        """Raise the ``PenstockError`` of ``add`` for a request that can never run. Compiles the request's grammar, and
        waits for the result."""
        check_request(request, self._config, self.info)
        if request.adapter:
            self.adapters.key(request.adapter)
        self.scheduler.admission.validate_and_clamp(request)
        if constraint := self._constraint(request):
            self._grammar_compiler.compile(constraint).result()
        if calls := request.sampling.tool_calls:
            self._grammar_compiler.compile(calls).result()

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises ``PenstockError``: ``invalid`` or ``unsupported`` if it can never run,
        ``overloaded`` if the queue is full, ``unavailable`` if the engine has failed."""
        if self.failure:
            raise PenstockError.of(self.failure)
        check_request(request, self._config, self.info)
        adapter = request.adapter
        if adapter:
            request = msgspec.structs.replace(request, adapter=self.adapters.key(adapter))
        constraint = self._constraint(request)

        def prerequisites() -> list[Prerequisite]:
            required = []
            if constraint:
                required.append(Prerequisite(self._grammar_compiler.compile(constraint), _set_guide, True))
            if calls := request.sampling.tool_calls:
                required.append(Prerequisite(self._grammar_compiler.compile(calls), _set_guide, True))
            if self.kv_connector and (imported := self.kv_connector.imports.prerequisite(request, adapter)):
                required.append(imported)
            elif reading := self.scheduler.kv.read_prefix(request):
                required.append(Prerequisite(reading, lambda sequence, result: None))
            return required

        self.scheduler.add(request, prerequisites)

    def set_vocabulary(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """Set the vocabulary for guided decoding. Call this before the first guided request.

        Args:
            vocabulary: function that returns the vocabulary; not called if a vocabulary is set already.
        """
        self._grammar_compiler.set_vocabulary(vocabulary)

    def prepare_guided_decoding(self) -> None:
        """Load the vocabulary for guided decoding ahead of the first guided request. Call this while the engine is
        idle."""
        self._grammar_compiler.preload_vocabulary()

    def try_add(self, request: EngineRequest) -> bool:
        """``add`` a request. Returns False if the queue is full."""
        try:
            self.add(request)
        except PenstockError as error:
            if error.failure.code is not Code.OVERLOADED:
                raise
            return False
        return True

    def abort(self, request_id: str) -> list[TokenDelta]:
        """Cancel a request. Returns the last delta of each unfinished sequence of the request."""
        return self.scheduler.abort(request_id)

    def finish_sequence(self, request_id: str, sequence: int) -> None:
        """End a sequence because its text contains a stop string. No delta is returned for it."""
        self.scheduler.finish_sequence(request_id, sequence)

    @property
    def gpu_memory(self) -> int:
        """Bytes allocated on the GPU; 0 without a GPU. While steps are in flight, this is the last known value: workers
        reply only after these steps, and would have no next step meanwhile. If a worker is lost, sets ``failure`` and
        returns 0."""
        if self._in_flight:
            return self._gpu_memory
        try:
            self._gpu_memory = self._executor.run(DeviceMemory())
        except WorkerLostError as error:  # lost while the engine was idle, so ``step`` did not notice
            logger.error("the engine has failed: %s", error)
            self.failure = Failure(Code.UNAVAILABLE, f"the engine has failed: {error}")
            return 0
        return self._gpu_memory

    @property
    def expert_load(self) -> dict[int, list[int]]:
        """Number of tokens routed to each expert since the start, by layer; empty without the option ``expert_load``.
        While steps are in flight (workers reply between steps), or if a worker is lost, this is the last known value.
        """
        if not self._options.expert_load:
            return {}
        try:
            if self._expert_load_answer is None:
                self._expert_load_answer = self._executor.call(ReadExpertLoad())
            if not self._in_flight:
                self._executor.wait(self._expert_load_answer)
            self._executor.poll()
        except WorkerLostError:  # ``gpu_memory`` or ``step`` handles the loss
            return self._expert_load
        if self._expert_load_answer.done():
            self._expert_load, self._expert_load_answer = self._expert_load_answer.result(), None
        return self._expert_load

    @property
    def busy(self) -> bool:
        """True if there are unfinished requests, steps in flight, KV transfers, or blocks to store in the host tier."""
        transfers = self.kv_connector is not None and self.kv_connector.busy
        stores = self.kv_offloading is not None and self.kv_offloading.has_stores and not self.failure
        return self.scheduler.num_unfinished_requests > 0 or bool(self._in_flight) or transfers or stores

    @property
    def has_pending(self) -> bool:
        """True if ``step`` has to be called even without requests: weights are being loaded, or the engine is being
        paused or woken up."""
        return self.weights.has_pending or self.sleeper.has_pending

    def step(self) -> list[TokenDelta]:
        """Submit steps until ``max_concurrent_batches`` are in flight, then collect the oldest. Returns its deltas, and
        the last deltas of requests that have failed or timed out.

        An error in a step ends the requests of that step. If the workers cannot compute steps any more, all requests
        end, and ``failure`` is set.
        """
        deltas = self._step()
        return self.kv_connector.exports.take(deltas) if self.kv_connector else deltas

    def _step(self) -> list[TokenDelta]:
        """Implementation of ``step``. The returned deltas include those of requests whose KV is exported."""
        deltas = self.scheduler.expire(time.monotonic())
        try:
            if self.kv_connector:
                self.kv_connector.poll()
            if self.kv_offloading:
                self.kv_offloading.poll()
            deltas += self.scheduler.enqueue_prepared()
            if self.has_pending:
                deltas += self.sleeper.poll(len(self._in_flight))
                if version := self.weights.poll(len(self._in_flight)):
                    self._on_weights_changed(version)
                if self.kv_connector:
                    self.kv_connector.set_suspended(bool(self.sleeper.asleep))
            if self.adapters.has_pending:
                self.adapters.process_pending()
            submitted = False
            while len(self._in_flight) < self._max_concurrent_batches and (plan := self.scheduler.schedule()):
                submitted = True
                failed = self._submit(plan)
                if failed is not None:
                    return deltas + failed
            if self._in_flight:
                if not submitted:
                    self.before_step(self._tokens_in_flight)
                return deltas + self._collect()
        except WorkerLostError as error:
            logger.error("the engine has failed: %s", error)
            return deltas + self._give_up(Failure(Code.UNAVAILABLE, f"the engine has failed: {error}"))
        if pending := self.scheduler.admission.prerequisites.futures + self.weights.reading:
            if self.kv_connector:
                pending.append(self.kv_connector.activity)
            wait(pending, PREREQUISITES_TIMEOUT, FIRST_COMPLETED)
        return deltas

    @property
    def _tokens_in_flight(self) -> int:
        """Number of tokens of the steps in flight, images and audio included."""
        return sum(plan.tokens + plan.encoder_tokens for plan, _ in self._in_flight)

    def _submit(self, plan: Plan) -> list[TokenDelta] | None:
        """Submit a step. Returns None, or the last deltas of its requests if it could not be submitted."""
        self.steps, self.last_plan = self.steps + 1, plan
        self.step_counts.record(plan.tokens)
        self._in_flight.append((plan, time.perf_counter()))
        try:
            self.before_step(self._tokens_in_flight)
            self._record_step()
            step = self.scheduler.builder.build(plan)
            if self.speculation:
                step.updates = self.speculation.fill_placeholders(plan, step.updates, self._executor.run)
                add_drafts(step, plan)
            if self.kv_connector:
                self.kv_connector.exports.before_step(plan, step)
            guides = [(one.active_guide, item.draft) for item in plan.scheduled for one in item.sampling_sequences]
            grammar_bitmask = self._bitmasks.submit(guides) if any([guide for guide, _ in guides]) else None
            step.has_grammar_bitmask = grammar_bitmask is not None
            self._executor.submit(step, grammar_bitmask)
        except WorkerLostError:
            raise
        except BaseException as error:
            self._in_flight.pop()
            return self._handle_step_error(plan, error)
        return None

    def _record_step(self) -> None:
        sequences = [item.sequence for plan, _ in self._in_flight for item in plan.scheduled]
        self.record_step([(one.request.uid, one.request.deaths if one.is_suspect else 0) for one in sequences])

    def _collect(self) -> list[TokenDelta]:
        """Wait for the oldest step in flight. Returns its deltas."""
        try:
            output = self._executor.collect()
        except WorkerLostError:
            raise
        except BaseException as error:
            plan, _ = self._in_flight.popleft()
            return self._handle_step_error(plan, error)
        plan, submitted = self._in_flight.popleft()
        if not self._in_flight:
            self.record_step(())
        self._failed_steps = 0
        if self.kv_connector:
            self.kv_connector.exports.after_step(plan)
        now = time.perf_counter()
        started, self._collected = max(submitted, self._collected), now
        if self.speculation:
            self.speculation.record_step(plan, output, now - started)
        if self.after_step:
            self.after_step(plan, started, now)
        return self.scheduler.update(plan, output)

    def _handle_step_error(self, plan: Plan, error: BaseException) -> list[TokenDelta]:
        """End the requests of a step that failed with ``error``, or all requests if the workers cannot compute further
        steps. Returns the last deltas of these requests."""
        if self.kv_connector:
            self.kv_connector.exports.after_step(plan, failed=True)
        deltas = self.scheduler.fail(plan, STEP_FAILED)
        if not isinstance(error, Exception):
            raise error  # a KeyboardInterrupt or SystemExit
        logger.error("a step of %d tokens failed", plan.tokens, exc_info=error)
        self._failed_steps += 1
        try:
            if self._failed_steps < MAX_FAILED_STEPS and self._probe_workers():
                return deltas
            failure = ENGINE_FAILED
        except WorkerLostError as error:
            failure = Failure(Code.UNAVAILABLE, f"the engine has failed: {error}")
        logger.error("the engine has failed: %s", failure.message)
        return [msgspec.structs.replace(delta, failure=failure) for delta in deltas] + self._give_up(failure)

    def _give_up(self, failure: Failure) -> list[TokenDelta]:
        """Set ``failure`` and end all requests. Returns their last deltas."""
        self.failure = failure
        deltas = [delta for plan, _ in self._in_flight for delta in self.scheduler.fail(plan, failure)]
        self._in_flight.clear()
        return deltas + [
            d for request_id in self.scheduler.request_ids() for d in self.scheduler.abort(request_id, failure)
        ]

    def _probe_workers(self) -> bool:
        """Compute a step of one token, to find out whether the device still works. Returns True without a probe if no
        block is free, or while steps are in flight, which fail if the device does not work."""
        pool = self.scheduler.device_pool
        if self._in_flight or not pool.num_free:
            return True
        blocks = pool.allocate(1)
        try:
            self._executor.submit(probe_step(self.scheduler.options.max_num_seqs, blocks[0], self.info.has_lm_head))
            self._executor.collect()
        except WorkerLostError:
            raise
        except Exception:
            logger.exception("the probe step of one token failed after the failed step")
            return False
        finally:
            pool.release(blocks)
        return True

    def _on_weights_changed(self, version: str) -> None:
        self.info = msgspec.structs.replace(self.info, weights_version=version)
        if self.kv_connector:
            self.kv_connector.set_weights(version)
        self.sleeper.on_weights()

    def _constraint(self, request: EngineRequest) -> GuidedDecodingParams | None:
        """Guided decoding parameters of a request, with the engine's JSON options applied; None if unguided."""
        constraint = request.sampling.guided_decoding
        if constraint and self._options.guided_decoding_disable_additional_properties and constraint.json:
            constraint = msgspec.structs.replace(
                constraint, json=disallow_additional_properties(json.loads(constraint.json))
            )
        if constraint and self._options.guided_decoding_disable_any_whitespace and constraint.is_json:
            constraint = msgspec.structs.replace(constraint, disable_any_whitespace=True)
        return constraint


def _set_guide(sequence: Sequence, grammar: Grammar) -> None:
    """Constrain a sequence by its compiled grammar."""
    sequence.set_guide(make_guide(sequence.request, grammar))
    sequence.lowered_tools = grammar.lowered_tools


def _tree_blocks(speculative: SpeculativeConfig | None, options: EngineOptions, blocks: int) -> int:
    """Number of KV blocks to set aside for verifying trees of draft tokens.

    Raises ``PenstockError`` (``invalid``) if no block remains for sequences.
    """
    count = speculative.tree.scratch_blocks(options.block_size) if speculative and speculative.tree else 0
    if count >= blocks:
        message = f"the tree of draft tokens takes {count} KV blocks, but the KV cache has {blocks}; use a smaller tree"
        raise invalid("speculative_config", message, blocks)
    return count
