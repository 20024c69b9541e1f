"""The engine: requests of token ids in, deltas of token ids out, one step at a time."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, wait
from pathlib import Path
from typing import Any

import msgspec

from penstock import demo
from penstock.config.options import EngineOptions, LogOptions
from penstock.config.speculative import SpeculativeConfig
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
from penstock.core.guided import closed
from penstock.core.lora import named
from penstock.models import read_config
from penstock.planning.kv_size import CachePlan, weight_bytes
from penstock.planning.model_size import model_size_of

from .executor.base import Executor, WorkerLostError
from .guided import Grammar, Guides, Masks, check_backend
from .guided.reasoning import guide_of
from .kv.block_pool import BlockPool
from .kv.memory import count_blocks, count_host_blocks
from .lora import NO_ADAPTER, Adapters
from .scheduling.prerequisites import Prerequisite
from .scheduling.scheduler import Scheduler
from .scheduling.step_builder import probe_step
from .sequence.plan import Plan
from .sequence.sequence import Sequence
from .spec.ngram import NGramDrafter
from .spec.speculation import Speculation
from .step import DeviceMemory, MemoryProfile, Propose
from .warm_up import warm_up_requests

logger = logging.getLogger(__name__)

DEPTH = 1
"""Steps in flight at the same time, where no option says so."""
STEP_FAILED = Failure(Code.INTERNAL, "the step failed; the log says why")
FAILED = Failure(Code.UNAVAILABLE, "the engine cannot compute any more and has to be started again")
MOST_FAILED_STEPS = 8
"""One after the other, after which the engine has failed."""
AWAITING = 0.02
"""Seconds that a step with nothing to compute waits for requests' prerequisites."""


