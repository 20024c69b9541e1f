"""Requests, responses and handlers of vLLM's ``/score`` and ``/classify``, and of Cohere's and Jina's ``/rerank``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from penstock.core.errors import invalid
from penstock.frontend.outputs import RequestOutput, cosine, embedding_of
from penstock.serve.http.body import require
from penstock.serve.http.request_record import RequestRecord
from penstock.serve.models.served_models import ServedModel

from .pooling import EmbeddingUsage, Input, InputRequest, PoolingHandler, PoolingRequest, usage
from .schema import MAX_PROMPTS, one_or_several

TextOrList = str | Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_PROMPTS)]
TEXT_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""Alternative pairs of field names for the first and the second texts of a score request."""


class ScoreRequest(PoolingRequest, kw_only=True, forbid_unknown_fields=True):
    """Request to score pairs of texts, or one text with each of several texts. For fields, see ``TEXT_PAIRS``."""

    text_1: TextOrList | None = None
    text_2: TextOrList | None = None
    queries: TextOrList | None = None
    documents: TextOrList | None = None
    items: TextOrList | None = None
    """Alternative to ``documents``."""
    data_1: TextOrList | None = None
    data_2: TextOrList | None = None


class RerankText(msgspec.Struct, kw_only=True):
    """A document as an object, as clients of Jina and older clients of Cohere send it."""

    text: str


class RerankRequest(PoolingRequest, kw_only=True, forbid_unknown_fields=True):
    query: str
    documents: Annotated[list[str | RerankText], msgspec.Meta(min_length=1, max_length=MAX_PROMPTS)]
    top_n: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    """Number of documents to return. Default and 0: all."""
    return_documents: bool | None = None
    """Return the texts of the documents. Default: true."""
    max_tokens_per_doc: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    """Maximum number of tokens per document; longer documents are truncated. Default and 0: no limit."""


RerankRequest.reading = RerankRequest.reading.accepting(RerankRequest)


class ClassifyRequest(InputRequest, kw_only=True, forbid_unknown_fields=True):
    pass


class Score(msgspec.Struct, kw_only=True):
    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class RerankDocument(msgspec.Struct, kw_only=True):
    text: str


class RerankResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int
    """Index of the document in the request."""
    relevance_score: float
    document: RerankDocument | None = None


class RerankResponse(msgspec.Struct, kw_only=True):
    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RerankResult]


class Classified(msgspec.Struct, kw_only=True):
    index: int
    label: str
    """Name of the most likely class."""
    probs: list[float]
    num_classes: int


class ClassifyResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Classified]
    usage: EmbeddingUsage


