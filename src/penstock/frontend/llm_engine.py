"""``LLMEngine``: an ``LLM`` whose caller adds requests and computes the steps, as in vLLM."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from penstock.core import LoRARequest
from penstock.core.errors import invalid

from .arguments import (
    RUNNING_CONTINUE,
    AnySamplingParams,
    as_list,
    checked_call,
    described,
    priorities_of,
    refuse,
    sampling_of,
)
from .batch import step
from .llm import LLM
from .output_processor import OutputProcessor
from .outputs import RequestOutput
from .prompts import Prompt

if TYPE_CHECKING:
    from .engine_args import EngineArgs


class LLMEngine:
    """Requests are added one by one; each ``step`` returns the outputs that it has changed.

    Examples:
        >>> engine = LLMEngine.from_engine_args(EngineArgs())
        >>> engine.add_request("1", "Once upon a time", SamplingParams(max_tokens=5))
        >>> while engine.has_unfinished_requests():
        ...     outputs = engine.step()
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._open: dict[str, OutputProcessor] = {}
        """Processors of unfinished requests by id."""
        self._queue: list[OutputProcessor] = []
        """Requests that the engine has not taken yet."""

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **_: Any) -> LLMEngine:
        """Start an engine with the arguments of ``LLM``."""
        return cls(LLM.from_engine_args(engine_args))

    @checked_call
    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: AnySamplingParams,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> str:
        """Add a request. Returns its id.

        Raises ``PenstockError`` (``invalid``) for an invalid request, and an id that an unfinished request has.
        """
        if not isinstance(request_id, str):
            raise invalid("request_id", f"must be a string, is {described(request_id)}")
        if request_id in self._open:
            raise invalid("request_id", f"{request_id!r} is the id of an unfinished request: use another one")
        (one,) = as_list(prompt, "prompt")
        (value,) = priorities_of(priority, 1)
        (adapter,) = self.llm.load_adapters(lora_request, 1)
        processor = self.llm.prepare(request_id, one, sampling_of(params), value, adapter)
        self._open[request_id] = processor
        self._queue.append(processor)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Compute a step. Returns the cumulative outputs of the requests that it has changed."""
        engine = self.llm.engine
        while self._queue and engine.try_add(self._queue[0].request):
            self._queue.pop(0)
        outputs = step(engine, self._open)
        for output in outputs:
            if output.finished:
                del self._open[output.request_id]
                self.llm.counts.add(output)
        return outputs

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests without further outputs; unknown ids are ignored."""
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            if processor := self._open.pop(request_id, None):
                self._queue = [one for one in self._queue if one is not processor]
                self.llm.engine.abort(request_id)

    def has_unfinished_requests(self) -> bool:
        """True if a request is not finished."""
        return bool(self._open)

    def get_num_unfinished_requests(self) -> int:
        """Number of requests that are not finished."""
        return len(self._open)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, as ``LLM.get_tokenizer``."""
        return self.llm.get_tokenizer()

    @checked_call
    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Empty the prefix cache; arguments as for ``AsyncLLM.reset_prefix_cache``."""
        if self.has_unfinished_requests():
            refuse(reset_running_requests=(reset_running_requests or None, RUNNING_CONTINUE))
        return self.llm.reset_prefix_cache()