class Engine:
    """A model that serves many requests at once.

    Args:
        logs: how worker processes log; None where this process's log is not ours.

    Raises ``PenstockError`` with one sentence where the options or the checkpoint do not allow a start.
    """

    def __init__(self, options: EngineOptions, logs: LogOptions | None = None) -> None:
        folder = Path(options.model) if options.model else demo.CHAT
        config = read_config(folder)
        self.max_model_len = options.max_model_len or config.max_model_len
        scheduling = options.scheduler(self.max_model_len)  # before any weight is read
        lora_modules = named(options.lora_modules)
        max_loras = options.max_loras if options.enable_lora or lora_modules else 0
        speculative = SpeculativeConfig.read(options.speculative_config)
        check_backend(options.guided_decoding_backend)
        self._depth = options.max_concurrent_batches or DEPTH
        self._executor = start_executor(options, self._depth, logs)
        try:
            self.info = self._executor.load()
            profile = self._executor.profile()
            blocks = count_blocks(options, profile, self.max_model_len)
            host_blocks = count_host_blocks(options, profile)
            self._executor.init_cache(blocks, host_blocks)
        except WorkerLostError as error:
            raise PenstockError(Code.UNAVAILABLE, f"the model could not be loaded: {error}") from error
        slots = {"": NO_ADAPTER}
        self.scheduler = Scheduler(
            scheduling,
            BlockPool(blocks, options.block_size),
            BlockPool(host_blocks, options.block_size) if host_blocks else None,
            weights=self.info.weights_version,
            slots=slots,
        )
        self.adapters = Adapters(self._executor, most=max_loras, slots=slots, in_use=self.scheduler.adapters)
        for loading in [self.adapters.load(name, path) for name, path in lora_modules.items()]:
            self.adapters.wait(loading)
        self._guides = Guides(options.guided_decoding_backend, self.info.vocab_size)
        self._masks = Masks(self.info.vocab_size)
        self._dense = options.guided_decoding_disable_any_whitespace
        self._closed = options.guided_decoding_disable_additional_properties
        self._in_flight: deque[tuple[Plan, float]] = deque()
        """Steps that were submitted and not collected, the oldest first, and when."""
        self._collected = 0.0
        self._failed_steps = 0
        self.failure: Failure | None = None
        """Why it takes no requests any more, where that is so: it has to be started again."""
        self.speculation: Speculation | None = None
        if speculative:
            ngram = NGramDrafter(speculative.prompt_lookup_max, speculative.prompt_lookup_min)
            drafter = None if self.info.drafts else ngram
            self.speculation = Speculation(drafter, speculative.num_speculative_tokens, speculative.adaptive)
            self.scheduler.speculation = self.speculation
        logger.info(
            "%s, %d KV blocks of %d tokens, kernels %s (%sbatch-invariant)",
            self.info.architecture,
            blocks,
            options.block_size,
            self.info.fingerprint,
            "" if self.info.batch_invariant else "not ",
        )
        self._log_memory(config.raw, options, blocks, profile)
        self.steps = 0
        """Since it started."""
        self.last_plan = Plan()
        """What the last step was."""
        self.before_step: Callable[[int], None] = lambda tokens: None
        """Called with the number of tokens that are in flight, before each step is computed."""
        if options.use_warmup:
            self._warm_up()

    def close(self) -> None:
        """End its workers."""
        self._executor.close()

    def _warm_up(self) -> None:
        """Run the longest inputs. Raises ``PenstockError`` where a step fails."""
        begun, left = time.monotonic(), warm_up_requests(self.scheduler.options, self.info)
        tokens = sum(len(request.prompt) for request in left)
        while left or self.busy:
            while left and self.add_where_room(left[0]):
                del left[0]
            for delta in self.step():
                if delta.failure:
                    raise PenstockError.of(delta.failure)
        logger.info("warmed up with %d tokens in %.1f seconds", tokens, time.monotonic() - begun)

    def _log_memory(
        self, config_json: Mapping[str, Any], options: EngineOptions, blocks: int, profile: MemoryProfile
    ) -> None:
        """The numbers of ``penstock plan memory``."""
        info, model_size = self.info, model_size_of(config_json)
        size = profile.host_block_bytes // options.block_size
        cache = CachePlan(blocks, options.block_size, size, self.max_model_len, options.kv_cache_ratio)
        logger.info(
            "memory: weights %.2f GB, KV cache %.2f GB of %d bytes a token for %d tokens or %.1f sequences of %d, "
            "%d blocks for prompts",
            weight_bytes(model_size, info.quantization, info.dtype, bool(info.mtp_layers)) / 1e9,
            cache.bytes / 1e9,
            cache.bytes_per_token,
            cache.tokens,
            cache.sequences,
            cache.max_len,
            cache.prompt_blocks,
        )

    def check(self, request: EngineRequest) -> None:
        """Raise ``PenstockError`` (``invalid``) for a request that can never run."""
        self._check(request)
        if request.adapter:
            self.adapters.key(request.adapter)
        self.scheduler.admission.fitted(request)
        if form := self._form(request):
            self._guides.compile(form).result()

    def add(self, request: EngineRequest) -> None:
        """Queue a request; raises ``PenstockError`` where it is refused, now or for good."""
        if self.failure:
            raise PenstockError.of(self.failure)
        self._check(request)
        if request.adapter:
            request = msgspec.structs.replace(request, adapter=self.adapters.key(request.adapter))
        form = self._form(request)

        def grammar() -> list[Prerequisite]:
            return [Prerequisite(self._guides.compile(form), _set_guide)] if form else []

        self.scheduler.add(request, grammar)

    def learn(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """What tokens spell, before the first request that is guided. Called where it is not known."""
        self._guides.learn(vocabulary)

    def prepare(self) -> None:
        """Make ready what requests may ask for; to be called while there is nothing else to do."""
        self._guides.prepare()

    def add_where_room(self, request: EngineRequest) -> bool:
        """``add``, or False where the queue is full: for who has more requests and waits for their turn."""
        try:
            self.add(request)
        except PenstockError as error:
            if error.failure.code is not Code.OVERLOADED:
                raise
            return False
        return True

    def abort(self, request_id: str) -> list[TokenDelta]:
        """Cancel a request; returns the last delta of each of its sequences that had not ended."""
        return self.scheduler.abort(request_id)

    def stop(self, request_id: str, sequence: int) -> None:
        """End a sequence whose text has come to a stop string."""
        self.scheduler.stop(request_id, sequence)

    @property
    def gpu_memory(self) -> int:
        """Bytes allocated on a GPU."""
        try:
            asked = self._executor.call(DeviceMemory())
            self._executor.wait(asked)
        except WorkerLostError as error:  # while it had nothing to do; requests would be told by their next step
            logger.error("the engine has failed: %s", error)
            self.failure = Failure(Code.UNAVAILABLE, f"the engine has failed: {error}")
            return 0
        found: int = asked.result()
        return found

    @property
    def busy(self) -> bool:
        """Whether there are requests that have not ended, or steps in flight."""
        return self.scheduler.unfinished > 0 or bool(self._in_flight)

    def step(self) -> list[TokenDelta]:
        """Submit steps until as many are in flight as may be, and take in the oldest.

        What goes wrong in a step ends the requests that it was for, and no others, unless it shows that no step can be
        computed any more: then ``failure`` says so, and all requests end with it.
        """
        deltas = self.scheduler.expire(time.monotonic()) + self.scheduler.admit_ready()
        try:
            if self.adapters.unsettled:
                self.adapters.settle()
            submitted = False
            while len(self._in_flight) < self._depth and (plan := self.scheduler.schedule()):
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
        if awaited := self.scheduler.awaited:
            wait(awaited, AWAITING, FIRST_COMPLETED)
        return deltas

    @property
    def _tokens_in_flight(self) -> int:
        return sum(plan.tokens for plan, _ in self._in_flight)

    def _submit(self, plan: Plan) -> list[TokenDelta] | None:
        """Send a step. Returns the last deltas of its requests where it cannot be sent."""
        self.steps, self.last_plan = self.steps + 1, plan
        self._in_flight.append((plan, time.perf_counter()))
        try:
            self.before_step(self._tokens_in_flight)
            updates = self.scheduler.builder.updates(plan)
            if self.speculation:
                updates = self.speculation.fill(plan, updates, self._propose)
            masks = self._masks.begin([(one.guide, item.draft) for item in plan.items for one in item.samples])
            self._executor.submit(self.scheduler.builder.step(plan, updates, masks is not None), masks)
        except WorkerLostError:
            raise
        except BaseException as error:
            self._in_flight.pop()
            return self._failed(plan, error)
        return None

    def _propose(self, wanted: Propose) -> list[list[int]]:
        asked = self._executor.call(wanted)
        self._executor.wait(asked)
        drafts: list[list[int]] = asked.result()
        return drafts

    def _collect(self) -> list[TokenDelta]:
        try:
            output = self._executor.collect()
        except WorkerLostError:
            raise
        except BaseException as error:
            plan, _ = self._in_flight.popleft()
            return self._failed(plan, error)
        plan, submitted = self._in_flight.popleft()
        self._failed_steps = 0
        now = time.perf_counter()
        begun, self._collected = max(submitted, self._collected), now
        if self.speculation:
            self.speculation.verified(plan, output, now - begun)
        return self.scheduler.update(plan, output)

    def _failed(self, plan: Plan, error: BaseException) -> list[TokenDelta]:
        """A step went wrong: its requests end, and all do where no step can be computed any more."""
        deltas = self.scheduler.fail(plan, STEP_FAILED)
        if not isinstance(error, Exception):
            raise error  # an interrupt: the blocks are back, the rest is the caller's matter
        logger.error("a step of %d tokens failed", plan.tokens, exc_info=error)
        self._failed_steps += 1
        try:
            if self._failed_steps < MOST_FAILED_STEPS and self._still_computes():
                return deltas
            failure = FAILED
        except WorkerLostError as error:
            failure = Failure(Code.UNAVAILABLE, f"the engine has failed: {error}")
        logger.error("the engine has failed: %s", failure.message)
        return deltas + self._give_up(failure)

    def _give_up(self, failure: Failure) -> list[TokenDelta]:
        """Nothing can be computed any more."""
        self.failure = failure
        deltas = [delta for plan, _ in self._in_flight for delta in self.scheduler.fail(plan, failure)]
        self._in_flight.clear()
        return deltas + [d for name in self.scheduler.requests() for d in self.scheduler.abort(name, failure)]

    def _still_computes(self) -> bool:
        """Whether a step of one token, of which nothing is kept, can be computed: no, where a device has failed for
        good."""
        pool = self.scheduler.device
        if self._in_flight or not pool.free:  # others will show
            return True
        blocks = pool.allocate(1)
        try:
            self._executor.submit(probe_step(self.scheduler.options.max_num_seqs, blocks[0], self.info.has_lm_head))
            self._executor.collect()
        except WorkerLostError:
            raise
        except Exception:
            logger.exception("a step of a single token failed, too")
            return False
        finally:
            pool.release(blocks)
        return True

    def _form(self, request: EngineRequest) -> GuidedDecodingParams | None:
        """What the output has to keep to."""
        form = request.sampling.guided_decoding
        if form and self._closed and form.json:
            form = msgspec.structs.replace(form, json=closed(json.loads(form.json)))
        if form and self._dense and form.of_json:
            form = msgspec.structs.replace(form, disable_any_whitespace=True)
        return form

    def _check(self, request: EngineRequest) -> None:
        info = self.info
        if request.pooling:
            if (request.pooling.dimensions or 0) > info.hidden_size:
                raise invalid("dimensions", f"must be at most the model's {info.hidden_size}", info.hidden_size)
        elif not info.has_lm_head:
            words = "this checkpoint has no head to generate with; it makes embeddings only"
            raise PenstockError(Code.UNSUPPORTED, words)
        _check(request, info.vocab_size)


def _set_guide(sequence: Sequence, grammar: Grammar) -> None:
    sequence.guide = guide_of(sequence.request, grammar)


def start_executor(options: EngineOptions, depth: int, logs: LogOptions | None) -> Executor:
    """The executor that the options name; nothing is loaded yet."""
    if options.distributed_executor_backend == "mp":
        from .executor.processes import Processes

        return Processes(options, logs)
    from .executor.inline import Inline  # which brings PyTorch

    return Inline(options, depth)


def _check(request: EngineRequest, vocabulary: int) -> None:
    sampling = request.sampling
    given = {
        "prompt": request.prompt,
        "stop_token_ids": sampling.stop_token_ids,
        "logit_bias": sampling.logit_bias,
        "allowed_token_ids": sampling.allowed_token_ids or (),
        "bad_word_ids": [token for word in sampling.bad_word_ids for token in word],
        "eos_token_ids": [token for token in request.eos_token_ids if token < vocabulary],  # others never come
        "thought": (thought.begin, thought.end, *thought.answer) if (thought := request.thought) else (),
    }
    for field, token_ids in given.items():
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocabulary:
            raise invalid(field, f"token ids go from 0 to {vocabulary - 1}", vocabulary - 1)
    if len(sampling.never_tokens) == vocabulary:
        raise invalid("bad_word_ids", "leave no token that may come")
