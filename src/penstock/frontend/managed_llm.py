"""Methods of ``LLM`` that manage its engine: adapters, weights, sleep, caches, metrics and profiles."""

from __future__ import annotations

import os
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from penstock.config.options import EngineOptions
from penstock.core import Code, LoRARequest, PenstockError
from penstock.core.errors import invalid
from penstock.engine.engine import Engine

from .arguments import checked_call, loras_of
from .batch import UseTqdm, run_batch
from .engine_metrics import Metric, RequestCounts, snapshot
from .fastdeploy_outputs import FastDeployOutput
from .hf_tokenizer import hugging_face_tokenizer
from .input_processor import InputProcessor
from .output_processor import OutputProcessor
from .outputs import RequestOutput
from .sampling_params import SamplingParams
from .shared_weights import NamedTensors, as_checkpoint_folder

if TYPE_CHECKING:
    from torch.profiler import profile

T = TypeVar("T")
PROFILE_FOLDER = "VLLM_TORCH_PROFILER_DIR"
"""Environment variable with the folder of profiles, as in vLLM; default: the current folder."""


class ManagedLLM(ABC):
    """Base class of ``LLM``: an engine in this process and the methods that manage it.

    Args:
        compat: as for ``LLM``.
        profiler_config: vLLM's option, of which ``torch_profiler_dir`` is read.
    """

    engine: Engine
    options: EngineOptions
    _input_processor: InputProcessor

    def __init__(self, compat: str, profiler_config: Any = None) -> None:
        folder = profiler_config.get("torch_profiler_dir") if isinstance(profiler_config, Mapping) else None
        self._profile_folder = Path(folder or os.environ.get(PROFILE_FOLDER) or ".")
        self._fastdeploy = compat == "fastdeploy"
        self.counts = RequestCounts()
        self._profile: profile | None = None
        self._profile_path = Path()

    def get_tokenizer(self) -> Any:
        """The model's tokenizer: transformers' ``PreTrainedTokenizerFast``, or, without transformers, an object with
        its most used methods (``encode``, ``decode``, ``apply_chat_template``, ``eos_token_id`` …)."""
        return self._hugging_face_tokenizer

    @cached_property
    def _hugging_face_tokenizer(self) -> Any:
        return hugging_face_tokenizer(self._input_processor.tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """The default sampling parameters, from ``generation_config.json``: a copy, which may be changed."""
        return SamplingParams.of(self._input_processor.default_sampling)

    def get_metrics(self) -> list[Metric]:
        """Metrics of the engine and its finished requests: objects with ``name``, ``labels`` and ``value`` (counters,
        gauges), ``values`` (vectors) or ``count``, ``sum`` and ``buckets`` (histograms)."""
        return snapshot(self.engine, self.counts, self.options.model)

    @checked_call
    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Record a trace of PyTorch's operations in this process until ``stop_profile``; with several ranks, those of
        rank 0 only.

        Args:
            profile_prefix: beginning of the trace's file name; None: ``penstock``. Its folder is ``torch_profiler_dir``
                of ``LLM(profiler_config=…)``, or else that of ``VLLM_TORCH_PROFILER_DIR``, or else the current one.
        """
        from torch.profiler import profile

        if self._profile:
            raise invalid("start_profile", "a profile is being recorded: call stop_profile first")
        self._profile_path = self._profile_folder / f"{profile_prefix or 'penstock'}.trace.json"
        self._profile_path.parent.mkdir(parents=True, exist_ok=True)
        self._profile = profile()
        self._profile.start()

    def stop_profile(self) -> Path:
        """Write the trace, for Perfetto or ``chrome://tracing``. Returns its path."""
        if not self._profile:
            raise invalid("stop_profile", "no profile is being recorded: call start_profile first")
        self._profile.stop()
        self._profile.export_chrome_trace(str(self._profile_path))
        self._profile = None
        return self._profile_path

    def collective_rpc(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: workers run no functions of callers."""
        message = "collective_rpc: workers run no functions of callers; use update_weights, sleep, or load_lora_adapter"
        raise PenstockError(Code.UNSUPPORTED, message, "collective_rpc")

    def apply_model(self, func: Callable[..., Any]) -> NoReturn:
        """Refused: the model of a worker is not a module of transformers."""
        message = "apply_model: workers run no functions of callers; use update_weights to change the model's weights"
        raise PenstockError(Code.UNSUPPORTED, message, "apply_model")

    @checked_call
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

    @checked_call
    def sleep(self, level: int = 1) -> None:
        """Free the KV cache, and with level 2 the weights, until ``wake_up``.

        On a CPU, level 1 keeps the weights; on a GPU it drops them, and ``wake_up`` reloads them from the checkpoint.
        """
        self._complete(self.engine.sleeper.sleep(level))

    @checked_call
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

    @checked_call
    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Empty the prefix cache, except for the files in ``kv_offloading_disk_path``. Returns True, as vLLM does.

        Args:
            reset_running_requests, reset_connector: ignored: no request is running, and the host's cache is emptied.
        """
        self.engine.scheduler.kv.reset_prefix_cache()
        return True

    def _complete(self, future: Future[T]) -> T:
        """Step the engine until a future is done, and return its result."""
        while not future.done():
            self.engine.step()
            if self.engine.failure:
                raise PenstockError.of(self.engine.failure)
        return future.result()

    def load_adapters(
        self, given: LoRARequest | Sequence[LoRARequest | None] | None, count: int
    ) -> list[LoRARequest | None]:
        """Load the adapters of ``count`` prompts. Returns the adapter of each; None: the base model."""
        requests = loras_of(given, count)
        for request in dict.fromkeys(requests):
            if request and request.lora_path:
                self.load_lora_adapter(request.lora_name, request.lora_path)
        return requests

    def _run(self, processors: Sequence[OutputProcessor], use_tqdm: UseTqdm) -> list[RequestOutput]:
        """Run requests until they are finished."""
        outputs = run_batch(self.engine, processors, use_tqdm, self.counts.add)
        return [FastDeployOutput.of(output) for output in outputs] if self._fastdeploy else outputs