class _PairHandler(PoolingHandler):
    """Base class of handlers that score pairs of texts, with a cross-encoder or by the cosine similarity of embeddings.

    Args:
        names: names of the two fields, for errors.
        first: texts of the first field: one text, or one per text of ``second``.
        second: texts of the second field.
        max_second_len: maximum number of tokens of a second text; None: no limit.
    """

    def __init__(
        self,
        service: ServedModel,
        record: RequestRecord,
        request: PoolingRequest,
        names: tuple[str, str],
        first: Sequence[str],
        second: Sequence[str],
        max_second_len: int | None = None,
    ) -> None:
        super().__init__(service, record, request)
        self._names = names
        self._first, self._second = first, second
        self._max_second_len = max_second_len
        if max_second_len is not None and not self._pooler.is_cross_encoder:
            raise invalid("max_tokens_per_doc", "requires a cross-encoder; use truncate_prompt_tokens")
        self.pooling = self._classifier() if self._pooler.is_cross_encoder else self._pooler.embedding_params()

    async def prompts(self) -> list[tuple[str, Input]]:
        pooler, limit = self._pooler, self._max_second_len
        if not pooler.is_cross_encoder:
            sides = zip(self._names, (self._first, self._second), strict=True)
            return [(name, pooler.with_prompt(text)) for name, side in sides for text in side]
        first = list(self._first) * (len(self._second) // len(self._first))
        pairs, client = zip(first, self._second, strict=True), self.record.sender
        texts = [await self.service.gateway.pair(a, b, client) for a, b in pairs]
        if limit is not None and any(each.pair is None for each in texts):
            message = "is not supported for cross-encoders with a chat template; use truncate_prompt_tokens"
            raise invalid("max_tokens_per_doc", message)
        options = {"add_special_tokens": self._special, "max_second_len": limit}
        return [(self._names[1], msgspec.structs.replace(each, **options)) for each in texts]

    def _scores(self, outputs: list[RequestOutput]) -> list[float]:
        vectors = [embedding_of(output) for output in outputs]
        if self._pooler.is_cross_encoder:
            return [vector[0] for vector in vectors]
        before, after = vectors[: len(self._first)], vectors[len(self._first) :]
        if len(before) == 1:
            before = before * len(after)
        return [cosine(a, b) for a, b in zip(before, after, strict=True)]


class ScoreHandler(_PairHandler):
    kind = "score"

    def __init__(self, service: ServedModel, record: RequestRecord, request: ScoreRequest) -> None:
        names = _text_fields(request)
        first, second = (
            [text] if isinstance(text := require(getattr(request, name), name), str) else text for name in names
        )
        if len(first) not in (1, len(second)):
            message = f"has {len(second)} texts, but {names[0]} has {len(first)}; send as many, or one in {names[0]}"
            raise invalid(names[1], message, len(first))
        super().__init__(service, record, request, names, first, second)

    def response(self, outputs: list[RequestOutput]) -> object:
        data = [Score(index=i, score=score) for i, score in enumerate(self._scores(outputs))]
        return self.answer(ScoreResponse, data, outputs)


class RerankHandler(_PairHandler):
    kind = "rerank"

    def __init__(self, service: ServedModel, record: RequestRecord, request: RerankRequest) -> None:
        documents = [each if isinstance(each, str) else each.text for each in request.documents]
        limit = request.max_tokens_per_doc or None
        super().__init__(service, record, request, ("query", "documents"), [request.query], documents, limit)
        self._num_results = request.top_n or len(documents)
        self._with_documents = request.return_documents is not False

    def response(self, outputs: list[RequestOutput]) -> RerankResponse:
        """Make the response: documents by descending score, in the order of the request if scores are equal."""
        ranked = sorted(enumerate(self._scores(outputs)), key=lambda entry: -entry[1])
        results = [
            RerankResult(
                index=index,
                document=RerankDocument(text=self._second[index]) if self._with_documents else None,
                relevance_score=score,
            )
            for index, score in ranked[: self._num_results]
        ]
        return RerankResponse(id=self.id, model=self.model, usage=usage(outputs), results=results)


class ClassifyHandler(PoolingHandler):
    kind = "classify"

    def __init__(self, service: ServedModel, record: RequestRecord, request: ClassifyRequest) -> None:
        super().__init__(service, record, request)
        self.pooling = self._classifier()
        given = one_or_several(request.input, "input", "inputs")
        self._prompts = [self._pooler.normalize_case(prompt) if isinstance(prompt, str) else prompt for prompt in given]

    def response(self, outputs: list[RequestOutput]) -> object:
        data = [self._classified(index, embedding_of(output)) for index, output in enumerate(outputs)]
        return self.answer(ClassifyResponse, data, outputs)

    def _classified(self, index: int, probabilities: list[float]) -> Classified:
        best = max(range(len(probabilities)), key=probabilities.__getitem__)
        label = self._pooler.labels[best]
        return Classified(index=index, label=label, probs=probabilities, num_classes=len(probabilities))


def _text_fields(request: ScoreRequest) -> tuple[str, str]:
    """The two fields that a request uses. Raises ``PenstockError`` (``invalid``) for fields of different pairs."""
    given_fields = {name for sides in TEXT_PAIRS for name in sides if getattr(request, name) is not None}
    result = next((sides for sides in TEXT_PAIRS if given_fields.issubset(sides)), None)
    if result is None:
        found = " and ".join(sorted(given_fields))
        message = f"use either text_1 and text_2, or queries and documents; the request has {found}"
        raise invalid(max(given_fields), message)
    return result
