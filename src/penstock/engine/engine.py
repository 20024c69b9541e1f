"""The engine: requests of token ids in, deltas of token ids out, one step at a time."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, wait
from functools import partial
from pathlib import Path

import msgspec
import torch

from penstock import demo, ops
from penstock.config.options import EngineOptions
from penstock.config.speculative import SpeculativeConfig
from penstock.core import (
    Code,
    EngineRequest,
    Failure,
    GuidedDecodingParams,
    PenstockError,
    SamplingParams,
    TokenDelta,
    Vocabulary,
)
from penstock.core.errors import invalid
from penstock.core.guided import closed
from penstock.core.lora import named
from penstock.models import Model, ModelConfig, cache_folder, load_model, read_config
from penstock.ops import KVSpec
from penstock.planning.kv_size import CachePlan, weight_bytes
from penstock.planning.kv_spec import bytes_per_block, bytes_per_token
from penstock.planning.model_size import model_size_of

from .fingerprint import fingerprint
from .guided import Guides, check_backend
from .kv.block_pool import BlockPool
from .kv.memory import count_blocks, count_host_blocks
from .scheduling.plan import Item, Plan
from .scheduling.scheduler import Scheduler
from .scheduling.sequence import Sequence
from .spec.draft_model import DraftModel
from .spec.mtp import HeadsAhead
from .spec.speculation import Drafter, Lookup, Speculation
from .warm_up import warm_up
from .worker.lora import Adapters
from .worker.worker import Runner

logger = logging.getLogger(__name__)

FAILED = Failure(Code.UNAVAILABLE, "the engine cannot compute any more and has to be started again")
MOST_FAILED_STEPS = 8
"""One after the other, after which the engine has failed."""
COMPILING = 0.02
"""Seconds that a step with nothing to compute waits for forms to be compiled."""


class Engine:
    """A model that serves many requests at once.

    Raises ``PenstockError`` with one sentence where the options or the checkpoint do not allow a start.
    """

    def __init__(self, options: EngineOptions) -> None:
        folder = Path(options.model) if options.model else demo.CHAT
        device = _device(options.device)
        backend = ops.backend(device, options.ops)
        config = read_config(folder)
        if options.quantization == "none":
            options = msgspec.structs.replace(options, quantization=config.quantization)
        self.max_model_len = options.max_model_len or config.max_model_len
        backend.set_threads(options.threads)
        scheduling = options.scheduler(self.max_model_len)  # before any weight is read
        lora_modules = named(options.lora_modules)
        max_loras = options.max_loras if options.enable_lora or lora_modules else 0
        speculative = SpeculativeConfig.read(options.speculative_config)
        check_backend(options.guided_decoding_backend)

        def load(checkpoint: Path, max_len: int | None, max_loras: int = 0) -> Model:
            return load_model(
                checkpoint,
                backend,
                dtype=None if options.dtype == "auto" else getattr(torch, options.dtype),
                device=device,
                max_len=max_len,
                load_format=options.load_format,
                seed=options.seed,
                quantization=options.quantization,
                weight_cache_dir=cache_folder(options.weight_cache_dir),
                weight_cache_size=options.weight_cache_size,
                mtp_heads=bool(speculative and speculative.method == "mtp"),
                max_loras=max_loras,
            )

        draft = _draft(speculative, options, config)
        self.model = load(folder, options.max_model_len or None, max_loras)
        drafting = load(draft, self.max_model_len) if draft else None
        quantized_kv = options.kv_cache_dtype == "int8"
        spec = self.model.kv_specs(options.block_size, quantized_kv)
        own = drafting.kv_specs(options.block_size, quantized_kv) if drafting else None
        self.fingerprint = fingerprint(backend, self.model, options.quantization, spec[0])
        """What decides the bits of a result besides the weights."""
        self.batch_invariant = backend.BATCH_INVARIANT
        blocks = count_blocks(
            options,
            bytes_per_block(spec) + (bytes_per_block(own) if own else 0),
            spec,
            device,
            self.model.mapped_bytes + (drafting.mapped_bytes if drafting else 0),
            self.max_model_len,
        )
        host_blocks = count_host_blocks(options, spec)
        self.scheduler = Scheduler(
            scheduling,
            BlockPool(blocks, options.block_size),
            BlockPool(host_blocks, options.block_size) if host_blocks else None,
            weights=self.model.weights_version,
        )
        self.adapters = Adapters(
            self.model,
            device,
            most=max_loras,
            max_lora_rank=options.max_lora_rank,
            in_use=self.scheduler.adapters,
        )
        for loading in [self.adapters.load(name, path) for name, path in lora_modules.items()]:
            self.adapters.wait(loading)
        self._guides = Guides(options.guided_decoding_backend, self.model.config.vocab_size)
        self._dense = options.guided_decoding_disable_any_whitespace
        self._closed = options.guided_decoding_disable_additional_properties

        def runner(model: Model, kept: list[KVSpec], host_blocks: int) -> Runner:
            return Runner(
                model,
                backend,
                device,
                specs=kept,
                blocks=blocks,
                host_blocks=host_blocks,
                tokens=options.max_num_batched_tokens,
                rows=options.max_num_seqs,
                longest=self.max_model_len,
                whole=bool(model.mtp_heads),
                slots=self.adapters.slots if model is self.model and max_loras else None,
            )

        self._runner = runner(self.model, spec, host_blocks)
        self._failed_steps = 0
        self.failure: Failure | None = None
        """Why it takes no requests any more, where that is so: it has to be started again."""
        self.speculation: Speculation | None = None
        if speculative:
            guessing = runner(drafting, own, 0) if drafting and own else None
            drafter = self._drafter(speculative, options, guessing, blocks)
            self.speculation = Speculation(drafter, speculative.num_speculative_tokens, speculative.adaptive)
            self.scheduler.speculation = self.speculation
        logger.info(
            "%s, %d KV blocks of %d tokens, kernels %s (%sbatch-invariant)",
            self.model.config.architecture,
            blocks,
            options.block_size,
            self.fingerprint,
            "" if self.batch_invariant else "not ",
        )
        self._log_memory(options, blocks, spec)
        self.steps = 0
        """Since it started."""
        self.last_plan = Plan()
        """What the last step was."""
        self.before_step: Callable[[int], None] = lambda tokens: None
        """Called with the number of tokens of each step before it is computed."""
        if options.use_warmup:
            warm_up(self)

    def _log_memory(self, options: EngineOptions, blocks: int, specs: list[KVSpec]) -> None:
        """The numbers of ``penstock plan memory``."""
        model_size = model_size_of(self.model.config.raw)
        size = bytes_per_token(specs)
        cache = CachePlan(blocks, options.block_size, size, self.max_model_len, options.kv_cache_ratio)
        dtype = str(self.model.dtype).removeprefix("torch.")
        logger.info(
            "memory: weights %.2f GB, KV cache %.2f GB of %d bytes a token for %d tokens or %.1f sequences of %d, "
            "%d blocks for prompts",
            weight_bytes(model_size, options.quantization, dtype, bool(self.model.mtp_heads)) / 1e9,
            cache.bytes / 1e9,
            cache.bytes_per_token,
            cache.tokens,
            cache.sequences,
            cache.max_len,
            cache.prompt_blocks,
        )

    def _drafter(
        self, speculative: SpeculativeConfig, options: EngineOptions, draft: Runner | None, blocks: int
    ) -> Drafter:
        """Who guesses; ``draft`` runs the draft model, where there is one."""
        rows = options.max_num_seqs
        if draft:
            size, tokens = options.block_size, options.max_num_batched_tokens
            return DraftModel(draft, blocks=blocks, block_size=size, rows=rows, tokens=tokens)
        if self.model.mtp_heads:
            return HeadsAhead(self._runner, len(self.model.mtp_heads), rows)
        return Lookup(speculative.prompt_lookup_max, speculative.prompt_lookup_min)

    def check(self, request: EngineRequest) -> None:
        """Raise ``PenstockError`` (``invalid``) for a request that can never run."""
        self._check(request)
        if request.adapter:
            self.adapters.key(request.adapter)
        self.scheduler.intake.fitted(request)
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
        self.scheduler.add(request, partial(self._guides.compile, form) if form else None)

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
        return torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0

    @property
    def busy(self) -> bool:
        """Whether there are requests that have not ended."""
        return self.scheduler.unfinished > 0

    def step(self) -> list[TokenDelta]:
        """Run one step. What goes wrong in it ends the requests it was for, and no others, unless it shows that no step
        can be run any more: then ``failure`` says so, and all requests end with it."""
        if self.adapters.unsettled:
            self.adapters.settle()
        deltas = self.scheduler.expire(time.monotonic()) + self.scheduler.let_in()
        plan = self.scheduler.schedule()
        if not plan:
            if compiling := self.scheduler.compiling:
                wait(compiling, COMPILING, FIRST_COMPLETED)
            return deltas
        self.steps, self.last_plan = self.steps + 1, plan
        begun = time.perf_counter()
        self.before_step(plan.tokens)
        try:
            if self.speculation:
                self.speculation.fill(plan)
            outcome = self._runner.collect(self._runner.submit(plan))
        except BaseException as error:
            deltas += self.scheduler.fail(plan, Failure(Code.INTERNAL, "the step failed; the log says why"))
            if not isinstance(error, Exception):
                raise  # an interrupt: the blocks are back, the rest is the caller's matter
            logger.exception("a step of %d tokens failed", plan.tokens)
            self._failed_steps += 1
            if self._failed_steps == MOST_FAILED_STEPS or not self._still_computes():
                self.failure = FAILED
                logger.error("the engine has failed: %s", FAILED.message)
                deltas += [d for name in self.scheduler.requests() for d in self.scheduler.abort(name, FAILED)]
            return deltas
        self._failed_steps = 0
        if self.speculation:
            self.speculation.learn(plan, outcome, time.perf_counter() - begun)
        deltas += self.scheduler.update(plan, outcome)
        if self.speculation:
            self.speculation.follow(plan, outcome)
        return deltas

    def _still_computes(self) -> bool:
        """Whether a step of one token, of which nothing is kept, can be run: no, where a device has failed for good."""
        pool = self.scheduler.device
        if not pool.free:  # others hold all of it, whose steps will show
            return True
        greedy = SamplingParams(max_tokens=1, temperature=0)
        trial = Sequence(EngineRequest(request_id="", prompt=[0], sampling=greedy), 0, 0, -1)
        trial.row, trial.blocks = 0, pool.allocate(1)
        draws = () if not self.model.config.has_lm_head else (trial,)
        try:
            self._runner.collect(self._runner.submit(Plan(items=[Item(trial, 0, 1, draws, [])])))
        except Exception:
            logger.exception("a step of a single token failed, too")
            return False
        finally:
            pool.release(trial.blocks)
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
        config = self.model.config
        if request.pooling:
            if (request.pooling.dimensions or 0) > config.hidden_size:
                raise invalid("dimensions", f"must be at most the model's {config.hidden_size}", config.hidden_size)
        elif not config.has_lm_head:
            words = "this checkpoint has no head to generate with; it makes embeddings only"
            raise PenstockError(Code.UNSUPPORTED, words)
        _check(request, config.vocab_size)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise invalid("device", f"{name!r} is none: use cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise invalid("device", "no GPU is here, or this PyTorch cannot use it")
    return device


def _draft(speculative: SpeculativeConfig | None, options: EngineOptions, model: ModelConfig) -> Path | None:
    """The checkpoint of the draft model, where there is to be one.

    Raises ``PenstockError`` (``invalid``) where none is named, or it cannot guess for the model, or the model is to
    guess by itself and cannot.
    """
    if not speculative or speculative.method == "ngram":
        return None
    if speculative.method == "mtp":
        if not model.num_mtp_layers:
            raise invalid("speculative_config", "this model has no heads that guess (num_nextn_predict_layers)")
        return None
    folder = Path(speculative.model) if speculative.model else None
    if not folder and (not options.model or Path(options.model) == demo.CHAT):
        folder = demo.DRAFT
    if not folder and speculative.method:
        raise invalid("speculative_config", "name the draft model's folder as model")
    if folder and (known := read_config(folder).vocab_size) != model.vocab_size:
        raise invalid("speculative_config", f"the draft model knows {known} tokens, and the model {model.vocab_size}")
    return folder


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
