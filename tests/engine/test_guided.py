"""Guided decoding: outputs satisfy the regex, choice, grammar, schema or tag; unsupported constraints are refused."""

from __future__ import annotations

import functools
import json
import os
import re
import resource
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest
from serving import Served, Servers

from penstock import LLM, GuidedDecodingParams, PenstockError, SamplingParams, demo
from penstock.core import Code, Vocabulary
from penstock.core.guided import disallow_additional_properties
from penstock.engine.guided import GrammarCompiler

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "address": {"$ref": "#/$defs/address"},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog", None]}, "maxItems": 2},
    },
    "required": ["name", "age", "address"],
    "additionalProperties": False,
    "$defs": {
        "address": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        }
    },
}
"""Schema with bounded strings, numbers and arrays: every document ends within 300 tokens."""
MESSAGES = [{"role": "user", "content": "Tell me about Anna, who lives in Paris."}]
TAGGED = {
    "structures": [
        {
            "begin": "<f>",
            "schema": {
                "type": "object",
                "properties": {"x": {"type": "integer"}},
                "required": ["x"],
                "additionalProperties": False,
            },
            "end": "</f>",
        }
    ],
    "triggers": ["<f>"],
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_gpu_blocks_override=400, block_size=16)


def guided(**constraint: Any) -> GuidedDecodingParams:
    return GuidedDecodingParams(**constraint)


def sampling(constraint: GuidedDecodingParams, **params: Any) -> SamplingParams:
    return SamplingParams(guided_decoding=constraint, **{"temperature": 0, "max_tokens": 300} | params)


