"""The idle guide of tool calls: same tokens with steps in flight, drafts and resumption; it costs no bitmasks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from broken_calls import NAMES, SCHEMAS, broken_answer, encode_in_pieces
from copying_model import copying_model, prompt_to_copy

from penstock import LLM
from penstock.core import EngineRequest, GeneratedSequence, SamplingParams
from penstock.engine.guided.reasoning_guide import make_guide
from penstock.engine.sequence.plan import Plan, ScheduledSequence
from penstock.engine.sequence.sequence import Sequence
from penstock.engine.spec_decode.speculation import PLACEHOLDER_TOKEN_ID, Speculation
from penstock.engine.step import RowUpdates
from penstock.frontend.chat_renderer import ResponseFormats
from penstock.frontend.outputs import RequestOutput
from penstock.frontend.tool_calls import ToolFunction, constrain_tool_calls
from penstock.text import ToolCallFormat
from penstock.text.tool_calls.formats import PYTHONIC
from penstock.text.tool_calls.json_formats import HARMONY, HERMES, LLAMA3_JSON
from penstock.text.tool_calls.xml_formats import QWEN3_CODER

FORMS = [HERMES, LLAMA3_JSON, PYTHONIC, QWEN3_CODER, HARMONY]
TOOLS = [ToolFunction(name, schema) for name, schema in zip(NAMES, SCHEMAS, strict=False)]
SPECULATION = {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 3, "adaptive": False}


def sampling(form: ToolCallFormat, **params: Any) -> SamplingParams:
    plain = SamplingParams(**{"temperature": 0, "max_tokens": 300} | params)
    return constrain_tool_calls(plain, TOOLS, ResponseFormats(form, None), "schema").sampling


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copying_model(tmp_path_factory.mktemp("copying"), "{{ messages }}", HERMES.marker_tokens)


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return start(model)


def start(model: Path, **options: Any) -> LLM:
    return LLM(str(model), max_model_len=1000, num_gpu_blocks_override=1200, block_size=16, **options)


def prompts(llm: LLM, form: ToolCallFormat, count: int, seed: int = 0) -> list[list[int]]:
    """Prompts after which the model tries to generate broken calls."""
    rng, tokenizer = random.Random(seed), llm.get_tokenizer()

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    tools = {tool.name: tool.parameters or {} for tool in TOOLS}
    answers = [encode_in_pieces(encode, broken_answer(form, tools, rng), rng)[:500] for _ in range(count)]
    return [prompt_to_copy(answer, tokenizer.convert_tokens_to_ids("<|im_end|>")) for answer in answers]


def results(outputs: list[RequestOutput]) -> list[Any]:
    return [(one.token_ids, one.finish_reason, one.logprobs) for output in outputs for one in output.outputs]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("options", [{"max_concurrent_batches": 3}, {"speculative_config": SPECULATION}], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: str(form.parsers[0]))
def test_steps_in_flight_and_drafts_do_not_change_calls(
    llm: LLM, model: Path, form: ToolCallFormat, options: dict[str, Any]
) -> None:
    batch = [{"prompt_token_ids": prompt} for prompt in prompts(llm, form, 12)]
    other = start(model, **options)
    for params in (sampling(form), sampling(form, temperature=1.2, seed=3, n=2, logprobs=2, presence_penalty=0.5)):
        expected = results(llm.generate(batch, params, use_tqdm=False))
        assert results(other.generate(batch, params, use_tqdm=False)) == expected
    assert any("get" in llm.get_tokenizer().decode(tokens) for tokens, *_ in expected)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: str(form.parsers[0]))
def test_call_continues_on_another_engine(llm: LLM, form: ToolCallFormat) -> None:
    params = sampling(form, max_tokens=120)
    for prompt in prompts(llm, form, 3, seed=1):
        whole = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].outputs[0].token_ids
        for length in range(1, len(whole), 7):
            request = EngineRequest(
                request_id="resumed",
                prompt=prompt,
                sampling=params,
                eos_token_ids=llm._input_processor.eos_token_ids,
                resumed=(GeneratedSequence(whole[:length]),),
            )
            llm.engine.add(msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=EngineRequest))
            rest: list[int] = []
            while llm.engine.busy:
                rest += [token for delta in llm.engine.step() for token in delta.token_ids]
            assert whole[:length] + rest == whole


def test_idle_guide_needs_no_bitmask_and_lets_steps_be_scheduled_ahead(model: Path) -> None:
    llm = start(model, max_concurrent_batches=2, speculation=False)
    tokenizer = llm.get_tokenizer()
    text = tokenizer.encode("This is a text without any calls. " * 4, add_special_tokens=False)
    prompt = prompt_to_copy(text, tokenizer.convert_tokens_to_ids("<|im_end|>"))
    ahead = []
    submit = llm.engine._executor.submit

    def record(step: Any, bitmask: Any) -> None:
        assert bitmask is None
        ahead.append(len(llm.engine._in_flight) > 1)
        submit(step, bitmask)

    llm.engine._executor.submit = record  # type: ignore[method-assign]
    (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling(HERMES), use_tqdm=False)
    assert output.outputs[0].token_ids[:-1] == text
    assert sum(ahead) > len(text) // 2


def test_token_tree_loses_branches_with_a_trigger(llm: LLM) -> None:
    tokenizer, params = llm.get_tokenizer(), sampling(HERMES)
    assert params.tool_calls
    llm.engine.set_vocabulary(llm._input_processor.vocabulary)
    request = EngineRequest(request_id="tree", prompt=[1, 2, 3], sampling=params)
    sequence = Sequence(request, 0, 0, 0)
    sequence.set_guide(make_guide(request, llm.engine._grammar_compiler.compile(params.tool_calls).result()))
    assert sequence.guide
    for token in tokenizer.encode("Hello", add_special_tokens=False):
        assert sequence.guide.accept_token(token)
    (marker,) = tokenizer.encode("<tool_call>", add_special_tokens=False)
    a, b = tokenizer.encode("ab", add_special_tokens=False)[0], tokenizer.encode("z", add_special_tokens=False)[0]
    written = [tokenizer.encode(part, add_special_tokens=False)[0] for part in ("<", "t", "o", "o", "l", "_", "c")]
    rest = [tokenizer.encode(part, add_special_tokens=False)[0] for part in ("a", "l", "l", ">")]
    chain = [*written, *rest]
    tree = [a, marker, b, b, *chain, b]
    parents = [-1, 0, 1, 0, 3, *range(4, 3 + len(chain)), 3 + len(chain)]
    item = ScheduledSequence(sequence, 0, 1, (sequence,), [PLACEHOLDER_TOKEN_ID] * len(tree), list(parents))
    plan = Plan(scheduled=[item])
    Speculation(None, len(tree)).fill_placeholders(plan, RowUpdates(), lambda message: [tree])
    assert item.draft == [a, b, *chain[:-1]]
    assert item.parents == [-1, 0, *range(1, len(chain))]
