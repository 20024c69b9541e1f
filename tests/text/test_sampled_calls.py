"""Every text that the grammar of a forced call allows is a call whose arguments follow the tool's schema."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from penstock import GuidedDecodingParams, PenstockError, demo
from penstock.core import Vocabulary
from penstock.engine.guided import GrammarCompiler
from penstock.text import (
    ParserConfig,
    ReasoningStage,
    ResponseParser,
    Tokenizer,
    ToolCallFormat,
    forced_call_tag,
    reasoning_format,
)
from penstock.text.tool_calls.formats import HARMONY, TOOL_CALL_FORMATS

SAMPLES = int(os.environ.get("PENSTOCK_SAMPLED_CALLS", "3"))
"""Number of answers sampled for each format and schema."""
MAX_TOKENS = 400


def object_of(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


TEXT, NUMBER = {"type": "string"}, {"type": "number"}
POINT = object_of(["x"], x=NUMBER, label=TEXT)
SCHEMAS: dict[str, dict[str, Any]] = {
    "none": object_of([]),
    "text": object_of(["a"], a=TEXT, b=TEXT),
    "types": object_of(["n", "i"], n=NUMBER, i={"type": "integer"}, z={"type": "null"}, f={"type": "boolean"}),
    "unions": object_of(["u"], u={"type": ["string", "integer", "null"]}, v={"anyOf": [TEXT, {"type": "array"}]}),
    "constants": object_of(["e"], e={"enum": ["a", 1, None, True, [1]]}, c={"const": "x y"}),
    "lengths": object_of(["s"], s={"type": "string", "minLength": 2, "maxLength": 5}, p={"pattern": "^[ab]+$"}),
    "objects": object_of(["p"], p=POINT, q=object_of(["r"], r=object_of(["s"], s=object_of([], t=POINT)))),
    "arrays": object_of(["l"], l={"type": "array", "items": TEXT}, m={"type": "array", "items": POINT}),
    "limited arrays": object_of(["l"], l={"type": "array", "items": NUMBER, "minItems": 1, "maxItems": 2}),
    "free": object_of(["o"], o={"type": "object"}, l={"type": "array"}),
    "untyped": object_of(["x"], x={}, y={"description": "Anything."}),
    "references": object_of(["tree"], tree={"$ref": "#/$defs/tree"})
    | {"$defs": {"tree": object_of([], name=TEXT, children={"type": "array", "items": {"$ref": "#/$defs/tree"}})}},
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    compiler = GrammarCompiler("llguidance", len(tokenizer().vocabulary))
    end = tokenizer().token_to_id("<|im_end|>")
    assert end is not None
    compiler.set_vocabulary(lambda: Vocabulary(Path(demo.CHAT, "tokenizer.json").read_text(encoding="utf-8"), [end]))
    return compiler


@lru_cache(1)
def tokenizer() -> Tokenizer:
    return Tokenizer(demo.CHAT)


def sampled(compiler: GrammarCompiler, params: GuidedDecodingParams, choose: random.Random) -> Iterator[list[int]]:
    """Answers that a grammar allows, each cut off after ``MAX_TOKENS``."""
    grammar = compiler.compile(params).result(60)
    size = len(tokenizer().vocabulary)
    while True:
        guide, token_ids = grammar.new_guide(), list[int]()
        while not guide.is_terminated and len(token_ids) < MAX_TOKENS:
            row = np.zeros((size + 31) // 32, np.int32)
            guide.fill_bitmask(row)
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:size])
            token = int(choose.choice(allowed))
            assert guide.accept_token(token), guide.failure
            token_ids.append(token)
        yield token_ids


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("call_format", TOOL_CALL_FORMATS, ids=lambda call_format: str(call_format.parsers[0]))
def test_sampled_forced_calls_follow_schema(call_format: ToolCallFormat, compiler: GrammarCompiler) -> None:
    choose = random.Random(1)
    reasoning = reasoning_format("openai_gptoss", "") if call_format is HARMONY else None
    complete = 0
    for name, schema in SCHEMAS.items():
        try:
            tag = forced_call_tag(call_format, {name.replace(" ", "_"): schema}, several=False)
        except PenstockError as error:
            assert error.failure.field == "tools"
            continue
        params = GuidedDecodingParams(structural_tag=tag, source_field="tools")
        for token_ids in itertools.islice(sampled(compiler, params, choose), SAMPLES):
            text = tokenizer().decode(token_ids, skip_special_tokens=False).removesuffix("<|im_end|>")
            schemas = {name.replace(" ", "_"): schema}
            parser = ResponseParser(ParserConfig(reasoning, ReasoningStage.BEFORE, tools=call_format, schemas=schemas))
            parser.add(text, last=True)
            if len(token_ids) < MAX_TOKENS:
                (call,) = parser.message.tool_calls
                assert (call.name, parser.message.content) == (name.replace(" ", "_"), ""), text
                jsonschema.validate(json.loads(call.arguments), schema)
                complete += 1
    assert complete > len(SCHEMAS)