CONSTRAINTS: dict[str, tuple[GuidedDecodingParams, str]] = {
    "regex": (guided(regex=r"\d{3}-\d{4}|[a-f]+(é|日)?"), r"\d{3}-\d{4}|[a-f]+(é|日)?"),
    "choice": (guided(choice=["yes", "no", "no way", "日本"]), "yes|no|no way|日本"),
    "lark": (guided(grammar='start: "a" (b | "c")+ "d"\nb: "(" "b"? ")"'), r"a(\(b?\)|c)+d"),
    "gbnf": (guided(grammar='root ::= "a" ("b" | "c") "d"'), "a(b|c)d"),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("temperature", [0, 1.5])
@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_output_satisfies_constraint(llm: LLM, constraint: str, temperature: float) -> None:
    params, pattern = CONSTRAINTS[constraint]
    # the model may continue for as long as the constraint allows: "length" is valid, too
    outputs = llm.chat(MESSAGES, sampling(params, temperature=temperature, seed=1, n=4 if temperature else 1))[
        0
    ].outputs
    assert any(made.finish_reason == "stop" for made in outputs)
    for made in outputs:
        assert made.finish_reason == "length" or re.fullmatch(pattern, made.text), made.text


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("options", [{}, {"disable_any_whitespace": True}, {"whitespace_pattern": " "}])
def test_json_output_is_valid_for_schema(llm: LLM, temperature: float, options: dict[str, Any]) -> None:
    params = sampling(guided(json=PERSON, **options), temperature=temperature, seed=5, n=3 if temperature else 1)
    for made in llm.chat(MESSAGES, params)[0].outputs:
        assert made.finish_reason == "stop"
        found = json.loads(made.text)
        jsonschema.validate(found, PERSON)
        if options.get("disable_any_whitespace"):
            assert made.text == json.dumps(found, separators=(",", ":"), ensure_ascii=False)


def test_json_object_output_is_a_json_object(llm: LLM) -> None:
    """The bias makes the model close the object: it was not trained to write JSON."""
    (end,) = llm.get_tokenizer().encode("}")
    made = llm.chat(MESSAGES, sampling(guided(json_object=True), logit_bias={end: 5}))[0].outputs[0]
    assert made.finish_reason == "stop" and isinstance(json.loads(made.text), dict)


def test_tagged_parts_of_free_text_satisfy_schema(llm: LLM) -> None:
    """The biases make the model begin with the tag ``<f>``. The penalty keeps it from repeating tokens."""
    bias = {token: 80 - 20 * place for place, token in enumerate(llm.get_tokenizer().encode("<f>"))}
    constraint = guided(structural_tag=TAGGED)
    params = SamplingParams(
        temperature=1.0, seed=2, max_tokens=60, guided_decoding=constraint, logit_bias=bias, repetition_penalty=50
    )
    made = llm.chat(MESSAGES, params)[0].outputs[0]
    inside = re.findall(r"<f>(.*?)</f>", made.text, re.DOTALL)
    assert inside and not made.text.endswith("</f>")
    assert all(isinstance(json.loads(part)["x"], int) for part in inside)


def tag_format(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


AB = tag_format("regex", pattern="[ab]/")
NUMBER = tag_format("json_schema", json_schema={"enum": [1, 20]})
LIST = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}
TAGS = {
    "tags": [
        tag_format("tag", begin="<n>", content=NUMBER, end="</n>"),
        tag_format("tag", begin="<", content=AB, end=">"),
    ]
}
WORD, X = tag_format("regex", pattern="[xy]{1,9}"), tag_format("const_string", value="x")
TAG = "(<n>(1|20)</n>|<[ab]/>)"
STRUCTURES: dict[str, tuple[dict[str, Any], str]] = {
    "sequence": (tag_format("sequence", elements=[tag_format("const_string", value='"x" '), NUMBER]), '"x" (1|20)'),
    "or": (tag_format("or", elements=[AB, NUMBER]), "[ab]/|1|20"),
    "optional": (tag_format("optional", content=AB), "([ab]/)?"),
    "star": (tag_format("star", content=AB), "([ab]/)*"),
    "plus": (tag_format("plus", content=AB), "([ab]/)+"),
    "tag": (TAGS["tags"][0], "<n>(1|20)</n>"),
    "tags": (tag_format("tags_with_separator", separator="; ", at_least_one=True, **TAGS), TAG + f"(; {TAG})*"),
    "one tag": (tag_format("tags_with_separator", separator="", stop_after_first=True, **TAGS), f"({TAG})?"),
    "separators": (tag_format("json_schema", json_schema=LIST, separators=[";", ":"]), r"\[[12];[12]\]"),
    "regex characters in separators": (
        tag_format("json_schema", json_schema=LIST, separators=['|."', "[a]"]),
        r'\[[12]\|\."[12]\]',
    ),
    "greedy": (tag_format("sequence", elements=[WORD, X]), "[xy]{1,9}x"),
    "greedy within": (tag_format("tag", begin="<n>", content=WORD, end="yx"), "<n>[xy]{1,9}yx"),
    "any text": (tag_format("triggered_tags", triggers=["<"], **TAGS), f"([^<]|{TAG})*"),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", STRUCTURES)
def test_structural_formats_are_combined(llm: LLM, name: str) -> None:
    shape, pattern = STRUCTURES[name]
    constraint = guided(structural_tag={"type": "structural_tag", "format": shape})
    bias = {token: 5.0 for token in (*llm.get_tokenizer().encode("<"), *llm.get_tokenizer().encode("</"))}
    outputs = llm.chat(MESSAGES, sampling(constraint, temperature=1.5, seed=1, n=8, max_tokens=40, logit_bias=bias))[
        0
    ].outputs
    for made in outputs:
        if made.finish_reason == "stop":
            assert re.fullmatch(pattern, made.text, re.DOTALL), made.text
    assert any(made.finish_reason == "stop" for made in outputs)


TOOL_CALL_TAGS = [tag_format("tag", begin="<tool_call>", content=NUMBER, end="</tool_call>")]


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        (tag_format("any_text"), "any_text"),
        (tag_format("const_string", value="a", case="lower"), "case of const_string"),
        (tag_format("triggered_tags", triggers=["<"], at_least_one=True, **TAGS), "at_least_one of triggered_tags"),
        (tag_format("star", content=tag_format("triggered_tags", triggers=["<"], **TAGS)), "triggered_tags within"),
        (tag_format("json_schema", json_schema={"uniqueItems": True}), "uniqueItems"),
        (tag_format("json_schema", json_schema={"const": "<think>"}), "added token"),
        (tag_format("json_schema", json_schema=False), "not|nothing"),
        (tag_format("const_string", value="ab<|im_end|>cd"), "<|im_end|>.*ends the output"),
        (tag_format("triggered_tags", triggers=["<"], tags=TOOL_CALL_TAGS), "part of a token of '<tool_call>'"),
        (tag_format("triggered_tags", triggers=["<tool", "<"], tags=TOOL_CALL_TAGS), "several triggers"),
        (
            functools.reduce(lambda part, _: tag_format("star", content=part), range(600), AB),
            "nested formats",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_unsupported_structural_format_is_refused_by_name(llm: LLM, shape: dict[str, Any], named: str) -> None:
    with pytest.raises(PenstockError, match=f"structural_tag.*({named})") as caught:
        llm.generate("x", sampling(guided(structural_tag={"format": shape})), use_tqdm=False)
    assert caught.value.failure.code is Code.UNSUPPORTED


def test_option_disallows_additional_properties(llm: LLM) -> None:
    """Unchanged: objects that set ``additionalProperties``, and members of ``allOf``. Properties may be named like
    keywords (here "properties")."""

    def object_schema(**more: Any) -> dict[str, Any]:
        return {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], **more}

    inner = {
        "properties": object_schema(),
        "open": object_schema(additionalProperties={"enum": [2]}),
        "all": {"allOf": [object_schema()]},
    }
    inner |= {
        "any": {"anyOf": [object_schema()]},
        "list": {"type": "array", "items": object_schema(), "minItems": 1, "maxItems": 1},
    }
    schema = {"type": "object", "properties": inner, "required": list(inner)}
    closed = object_schema(additionalProperties=False)
    expected = inner | {"properties": closed, "any": {"anyOf": [closed]}, "list": inner["list"] | {"items": closed}}
    assert disallow_additional_properties(schema) == schema | {"properties": expected, "additionalProperties": False}
    strict = LLM(guided_decoding_disable_additional_properties=True, num_gpu_blocks_override=50)
    constraint = {
        "type": "object",
        "properties": {"list": inner["list"], "any": object_schema()},
        "required": ["list", "any"],
    }
    compact = GuidedDecodingParams(json=constraint, disable_any_whitespace=True)
    sampling = SamplingParams(temperature=0, max_tokens=60, guided_decoding=compact)
    made = strict.chat(MESSAGES, sampling, use_tqdm=False)[0].outputs[0]
    assert made.finish_reason == "stop" and json.loads(made.text) == {"list": [{"a": 1}], "any": {"a": 1}}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("bounds", [{}, {"minLength": 1, "maxLength": 3}])
def test_json_strings_have_no_raw_control_characters(llm: LLM, bounds: dict[str, int]) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "string"} | bounds}, "required": ["n"]}
    tabs = {token: 50.0 for token in llm.get_tokenizer().encode("\t")}
    made = llm.chat(MESSAGES, sampling(guided(json=schema), max_tokens=40, logit_bias=tabs))[0].outputs[0]
    assert '"\t' not in made.text.replace(" ", "")
    assert made.finish_reason == "length" or json.loads(made.text)


