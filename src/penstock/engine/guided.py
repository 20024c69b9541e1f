"""Guided decoding: which tokens may come next, so that an output has the form that was asked for.

llguidance compiles schemas, patterns and grammars, and tells the tokens. What it cannot keep to it refuses by name.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from penstock.core import Code, Failure, GuidedDecodingParams, PenstockError, Vocabulary
from penstock.core.errors import invalid
from penstock.core.guided import STRICT

KEPT = 256
"""Compiled forms that are kept for the next request with the same."""
WHITESPACE = r"[ \n\r\t]{1,32}"
"""Between the parts of JSON, where nothing else is asked for: bounded, or a model might write nothing else."""

STACK = 256 * 2**20
"""Bytes of the stack that forms are compiled on; memory is taken where it is used."""


class Guide(Protocol):
    """One sequence's way through what is asked of its output."""

    def copy(self) -> Guide:
        """For a sibling that goes on from here."""
        ...

    def for_end(self, end: int) -> int:
        """The token that is taken for one that ends sequences, where this must not end yet."""
        ...

    def take(self, token: int) -> bool:
        """The sequence goes on with a token; False where it cannot, as where a form takes too long to follow."""
        ...

    @property
    def failure(self) -> Failure | None:
        """Why it cannot go on. The tokens it allows are then none that mean anything."""
        ...

    @property
    def free(self) -> bool:
        """Whether any token may come next."""
        ...

    @property
    def complete(self) -> bool:
        """Whether nothing can be added any more."""
        ...

    def allows(self, tokens: list[int]) -> int:
        """How many of these tokens may come next, one after the other."""
        ...

    def fill(self, row: np.ndarray) -> None:
        """Set the bits of the tokens that may come next, ``[vocabulary / 32]`` int32, and no others.

        Called where not any may come.
        """
        ...

    def forced(self) -> list[int]:
        """The tokens that come next, where no others can."""
        ...


class FormGuide(Guide):
    """The way through a compiled form."""

    free = False

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def copy(self) -> FormGuide:
        return FormGuide(self._matcher.deep_copy())

    def for_end(self, end: int) -> int:
        return end  # which comes only where the form allows it

    def take(self, token: int) -> bool:
        return bool(self._matcher.consume_token(token))

    @property
    def failure(self) -> Failure | None:
        if not self._matcher.is_error():
            return None
        return Failure(Code.UNSUPPORTED, f"the form cannot be followed: {_first_line(self._matcher.get_error())}")

    @property
    def complete(self) -> bool:
        return bool(self._matcher.is_stopped())

    def allows(self, tokens: list[int]) -> int:
        return int(self._matcher.validate_tokens(tokens))

    def fill(self, row: np.ndarray) -> None:
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)

    def forced(self) -> list[int]:
        return list(self._matcher.compute_ff_tokens())


class Grammar:
    """A compiled form."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def begin(self) -> Guide:
        return FormGuide(self._matcher.deep_copy())


class Guides:
    """Compiles forms in a thread of its own, and keeps those that were asked for last.

    Args:
        backend: ``off`` refuses all.
        size: of the model's vocabulary.
    """

    def __init__(self, backend: str, size: int) -> None:
        self._backend = backend
        self._size = size
        self._vocabulary: Vocabulary | None = None
        self._tokenizer: Any = None
        self._own: list[str] = []
        """Texts that are tokens of their own, which no other tokens write."""
        self._thread = ThreadPoolExecutor(1, "compile")
        before = threading.stack_size(STACK)  # references can be chained as deep as a form is long
        try:
            self._thread.submit(int).result()  # which starts the thread
        finally:
            threading.stack_size(before)
        self._compiled: OrderedDict[GuidedDecodingParams, Future[Grammar]] = OrderedDict()

    def learn(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """What the model's tokens spell; it is the same for all who tell."""
        if self._vocabulary is None:
            self._vocabulary = vocabulary()

    def compile(self, params: GuidedDecodingParams) -> Future[Grammar]:
        """A form, compiled now or before. Its future raises ``PenstockError`` where it cannot be kept to.

        Raises ``PenstockError`` (``unsupported``) where guided decoding is off.
        """
        if self._backend == "off":
            raise PenstockError(Code.UNSUPPORTED, "guided decoding is off (guided_decoding_backend)", params.field)
        if self._vocabulary is None:
            raise PenstockError(Code.UNAVAILABLE, "the engine does not know what its tokens spell")
        if (found := self._compiled.get(params)) is None or found.cancelled():
            found = self._compiled[params] = self._thread.submit(self._compile, params)
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(params)
        return found

    def _compile(self, params: GuidedDecodingParams) -> Grammar:
        from llguidance import LLMatcher, LLTokenizer

        if self._tokenizer is None:
            assert self._vocabulary is not None
            known = self._vocabulary
            try:
                self._tokenizer = LLTokenizer(known.tokenizer, n_vocab=self._size, eos_token=known.eos)
            except ValueError as error:
                words = f"{params.field}: not with this model's tokenizer: {_first_line(str(error))}"
                raise PenstockError(Code.UNSUPPORTED, words, params.field) from error
            self._own = [token["content"] for token in json.loads(known.tokenizer).get("added_tokens") or ()]
        if own := next((token for token in self._own if token in _literal(params)), None):
            words = f"{params.field}: cannot be kept to: {own!r} is a token of its own, and no text, for this model"
            raise PenstockError(Code.UNSUPPORTED, words, params.field)
        try:
            matcher = LLMatcher(self._tokenizer, _grammar(params, self._own), log_level=0)
        except (ValueError, TypeError, AttributeError, AssertionError) as error:
            raise invalid(params.field, f"is wrong: {_first_line(str(error))}") from error
        if not matcher.is_error():
            matcher.compute_bitmask()  # what it takes is taken here, where nobody waits, and shows whether it works
        if matcher.is_error():
            words = _first_line(matcher.get_error()).replace("NoExtensionBias", "nothing is of this form")
            raise PenstockError(Code.UNSUPPORTED, f"{params.field}: cannot be kept to: {words}", params.field)
        return Grammar(matcher)


