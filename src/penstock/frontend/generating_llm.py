"""Methods of ``LLM`` that generate: completions, answers to chats, beam search, and log probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock import core
from penstock.core import LoRARequest
from penstock.core.errors import invalid

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
from .beam_outputs import BeamSearchOutput
from .chat_renderer import Steps, run_inline
from .output_processor import OutputProcessor
from .outputs import Loglikelihood, RequestOutput
from .pooling_llm import PoolingLLM
from .prompts import Messages, Prompt, TokenizedPrompt, salt_of
from .sampling_params import BeamSearchParams, SamplingParams

NO_TOKENIZER_OPTIONS = "give token ids (prompt_token_ids) to encode prompts in another way"
AS_NEEDED = "omit it; contents are rendered in the form that the chat template reads"


class GeneratingLLM(PoolingLLM):
    """Base class of ``LLM`` with the methods that generate."""

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
        prompts = [rendered(one) for one in conversations]
        return self.generate(prompts, params, use_tqdm, lora_request=lora_request, priority=priority)

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
        outputs = self.generate(prompts, params.sampling(), use_tqdm, lora_request=lora_request, priority=priority)
        tokenizer = self._input_processor.tokenizer
        return [BeamSearchOutput.of(output, tokenizer, params.skip_special_tokens) for output in outputs]

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