class City(pydantic.BaseModel, extra="forbid"):
    name: Literal["Paris", "Rome"]
    size: Literal["small", "large"]


def test_pydantic_model_is_used_as_schema(llm: LLM) -> None:
    made = llm.chat(MESSAGES, sampling(guided(json=City)))[0].outputs[0]
    assert made.finish_reason == "length" or City.model_validate_json(made.text)


@pytest.mark.slow
def test_batch_does_not_change_constrained_outputs(llm: LLM) -> None:
    """Logprobs, preemption and drafts do not change them, either. Without logprobs, forced tokens take no step."""
    constraints = [*(constraint for constraint, _ in CONSTRAINTS.values()), guided(json=PERSON), None]
    params = [
        SamplingParams(guided_decoding=constraint, temperature=t, seed=7, max_tokens=80)
        for constraint in constraints
        for t in (0.0, 1.0)
    ]
    alone = [llm.chat(MESSAGES, each)[0].outputs[0] for each in params]
    with_logprobs = [llm.chat(MESSAGES, each.replace(logprobs=1))[0].outputs[0] for each in params]
    together = [output.outputs[0] for output in llm.chat([MESSAGES] * len(params), params)]
    small: dict[str, Any] = {"block_size": 16, "max_model_len": 256}
    tight = LLM(num_gpu_blocks_override=16, max_num_seqs=8, max_num_batched_tokens=64, **small)
    preempted = [output.outputs[0] for output in tight.chat([MESSAGES] * len(params) * 3, params * 3)][-len(params) :]
    assert tight.engine.scheduler.num_preemptions > 0
    draft_config = {"model": str(demo.DRAFT), "num_speculative_tokens": 3, "adaptive": False}
    drafting = LLM(num_gpu_blocks_override=400, speculative_config=draft_config, **small)
    drafted = [output.outputs[0] for output in drafting.chat([MESSAGES] * len(params), params)]
    assert drafting.engine.speculation and drafting.engine.speculation.stats.accepted_tokens > 0
    for expected, *others in zip(alone, with_logprobs, together, preempted, drafted, strict=True):
        assert all((other.token_ids, other.text) == (expected.token_ids, expected.text) for other in others)


def test_forced_tokens_are_output(llm: LLM) -> None:
    """The constraint forces these tokens; the model does not compute a step for them."""
    made = llm.generate("x", sampling(guided(regex="[0-9]\U0001f600\U0001f600\U0001f600")), use_tqdm=False)[0].outputs[
        0
    ]
    assert re.fullmatch("[0-9]\U0001f600{3}", made.text)


