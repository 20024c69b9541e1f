"""The API of Text Generation Inference, tested with Hugging Face's ``InferenceClient``."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import BadRequestError, GenerationError, ValidationError
from repository import ROOT
from serving import Served, Servers

from penstock import demo
from penstock.config.settings import settings
from penstock.text import Tokenizer

PROMPT = "<|im_start|>user\nWhat is the capital of Canada?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def served(servers: Servers) -> Served:
    return servers.get()


@pytest.fixture
def client(served: Served) -> InferenceClient:
    return InferenceClient(base_url=served.root)


@pytest.mark.slow
@pytest.mark.row("tgi", "/")
@pytest.mark.row("tgi", "max_new_tokens")
@pytest.mark.row("tgi", "return_full_text")
def test_text_stream_equals_whole_text(client: InferenceClient) -> None:
    text = client.text_generation(PROMPT)
    assert "Ottawa" in text
    assert client.text_generation(PROMPT, return_full_text=True) == PROMPT + text
    chunks = list(client.text_generation(PROMPT, stream=True))
    assert len(chunks) > 1 and "".join(chunks) == text + "<|im_end|>"  # as in TGI, only streams have special tokens
    assert len(Tokenizer(demo.CHAT).encode(client.text_generation(PROMPT, max_new_tokens=3))) == 3


@pytest.mark.row("tgi", "details", "decoder_input_details", "top_n_tokens")
@pytest.mark.row("tgi", "seed")
@pytest.mark.row("tgi", "stop")
def test_details_have_tokens_and_finish_reason(client: InferenceClient) -> None:
    tokenizer = Tokenizer(demo.CHAT)
    whole = client.text_generation(
        PROMPT, details=True, decoder_input_details=True, top_n_tokens=2, do_sample=True, temperature=0.01, seed=3
    )
    details = whole.details
    assert details and details.finish_reason == "eos_token" and details.seed == 3
    assert details.generated_tokens == len(details.tokens)
    assert tokenizer.decode([token.id for token in details.tokens]) == whole.generated_text
    assert details.tokens[-1].special and not details.tokens[0].special
    prefill: list[Any] = details.prefill  # a list of dicts: the client does not convert it
    assert [token["id"] for token in prefill] == tokenizer.encode(PROMPT)
    assert prefill[0]["logprob"] is None and all(token["logprob"] <= 0 for token in prefill[1:])
    tops: Any = details.top_tokens
    assert all(len(top) == 2 and top[0]["logprob"] >= top[1]["logprob"] for top in tops)
    assert [top[0]["id"] for top in tops] == [token.id for token in details.tokens]
    events = list(client.text_generation(PROMPT, details=True, stream=True))
    assert [event.index for event in events] == [*range(1, len(details.tokens) + 1)]
    assert [event.token.id for event in events] == [token.id for token in details.tokens]
    assert "".join(event.token.text for event in events if not event.token.special) == whole.generated_text
    assert events[-1].generated_text == whole.generated_text and not events[0].generated_text
    last = events[-1].details
    assert last and (last.finish_reason, last.input_length) == ("eos_token", len(details.prefill))
    cut = client.text_generation(PROMPT, details=True, max_new_tokens=2)
    assert cut.details and (cut.details.finish_reason, cut.details.generated_tokens) == ("length", 2)
    stopped = client.text_generation(PROMPT, details=True, stop=["Ottawa"])
    assert stopped.details and stopped.details.finish_reason == "stop_sequence"
    assert stopped.generated_text.endswith("Ottawa")
    chunks = list(client.text_generation(PROMPT, stream=True, stop=["Ottawa"]))
    assert "".join(chunks) == stopped.generated_text


@pytest.mark.row("tgi", "do_sample")
@pytest.mark.row("tgi", "temperature", "top_k", "top_p", "repetition_penalty", "frequency_penalty")
@pytest.mark.row("tgi", "best_of")
@pytest.mark.row("tgi", "truncate")
@pytest.mark.row("tgi", "adapter_id")
def test_sampling_parameters_take_effect(client: InferenceClient) -> None:
    parameters: dict[str, Any] = {"top_k": 50, "top_p": 0.9, "temperature": 1.3, "seed": 7, "max_new_tokens": 12}
    parameters |= {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "best_of": 2, "adapter_id": "penstock-demo"}
    first, again = (client.text_generation("A story:", do_sample=True, **parameters) for _ in range(2))
    assert first == again
    story = "The story of a fox:"
    sampled = {client.text_generation(story, do_sample=True, seed=seed, max_new_tokens=8) for seed in range(4)}
    greedy = {client.text_generation(story, seed=seed, max_new_tokens=8) for seed in range(4)}
    assert len(sampled) > 1 and len(greedy) == 1
    assert client.text_generation("A very long prompt. " + PROMPT, truncate=len(Tokenizer(demo.CHAT).encode(PROMPT)))
    cut = client.text_generation(PROMPT, truncate=4, details=True, decoder_input_details=True)
    assert cut.details and len(cut.details.prefill) == 4
    with pytest.raises(GenerationError, match="does not exist"):
        client.text_generation(PROMPT, adapter_id="none")


@pytest.mark.row("tgi", "grammar")
def test_grammar_constrains_answer(client: InferenceClient) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    answer = client.text_generation(PROMPT, grammar={"type": "json", "value": schema})
    assert list(json.loads(answer)) == ["a"]
    json_schema: Any = {"type": "json_schema", "value": {"name": "answer", "schema": schema}}
    assert client.text_generation(PROMPT, grammar=json_schema) == answer
    matched = client.text_generation(PROMPT, grammar={"type": "regex", "value": "[0-9]{3}"})
    assert len(matched) == 3 and matched.isdigit()


@pytest.mark.row("tgi", "watermark", "typical_p")
def test_invalid_parameter_is_rejected_by_name(client: InferenceClient, served: Served) -> None:
    for parameters, message in (
        ({"watermark": True}, "watermark"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"temperature": 0.0}, "temperature"),
        ({"best_of": 2}, "best_of"),
        ({"top_p": 1.5}, "top_p"),
    ):
        with pytest.raises(ValidationError, match=message):
            client.text_generation(PROMPT, **parameters)
    streamed = {"inputs": PROMPT, "stream": True, "parameters": {"decoder_input_details": True}}
    assert "decoder_input_details" in httpx.post(served.root, json=streamed).json()["error"]
    for body in ({"inputs": PROMPT, "parameters": {"top_n_tokens": 9}}, {"inputs": "x" * 5 * 4096}, {"inputs": 1}):
        answer = httpx.post(f"{served.root}/generate", json=body)
        assert answer.status_code == 422 and answer.json()["error_type"] == "validation"


@pytest.mark.row("tgi", "/generate", "/generate_stream")
@pytest.mark.row("tgi", "/info")
def test_generate_paths_and_info_are_served(client: InferenceClient, served: Served) -> None:
    body = {"inputs": PROMPT, "parameters": {"details": None}}
    text = client.text_generation(PROMPT)
    answer = httpx.post(f"{served.root}/generate", json=body)
    assert answer.json() == {"generated_text": text}, "details: null must return no details"
    for top_n in (0, 2):
        parameters = {"details": True, "top_n_tokens": top_n, "max_new_tokens": 2}
        request = {"inputs": PROMPT, "parameters": parameters if top_n else parameters | {"top_n_tokens": None}}
        details = httpx.post(f"{served.root}/generate", json=request).json()["details"]
        assert details.keys() - {"top_tokens"} == {"finish_reason", "generated_tokens", "seed", "prefill", "tokens"}
        events = httpx.post(f"{served.root}/generate_stream", json=request).text.split("\n\n")[:-1]
        first, last = (json.loads(event.removeprefix("data:")) for event in (events[0], events[-1]))
        assert (first["generated_text"], first["details"]) == (None, None)
        assert last["details"].keys() == {"finish_reason", "generated_tokens", "seed", "input_length"}
        assert ("top_tokens" in details) == ("top_tokens" in first) == (top_n > 0), (
            "top_tokens must be absent without top_n_tokens"
        )
    vllm_answer = httpx.post(
        f"{served.root}/generate", json={"prompt": PROMPT, "max_tokens": 60, "temperature": 0}
    ).json()
    assert vllm_answer == {"text": [PROMPT + text]}
    streamed = httpx.post(f"{served.root}/generate_stream", json=body)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    last = json.loads(streamed.text.strip().split("\n\n")[-1].removeprefix("data:"))
    assert last["generated_text"] == text
    info = httpx.get(f"{served.root}/info").json()
    assert info["max_total_tokens"] > 1000 and info["model_pipeline_tag"] == "text-generation"


@pytest.mark.slow
def test_post_to_root_path_requires_key() -> None:
    with Served("--api-key", "secret", "--num-gpu-blocks-override", "100") as server:
        assert httpx.get(server.root).status_code == 200
        assert httpx.post(server.root, json={"inputs": PROMPT}).status_code == 401
        with InferenceClient(base_url=server.root, api_key="secret") as client:
            assert "Ottawa" in client.text_generation(PROMPT)


@pytest.mark.row("tgi", "/v1/chat/completions")
def test_chat_completion_accepts_tgi_model_and_response_format(client: InferenceClient, served: Served) -> None:
    """The client sends a placeholder as the model name, and TGI's variant of ``response_format``."""
    question = [{"role": "user", "content": "What is the capital of Canada?"}]
    whole = client.chat_completion(question, temperature=0)
    assert "Ottawa" in (whole.choices[0].message.content or "") and whole.model == "penstock-demo"
    stream = client.chat_completion(question, model="tgi", temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole.choices[0].message.content

    def constrained(response_format: Any) -> str:
        answer = client.chat_completion(question, temperature=0, max_tokens=40, response_format=response_format)
        return answer.choices[0].message.content or ""

    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    schema |= {"additionalProperties": False}
    answer = constrained({"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}})
    assert list(json.loads(answer)) == ["n"] and constrained({"type": "json", "value": schema}) == answer
    assert constrained({"type": "regex", "value": "[0-9]{3}"}).isdigit()
    for wrong in ({"type": "json"}, {"type": "regex", "value": schema}, {"type": "text", "value": "[0-9]"}):
        with pytest.raises(BadRequestError, match=r"response_format\.value"):
            constrained(wrong)


@pytest.mark.row("tgi", "--model-id", "--revision", "--max-input-tokens", "--max-total-tokens")
@pytest.mark.row("tgi", "--max-batch-prefill-tokens", "--max-batch-total-tokens", "--cuda-memory-fraction")
@pytest.mark.row("tgi", "--max-batch-size", "--max-concurrent-requests", "--num-shard", "--quantize", "--dtype")
@pytest.mark.row("tgi", "--kv-cache-dtype", "--speculate", "--lora-adapters", "--cuda-graphs", "--hostname", "--port")
@pytest.mark.row("tgi", "--api-key", "--cors-allow-origin", "--payload-limit", "--json-output", "--otlp-endpoint")
@pytest.mark.row("tgi", "--disable-grammar-support", "--tokenizer-config-path", "--rope-scaling")
@pytest.mark.row("tgi", "--waiting-served-ratio", "--max-waiting-tokens", "--max-best-of", "--max-stop-sequences")
@pytest.mark.row("tgi", "--validation-workers", "--watermark-gamma", "--usage-stats")
def test_options_for_flags_of_the_launcher_exist() -> None:
    text = (ROOT / "docs/dialects/tgi.md").read_text(encoding="utf-8").partition("| launcher |")[2]
    cells = [line.split(" | ")[1] for line in text.splitlines() if line.startswith("| `--")]
    named = {flag for cell in cells for flag in re.findall(r"--[a-z][a-z-]+", cell)}
    assert len(named) > 20 and named <= {setting.flag for setting in settings().values()}