class Masks:
    """Tokens that sequences may go on with, found in a thread while the model computes.

    Args:
        vocabulary: tokens of the model.
    """

    def __init__(self, vocabulary: int) -> None:
        self._words = -(-vocabulary // 32)
        self._thread = ThreadPoolExecutor(1, "masks")

    def begin(self, guides: Sequence[tuple[Guide | None, list[int]]]) -> Future[np.ndarray] | None:
        """Bits ``[rows, vocabulary / 32]`` int32; None where any token may come.

        Args:
            guides: with tokens that are guessed to come next: there is a row before and after each.
        """
        limited = any(guide and (draft or not guide.free) for guide, draft in guides)
        return self._thread.submit(self._fill, list(guides)) if limited else None

    def _fill(self, guides: list[tuple[Guide | None, list[int]]]) -> np.ndarray:
        rows = np.full((sum(1 + len(draft) for _, draft in guides), self._words), -1, np.int32)
        at = 0
        for guide, draft in guides:
            later = guide.copy() if guide and draft else guide
            for token in (*draft, None):
                if later and not later.free:
                    later.fill(rows[at])
                if later and token is not None:
                    later.take(token)
                at += 1
        return rows


def _literal(params: GuidedDecodingParams) -> str:
    """Text that a form asks for, or may ask for."""
    return "\n".join([params.regex or "", *(params.choice or ()), *_constants(params.json and json.loads(params.json))])


def _constants(part: Any, key: str = "") -> Iterator[str]:
    """Texts of a schema that may have to be written."""
    if isinstance(part, str) and key in ("const", "enum", "pattern"):
        yield part
    elif isinstance(part, list):
        for inner in part:
            yield from _constants(inner, key)
    elif isinstance(part, dict):
        for name, inner in part.items():
            if key == "properties":
                yield name
            yield from _constants(inner, key if key in ("const", "enum") else name)


def _grammar(params: GuidedDecodingParams, own: Sequence[str]) -> str:
    """In llguidance's own form. Raises ``ValueError`` where it is none.

    Args:
        own: texts that are tokens of their own.
    """
    from llguidance import LLMatcher, StructTag, grammar_from

    if params.json is not None or params.json_object:
        schema = json.loads(params.json) if params.json is not None else {"type": "object"}
        return str(LLMatcher.grammar_from_json_schema(_with_options(schema, params)))
    if params.regex is not None:
        return str(grammar_from("regex", params.regex))
    if params.choice is not None:
        return str(grammar_from("choice", json.dumps(params.choice)))
    if params.grammar is not None:
        return str(grammar_from("grammar", params.grammar))
    tags = _tags(params)
    special = [tag.trigger in own for tag in tags]
    if any(special) and not all(special):
        raise ValueError("triggers must all be tokens of their own, or none of them")
    written = str(StructTag.to_grammar(tags, assume_special=any(special)))
    for end in {tag.end for tag in tags if tag.end in own}:
        written = written.replace(f" {json.dumps(end)}\n", f" {end}\n")
    return written


def _with_options(schema: dict[str, Any], params: GuidedDecodingParams) -> dict[str, Any]:
    """A schema with our options in place of its own. One that asks to be taken loosely is not."""
    options: dict[str, Any] = dict(STRICT)
    if params.disable_any_whitespace:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = params.whitespace_pattern or WHITESPACE
    return schema | {"x-guidance": options}


def _tags(params: GuidedDecodingParams) -> list[Any]:
    from llguidance import StructTag

    found = json.loads(params.structural_tag)
    triggers, tags = found.get("triggers"), []
    for structure in found.get("structures") or ():
        begin, schema, end = structure.get("begin"), structure.get("schema", {}), structure.get("end", "")
        trigger = next((t for t in triggers or () if str(begin).startswith(t)), None)
        if not isinstance(begin, str) or not isinstance(end, str) or not trigger:
            raise ValueError(f"begin must be text that starts with a trigger, is {begin!r}")
        if not isinstance(schema, dict):
            raise ValueError(f"schema must be an object, is {schema!r}")
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=_with_options(schema, params), end=end))
    if not tags:
        raise ValueError("structures must name at least one")
    return tags


def _first_line(words: str) -> str:
    return words.strip().partition("\n")[0][:500]