REFUSED = {
    "not": {"not": {"type": "string"}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "if": {"if": {"type": "string"}, "then": {"minLength": 3}},
    "contains": {"type": "array", "contains": {"type": "integer"}},
    "lenient": {"not": {}, "x-guidance": {"lenient": True}},
    "oneOf": {"oneOf": [{"type": "string"}, {"maxLength": 3}], "x-guidance": {"coerce_one_of": True}},
    "minProperties": {"minProperties": 2},  # llguidance may repeat property names
    "control": {"const": "a\0b"},
    "nothing": {"$ref": "#"},
}


@pytest.mark.parametrize(
    "constraint",
    [
        {"regex": "<think>[a-z]+"},
        {"choice": ["ok", "a <tool_call>"]},
        {"json": {"enum": ["</think>"]}},
        {"json": {"properties": {"<think>": {}}}},
    ],
)
def test_added_tokens_as_text_are_refused(llm: LLM, constraint: dict[str, Any]) -> None:
    with pytest.raises(PenstockError, match="added token") as caught:
        llm.generate("x", sampling(guided(**constraint)), use_tqdm=False)
    assert caught.value.failure.code is Code.UNSUPPORTED


def test_structural_tag_may_be_an_added_token(llm: LLM) -> None:
    """The model may write the added token; the text after it satisfies the schema."""
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
    tag = {"begin": "<tool_call>", "schema": schema, "end": "</tool_call>"}
    constraint = guided(structural_tag={"structures": [tag], "triggers": ["<tool_call>"]})
    mark = llm.get_tokenizer().convert_tokens_to_ids("<tool_call>")
    params = sampling(constraint, logit_bias={mark: 100}, max_tokens=60, skip_special_tokens=False)
    text = llm.chat(MESSAGES, params, use_tqdm=False)[0].outputs[0].text
    assert text.startswith("<tool_call>")
    for inside in re.findall("<tool_call>(.*?)</tool_call>", text):
        assert "city" in json.loads(inside)


def test_text_before_added_token_ends_a_repetition(llm: LLM) -> None:
    """The text before the added token is also the start of the separator."""
    tags = [tag_format("tag", begin="<a>", content=tag_format("const_string", value=""), end="</a>")]
    repeated = tag_format("tags_with_separator", separator="\n<b>", at_least_one=True, tags=tags)
    end = tag_format("const_string", value="\n</tool_call>")
    constraint = guided(structural_tag={"format": tag_format("sequence", elements=[repeated, end])})
    mark = llm.get_tokenizer().convert_tokens_to_ids("</tool_call>")
    params = sampling(constraint, logit_bias={mark: 100}, max_tokens=60, skip_special_tokens=False)
    text = llm.chat(MESSAGES, params, use_tqdm=False)[0].outputs[0].text
    assert re.fullmatch(r"<a></a>(\n<b><a></a>)*\n</tool_call>", text)


@pytest.mark.parametrize("keyword", REFUSED)
def test_unsupported_keyword_is_refused_by_name(llm: LLM, keyword: str) -> None:
    named = {"lenient": "not", "nothing": "no output matches it"}.get(keyword, keyword)
    with pytest.raises(PenstockError, match=rf"guided_json.*\b{named}\b") as caught:
        llm.generate("x", sampling(guided(json=REFUSED[keyword])))
    assert caught.value.failure.code is Code.UNSUPPORTED


ANNOTATED: list[dict[str, Any]] = [
    *(
        {"type": "string", "format": name}
        for name in ("path", "password", "binary", "uri-reference", "uuid4", "shoe-size")
    ),
    {"type": "integer", "format": "int32"},
    {"type": "array", "items": {"type": "null"}, "uniqueItems": False, "maxItems": 2},
    {"type": "object", "propertyNames": {"type": "string"}, "dependentRequired": {}, "maxProperties": 1},
    {"type": "array", "contains": {"type": "null"}, "minContains": 0, "unevaluatedItems": True, "maxItems": 1},
    {"type": "string", "not": False, "then": {"minLength": 9}, "nullable": True, "contentEncoding": "base64"},
    {"type": "boolean", "enum": None, "required": None, "discriminator": {"propertyName": "a"}, "x-order": 1},
]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("schema", ANNOTATED, ids=str)
def test_annotations_are_accepted_and_constrain_nothing(llm: LLM, schema: dict[str, Any]) -> None:
    schema = {"maxLength": 20, "additionalProperties": False} | schema
    (output,) = llm.chat(MESSAGES, sampling(guided(json=schema)), use_tqdm=False)
    known = {name: value for name, value in schema.items() if value is not None}
    jsonschema.Draft202012Validator(known).validate(json.loads(output.outputs[0].text))


def test_reference_into_unknown_keyword_is_followed(llm: LLM) -> None:
    schemas = {"A": {"example": 1, "const": 2}}
    schema = {"type": "object", "properties": {"a": {"$ref": "#/components/schemas/A"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    (output,) = llm.chat(MESSAGES, sampling(guided(json=schema | {"components": {"schemas": schemas}})), use_tqdm=False)
    assert json.loads(output.outputs[0].text) == {"a": 2}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": ["a"]}, "properties must be an object"),
        ({"properties": {"a": None}}, "a schema must be an object"),
        ({"items": {"pattern": 5}}, "pattern must be text"),
        ({"anyOf": {}}, "anyOf must be a list"),
        ({"required": True}, "required must be a list of names"),
        ({"maxLength": "5"}, "maxLength must be a number"),
    ],
)
def test_malformed_schema_is_refused_with_keyword(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(PenstockError, match=f"guided_json: is not a valid JSON Schema: {message}") as caught:
        guided(json=schema)
    assert caught.value.failure.code is Code.INVALID


def loop(llm: LLM, constraint: GuidedDecodingParams, text: str, **params: Any) -> Any:
    """Return the output with a strong bias towards the token of ``text``."""
    (token,) = llm.get_tokenizer().encode(text)
    return llm.chat(MESSAGES, sampling(constraint, logit_bias={token: 100}, **params), use_tqdm=False)[0].outputs[0]


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_json_number_ends_if_model_repeats_digits(llm: LLM, kind: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": kind}, "b": {"type": kind}}, "required": ["a", "b"]}
    output = loop(llm, guided(json=schema | {"additionalProperties": False}), "9", max_tokens=400)
    assert output.finish_reason == "stop"
    document = json.loads(output.text)
    assert all(len(digits) < 45 for digits in re.findall(r"\d+", output.text))
    jsonschema.validate(document, schema)


def test_number_beyond_bound_is_generated_if_schema_requires_it(llm: LLM) -> None:
    output = loop(llm, guided(json={"type": "string", "pattern": r"^\d{60}$"}), "9")
    assert json.loads(output.text) == "9" * 60


def test_json_string_ends_if_model_repeats_tokens(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    output = loop(llm, guided(json=schema), "z", max_tokens=400)
    assert output.finish_reason == "stop" and set(json.loads(output.text)["a"]) == {"z"}
    assert len(output.token_ids) > 128


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("schema", [{"type": "integer"}, {"type": "string"}], ids=["digits", "letters"])
def test_bounds_are_the_same_with_drafts(llm: LLM, schema: dict[str, Any]) -> None:
    """The n-gram drafter continues the repetition, so its drafts exceed the bound."""
    drafting = LLM(
        num_gpu_blocks_override=100,
        speculative_config={"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 2},
    )
    constraint = guided(json={"type": "array", "items": schema, "minItems": 2, "maxItems": 2})
    text = "9" if schema["type"] == "integer" else "z"
    expected, drafted = (loop(each, constraint, text, max_tokens=400) for each in (llm, drafting))
    assert drafted.token_ids == expected.token_ids and expected.finish_reason == "stop"


LEAST = -(2**63)


@pytest.mark.parametrize(
    "constraint",
    [
        {"json": {"enum": [LEAST, 2]}},
        {"json": {"properties": {"a": {"const": LEAST + 1}}}},
        {"json": {"type": "integer", "minimum": LEAST, "maximum": LEAST}},
        {"json": {"type": "integer", "minimum": -1e300, "maximum": -1e299}},
        {"grammar": 'start: "a" | %json {"enum": [-9223372036854775808]}'},
        {"structural_tag": {"format": {"type": "json_schema", "json_schema": {"const": LEAST}}}},
    ],
    ids=str,
)
def test_number_that_crashes_llguidance_is_refused(llm: LLM, constraint: dict[str, Any]) -> None:
    """For these numbers, llguidance would recurse until the stack overflows."""
    with pytest.raises(PenstockError, match=r"not supported: numbers below"):
        llm.generate("x", sampling(guided(**constraint)))
    (output,) = llm.generate("x", sampling(guided(json={"enum": [LEAST + 1024]})), use_tqdm=False)
    assert json.loads(output.outputs[0].text) == LEAST + 1024


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "pattern",
    [
        r"^\d{2,3}?|x$",
        r"(?:a|)(?P<b>b)*c\.{1,2}",
        r"[\w.-]{1,3}@[^\s@\]]{2}",
        r"\u65e5\x41\n\/[\U0001f600-\U0001f64f]\S",
        r".{1,3}\s[\]a]?[^\]a]",
    ],
)
def test_regex_output_matches_pattern_in_python(llm: LLM, pattern: str) -> None:
    params = sampling(guided(regex=pattern), temperature=2.0, seed=3, n=6, max_tokens=40)
    ended = [made.text for made in llm.generate("x", params, use_tqdm=False)[0].outputs if made.finish_reason == "stop"]
    assert ended and all(re.fullmatch(pattern, text) for text in ended), ended


def test_too_complex_regex_fails_its_request_only(llm: LLM) -> None:
    """With this regex, the number of possible continuations grows with each token."""
    params = [sampling(guided(regex="(((a{1,50}){1,50}){1,50}){400,500}")), sampling(guided(choice=["yes", "no"]))]
    failed, fine = [output.outputs[0] for output in llm.generate(["x", "x"], params, use_tqdm=False)]
    assert fine.text in ("yes", "no")
    assert failed.failure and "cannot be followed" in failed.failure.message
    assert not llm.engine.busy


def test_up_to_4096_choices_are_allowed(llm: LLM) -> None:
    choices = [f"choice {i}" for i in range(4096)]
    with pytest.raises(PenstockError, match="at most 4096"):
        guided(choice=[*choices, "one more"])
    for made in llm.generate("x", sampling(guided(choice=choices), temperature=2, seed=1, n=3))[0].outputs:
        assert made.finish_reason == "stop" and made.text in choices, made


@pytest.mark.slow
def test_constraint_above_memory_limit_is_refused_and_freed(llm: LLM) -> None:
    llm.generate("x", sampling(guided(regex="a")), use_tqdm=False)
    before = resident_bytes()
    with pytest.raises(PenstockError, match="guided_regex: not supported: compiling it takes more than"):
        llm.generate("x", sampling(guided(regex="b((a{1000}){1000}){5}")))
    assert resident_bytes() - before < 2**24


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_slow_compilations_delay_no_others_and_end_when_cancelled(llm: LLM) -> None:
    before = children(os.getpid())
    compiler = GrammarCompiler("llguidance", llm.engine.info.vocab_size)
    compiler.set_vocabulary(lambda: Vocabulary((Path(demo.CHAT) / "tokenizer.json").read_text(), [0]))
    assert compiler.compile(guided(choice=["first"])).result(60)
    slow = [compiler.compile(guided(json=exponential_schema(seed))) for seed in range(6)]
    for choice in "abc":
        assert compiler.compile(guided(choice=[choice])).result(60)
    assert not slow[-1].done()
    for future in slow:
        future.cancel()
    (process,) = children(os.getpid()) - before
    while children(process):  # without the cancellation, they would run for longer than the test
        os.sched_yield()
    assert compiler.compile(guided(choice=["d"])).result(60)


def exponential_schema(seed: int) -> dict[str, Any]:
    """Return a schema with 39 patterns, each of which doubles llguidance's time and memory."""
    patterns = [{"pattern": f"[a-z]{{{i}}}.*[0-9]"} for i in range(1, 40)]
    return {"type": "string", "description": str(seed), "allOf": patterns}


def children(pid: int) -> set[int]:
    """Return the process ids of a process's children."""
    lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return {int(child) for line in lists for child in line.split()}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("backend", ["xgrammar", "outlines", "lm-format-enforcer"])
def test_other_backend_is_replaced_by_llguidance_and_logged(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        llm = LLM(num_gpu_blocks_override=100, guided_decoding_backend=backend)
    assert f"guided_decoding_backend {backend}: llguidance is used" in caplog.text
    lark = sampling(guided(grammar='start: "a" ("b" | "c") "d"'))  # the Lark syntax, which xgrammar does not support
    assert llm.generate("x", lark, use_tqdm=False)[0].outputs[0].text in ("abd", "acd")


@pytest.mark.parametrize(
    "constraint",
    [
        {"regex": "(a"},
        {"regex": "(?=a)"},
        {"grammar": "start: nothing"},
        {"json": "{"},
        {"json": 5},
        {"choice": []},
        {"choice": ["a", ""]},
        {"structural_tag": {"structures": []}},
        {"structural_tag": {"structures": 5}},
        {"structural_tag": {"structures": ["x"], "triggers": 5}},
        {"structural_tag": {"structures": [{"begin": "<f>", "end": ""}], "triggers": [5]}},
        {"regex": "\ud800"},
        {"regex": "a", "whitespace_pattern": " "},
        {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True},
        {"structural_tag": {"structures": [{"begin": "<g>", "end": ""}], "triggers": ["<f>"]}},
        {"structural_tag": {"format": 5}},
        {"structural_tag": {"format": {"type": "sequence", "elements": []}}},
        {"structural_tag": {"format": {"type": "tag", "begin": 5, "content": AB, "end": ""}}},
        {"structural_tag": {"format": {"type": "star"}}},
        {"structural_tag": {"format": {"type": "regex", "pattern": "(a"}}},
        {"structural_tag": {"format": AB, "structures": []}},
        {"structural_tag": {"format": AB, "type": "nonsense"}},
        {"structural_tag": {"format": {"type": "triggered_tags", "triggers": "<n>", **TAGS}}},
        {"structural_tag": {"format": {"type": "tags_with_separator", "separator": "", "at_least_one": "no", **TAGS}}},
        {"json": {}, "regex": "a"},
        {},
        {"regex": "a" * 300_000},
    ],
    ids=lambda constraint: str(constraint)[:40],
)
def test_invalid_constraint_is_refused(llm: LLM, constraint: dict[str, Any]) -> None:
    with pytest.raises(PenstockError, match=r"guided|structural"):
        llm.generate("x", sampling(guided(**constraint)))
    assert not llm.engine.busy


@pytest.mark.slow
def test_long_chains_of_references_are_followed(llm: LLM) -> None:
    links = 1400  # close to the maximum length of a constraint
    chain = {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(links)}
    schema = {"$defs": {**chain, str(links): {"type": "array"}}, "$ref": "#/$defs/0"}
    made = llm.generate("x", sampling(guided(json=schema), max_tokens=5), use_tqdm=False)[0].outputs[0]
    assert made.failure is None


@pytest.mark.slow
def test_logprobs_do_not_change_where_stop_string_ends_output(llm: LLM) -> None:
    for stop in ("na", "addr", "city"):
        params = sampling(guided(json=PERSON), stop=(stop,), max_tokens=60)
        plain, other = (llm.chat(MESSAGES, each)[0].outputs[0] for each in (params, params.replace(logprobs=0)))
        assert (plain.text, plain.token_ids) == (other.text, other.token_ids)


@pytest.mark.parametrize(
    "other", [{"ignore_eos": True}, {"min_tokens": 2}, {"allowed_token_ids": [5]}, {"bad_words": ["a"]}]
)
def test_incompatible_sampling_params_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(PenstockError, match=rf"{next(iter(other))}.*guided"):
        sampling(guided(regex="a"), **other)


# --- Over HTTP --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(servers: Servers) -> Served:
    return servers.get("--num-gpu-blocks-override", "400")


@pytest.fixture(scope="module")
def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)


def ask(client: openai.OpenAI, **fields: Any) -> str:
    answer = client.chat.completions.create(model="default", messages=MESSAGES, temperature=0, max_tokens=200, **fields)
    return str(answer.choices[0].message.content)


@pytest.mark.slow
def test_openai_client_parses_pydantic_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="default", messages=MESSAGES, temperature=0, max_tokens=200, response_format=City
    )
    assert isinstance(answer.choices[0].message.parsed, City)


def test_all_request_fields_for_constraints_are_accepted(client: openai.OpenAI) -> None:
    schema = City.model_json_schema()
    made = {
        ask(client, response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}),
        ask(client, extra_body={"guided_json": schema}),
        ask(client, extra_body={"guided_json": json.dumps(schema)}),
        ask(client, extra_body={"structured_outputs": {"json": schema}}),
    }
    assert len(made) == 1
    City.model_validate_json(made.pop())
    assert ask(client, extra_body={"guided_choice": ["red", "green"]}) in ("red", "green")
    assert ask(client, extra_body={"structured_outputs": {"choice": ["red", "green"]}}) in ("red", "green")
    assert re.fullmatch("[0-9]{4}", ask(client, extra_body={"guided_regex": "[0-9]{4}"}))
    assert re.fullmatch("ab+c", ask(client, extra_body={"guided_grammar": 'root ::= "a" "b" "b"? "c"'}))
    compact = ask(client, extra_body={"guided_json": schema, "guided_decoding_disable_any_whitespace": True})
    assert compact == json.dumps(json.loads(compact), separators=(",", ":"), ensure_ascii=False)


def test_streamed_text_equals_full_answer(client: openai.OpenAI) -> None:
    constraint = {
        "type": "json_schema",
        "json_schema": {"name": "person", "schema": City.model_json_schema(), "strict": True},
    }
    whole = ask(client, response_format=constraint)
    stream = client.chat.completions.create(
        model="default", messages=MESSAGES, temperature=0, max_tokens=200, response_format=constraint, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole
    completion = client.completions.create(
        model="default",
        prompt="x",
        temperature=0,
        max_tokens=20,
        extra_body={"guided_regex": "[xy]{3}"},
        n=2,
        stream=True,
    )
    texts = ["", ""]
    for chunk in completion:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts[0] == texts[1] and re.fullmatch("[xy]{3}", texts[0])


@pytest.mark.parametrize("stream", [False, True])
def test_constraint_is_refused_before_first_token(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        ask(client, extra_body={"guided_json": {"type": "array", "uniqueItems": True}}, stream=stream)
    with pytest.raises(openai.BadRequestError, match="one constraint"):
        ask(client, response_format={"type": "json_object"}, extra_body={"guided_regex": "a"}, stream=stream)
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as caught:
        ask(client, response_format=named, stream=stream)
    assert caught.value.param == "response_format"
    unique = [tool("roll", sides={"type": "array", "uniqueItems": True})]
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as caught:
        ask(client, tools=unique, tool_choice="required", stream=stream)
    assert caught.value.param == "tools"
    assert ask(client, extra_body={"guided_choice": ["ok"]}) == "ok"


def test_refused_schema_names_pattern_and_tool(client: openai.OpenAI) -> None:
    pattern = {"type": "string", "pattern": "(?=ab)c"}
    with pytest.raises(openai.BadRequestError, match=r"guided_json: .*\(\?=ab\)c .*look-around"):
        ask(client, extra_body={"guided_json": pattern})
    tools = [tool("roll", sides={"enum": [6]}), tool("look_up", text=pattern)]
    with pytest.raises(openai.BadRequestError, match=r"tools: .*\(\?=ab\)c .*look-around.*look_up") as caught:
        ask(client, tools=tools, tool_choice="required")
    assert "\n" not in str(caught.value.body["message"])
    with pytest.raises(openai.BadRequestError, match=r"guided_regex: .*\[a .*unclosed"):
        ask(client, extra_body={"guided_regex": "x[a"})


def test_guided_decoding_can_be_disabled() -> None:
    off = LLM(num_gpu_blocks_override=100, guided_decoding_backend="off")
    with pytest.raises(PenstockError, match="guided_decoding_backend"):
        off.generate("x", sampling(guided(regex="a")))


# --- Required tool calls ----------------------------------------------------------------------------------------------


def tool(name: str, **properties: Any) -> Any:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool("get_weather", city={"type": "string", "maxLength": 20}), tool("roll", sides={"enum": [6, 20]})]


def call(
    client: openai.OpenAI, stream: bool, tools: list[Any] = TOOLS, **fields: Any
) -> tuple[str | None, list[tuple[str, Any]], str]:
    """Return content, tool calls and finish reason of a chat, streamed or not."""
    request: dict[str, Any] = {
        "model": "default",
        "messages": MESSAGES,
        "tools": tools,
        "temperature": 0,
        "max_tokens": 200,
    }
    if not stream:
        choice = client.chat.completions.create(**request, **fields).choices[0]
        made = [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls or ()]
        return choice.message.content, made, choice.finish_reason
    content, names, arguments, reason = "", {}, {}, ""
    for chunk in client.chat.completions.create(**request, **fields, stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for part in delta.tool_calls or ():
            names[part.index] = names.get(part.index, "") + (part.function.name or "")
            arguments[part.index] = arguments.get(part.index, "") + (part.function.arguments or "")
        reason = chunk.choices[0].finish_reason or reason
    return content or None, [(names[i], json.loads(arguments[i])) for i in sorted(names)], reason


@pytest.mark.parametrize("stream", [False, True])
def test_required_tool_call_is_made(client: openai.OpenAI, stream: bool) -> None:
    named = {"type": "function", "function": {"name": "roll"}}
    content, calls, reason = call(client, stream, tool_choice=named)
    assert (content, reason) == (None, "stop")
    assert calls in ([("roll", {"sides": 6})], [("roll", {"sides": 20})])
    content, calls, reason = call(client, stream, tool_choice="required", parallel_tool_calls=False)
    assert (content, len(calls), reason) == (None, 1, "tool_calls")
    content, calls, reason = call(client, stream, tool_choice="required")
    assert content is None and calls
    for name, arguments in calls:
        known = next(t["function"]["parameters"] for t in TOOLS if t["function"]["name"] == name)
        jsonschema.validate(arguments, known)


def test_references_in_tool_schemas_are_resolved(client: openai.OpenAI) -> None:
    where = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    nested = {"properties": {"where": {"$ref": "#/$defs/Where"}}, "required": ["where"], "$defs": {"Where": where}}
    tree = {"properties": {"kids": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}}, "required": ["kids"]}
    for parameters in (nested, tree):
        parameters |= {"additionalProperties": False}
        function = {"name": "f", "parameters": parameters}
        _, calls, _ = call(client, False, tool_choice="required", tools=[{"type": "function", "function": function}])
        assert calls
        for _, arguments in calls:
            jsonschema.validate(arguments, {"type": "object"} | parameters)


def test_impossible_tool_choice_is_refused(client: openai.OpenAI) -> None:
    unknown = {"type": "function", "function": {"name": "fly"}}
    for fields, message in (
        ({"tool_choice": unknown}, "fly.*get_weather, roll"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "another constraint"),
        ({"tool_choice": "required", "tools": []}, "requires tools"),
        ({"tool_choice": "required", "tools": [tool("f", x={"not": {}})]}, "not"),
        ({"tool_choice": "required", "tools": [tool("f", x={"minProperties": 2})]}, "tools.0.*minProperties"),
        ({"tool_choice": "required", "tools": [tool("f", x={"const": "a\0b"})]}, "control characters"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            client.chat.completions.create(**{"model": "default", "messages": MESSAGES, "tools": TOOLS} | fields)
