"""PaddleNLP's KServe model for gRPC clients: requests and responses are JSON in BYTES tensors."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, ClassVar

import msgspec

from penstock.core import PenstockError
from penstock.core.errors import invalid
from penstock.serve.dialects.kserve import BYTES, Model, ModelCall, ModelResponse, Spec, Tensor
from penstock.serve.http.body import check_elements, decode_json
from penstock.serve.http.reply import encode
from penstock.serve.models.served_models import ServedModel, ServedModels

from .routes import PaddleNLPHandler
from .schema import PaddleNLPErrorFormat, parse


class PaddleNLPModel(Model):
    """PaddleNLP's model. ``IN``: a JSON list with one request; ``OUT``: a JSON list with one response chunk."""

    name = "model"
    inputs: ClassVar = (Spec("IN", BYTES),)
    outputs: ClassVar = (Spec("OUT", BYTES),)
    max_batch_size = 0
    decoupled = True

    def __init__(self, served_models: ServedModels) -> None:
        self._served_models = served_models

    @property
    def service(self) -> ServedModel:
        return self._served_models.find()

    async def infer(self, call: ModelCall) -> AsyncGenerator[ModelResponse, None]:
        """Respond in chunks if the call is streamed, otherwise once. Errors are sent in ``OUT``, as in PaddleNLP."""
        (raw,) = call.inputs["IN"].elements
        error_format = PaddleNLPErrorFormat()

        def read() -> tuple[int, PaddleNLPHandler]:
            nonlocal error_format
            memory = check_elements(raw)
            fields = _request_document(raw)
            error_format = PaddleNLPErrorFormat.of(fields)
            request = parse(fields, call.record.unknown)
            if not call.streamed:
                request.return_all_tokens = True
            service = self._served_models.find_or_first(request.model)
            return memory, PaddleNLPHandler(service, call.record, request, len(raw))

        try:
            handler = await self._served_models.parse(call.record, len(raw), read)
            async with aclosing(await handler.outputs()) as outputs:
                async for _, output in outputs:
                    if chunk := handler.chunk(output):
                        document = msgspec.to_builtins(chunk)
                        del document["error_msg"], document["error_code"]
                        yield _response(document, bool(chunk.is_end))
        except PenstockError as error:
            call.record.failure = error.failure
            yield _response(msgspec.json.decode(error_format.error(error.failure)), True)


def _request_document(raw: bytes) -> dict[str, Any]:
    """The request in ``IN``. Raises ``PenstockError`` (``invalid``) unless it is a list with one object."""
    result = decode_json(raw, "IN")
    if not isinstance(result, list) or len(result) != 1 or not isinstance(result[0], dict):
        raise invalid("IN", f"must be a list with one request (an object), is {str(result)[:50]!r}")
    return result[0]


def _response(document: dict[str, Any], last: bool) -> ModelResponse:
    return ModelResponse([Tensor("OUT", BYTES, (1,), [encode([document])])], last)
