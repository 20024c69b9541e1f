"""Ollama's API, tested with Ollama's Python client."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from gguf_files import write_gguf
from image_checkpoints import save_colours
from PIL import Image
from serving import Served, Servers

from penstock import demo

QUESTION, ANSWER = "What is the capital of Canada?", "Ottawa"
GREEDY = {"temperature": 0}
MODEL = "penstock-demo"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture
def client(servers: Servers) -> ollama.Client:
    return ollama.Client(servers.get().root)


@pytest.mark.row("ollama", "/api/chat")
@pytest.mark.row(
    "ollama", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty"
)
def test_chat_stream_equals_whole_answer(client: ollama.Client) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    whole = client.chat(MODEL, messages, options=GREEDY)
    assert ANSWER in (whole.message.content or "")
    assert (whole.done, whole.done_reason, whole.message.role) == (True, "stop", "assistant")
    assert whole.eval_count and whole.prompt_eval_count and whole.total_duration and whole.eval_duration
    chunks = list(client.chat(f"{MODEL}:latest", messages, options=GREEDY, stream=True))
    assert len(chunks) >= 2
    assert "".join(chunk.message.content or "" for chunk in chunks) == whole.message.content
    assert [chunk.done for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].eval_count == whole.eval_count
    sampling = {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "seed": 7, "stop": ["Ottawa"]}
    sampling |= {"presence_penalty": 0.1, "frequency_penalty": 0.1}
    first, again = (client.chat(MODEL, messages, options=sampling).message.content for _ in range(2))
    assert first == again and ANSWER not in (first or "")


def test_tool_is_called_and_its_result_read(client: ollama.Client) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris?"}]
    for stream in (False, True):
        answer = client.chat(MODEL, messages, tools=[WEATHER], options=GREEDY, stream=stream)  # type: ignore[call-overload]
        chunks = list(answer) if stream else [answer]
        (call,) = [call for chunk in chunks for call in chunk.message.tool_calls or ()]
        assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
    messages += [
        {"role": "assistant", "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}]},
        {"role": "tool", "tool_name": "get_weather", "content": '{"temperature": 21}'},
    ]
    assert "21" in (client.chat(MODEL, messages, tools=[WEATHER], options=GREEDY).message.content or "")


@pytest.mark.slow
def test_ids_of_tool_calls_reach_template(tmp_path: Path) -> None:
    """Open WebUI and the AI SDK's Ollama provider send ids of calls, and some templates require them."""
    template = tmp_path / "ids.jinja"
    template.write_text(
        "{% for message in messages %}{% for call in message.tool_calls or [] %}{{ call.id }}{% endfor %}"
        "{{ message.tool_call_id }}{{ message.content }}{% endfor %}"
    )
    question = {"role": "user", "content": "Weather?"}
    call = {"id": "call_1234", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    result = {"role": "tool", "tool_call_id": "call_1234", "content": "21"}
    with Served("--chat-template", str(template), "--num-gpu-blocks-override", "100") as served:
        tokens = []
        for sent_call, sent_result in (
            (call, result),
            (call | {"id": None}, result),
            (call, result | {"tool_call_id": None}),
        ):
            messages = [question, {"role": "assistant", "tool_calls": [sent_call]}, sent_result]
            body = {"model": MODEL, "messages": messages, "stream": False, "options": {"num_predict": 1}}
            answer = httpx.post(f"{served.root}/api/chat", json=body)
            assert answer.status_code == 200 and "x-penstock-ignored" not in answer.headers, answer.text
            tokens.append(answer.json()["prompt_eval_count"])
    assert tokens[0] > tokens[1] and tokens[0] > tokens[2]


@pytest.mark.row("ollama", "/api/generate")
@pytest.mark.row("ollama", "num_predict")
@pytest.mark.row("ollama", "num_ctx", "num_thread", "num_gpu", "num_batch", "num_keep", "main_gpu", "use_mmap")
@pytest.mark.row("ollama", "repeat_penalty")
def test_generate_options_take_effect(client: ollama.Client) -> None:
    whole = client.generate(MODEL, QUESTION, options=GREEDY)
    assert ANSWER in whole.response
    assert (
        "".join(chunk.response for chunk in client.generate(MODEL, QUESTION, options=GREEDY, stream=True))
        == whole.response
    )
    raw = client.generate(
        MODEL, "<|im_start|>user\n" + QUESTION + "<|im_end|>\n<|im_start|>assistant\n", raw=True, options=GREEDY
    )
    assert ANSWER in raw.response
    cut = client.generate(MODEL, QUESTION, options=GREEDY | {"num_predict": 2, "num_ctx": 4096})
    assert (cut.eval_count, cut.done_reason) == (2, "length")
    loading = {"num_thread": 1, "num_gpu": 0, "num_batch": 8, "num_keep": 4, "main_gpu": 0, "use_mmap": True}
    assert client.generate(MODEL, QUESTION, options=GREEDY | loading).response == whole.response
    varied = {"repeat_penalty": 1.5, "num_predict": 12}
    assert client.generate(MODEL, "a a a a a a a", options=GREEDY | varied, raw=True).response
    scored = client.generate(MODEL, QUESTION, options=GREEDY, logprobs=True, top_logprobs=2)
    assert scored.logprobs and len(scored.logprobs) == scored.eval_count
    assert all(len(token.top_logprobs or ()) == 2 and token.logprob <= 0 for token in scored.logprobs)


def test_format_constrains_answer(client: ollama.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}},
        "required": ["city"],
        "additionalProperties": False,
    }
    answer = client.generate(MODEL, QUESTION, format=schema, options=GREEDY | {"num_predict": 60})
    assert list(json.loads(answer.response)) == ["city"]
    options = GREEDY | {"num_predict": 80}
    assert (
        client.chat(MODEL, [{"role": "user", "content": QUESTION}], format="json", options=options).message.content[0]
        in "{"
    )  # type: ignore[index]


@pytest.mark.row("ollama", "/api/embed", "/api/embeddings")
def test_embeddings_are_computed(client: ollama.Client) -> None:
    both = client.embed(MODEL, ["one text", "another"])
    assert len(both.embeddings) == 2 and both.prompt_eval_count
    assert [*client.embeddings(MODEL, "another").embedding] == pytest.approx([*both.embeddings[1]])
    assert len(client.embed(MODEL, "one", dimensions=16).embeddings[0]) == 16
    assert not client.embed(MODEL, []).embeddings


@pytest.mark.row("ollama", "/api/tags", "/api/ps", "/api/show")
@pytest.mark.row("ollama", "/api/version")
@pytest.mark.row("ollama", "/api/pull")
def test_models_are_listed_and_shown(client: ollama.Client) -> None:
    (listed,) = client.list().models
    assert listed.model == MODEL and listed.size and listed.digest and listed.details
    assert [running.model for running in client.ps().models] == [MODEL]
    shown = client.show(MODEL)
    assert {"completion", "tools"} <= set(shown.capabilities or ())
    assert shown.modelinfo and shown.details
    family = shown.details.family
    assert shown.modelinfo[f"{family}.context_length"] > 1000
    assert httpx.get(f"{client._client.base_url}/api/version").json() == {"version": "0.12.6"}
    assert client.pull(MODEL).status == "success"
    assert client.generate(MODEL, "").done_reason == "load"


@pytest.mark.slow
def test_gguf_file_is_listed_with_its_size_and_type(tmp_path: Path) -> None:
    file = tmp_path / "demo.gguf"
    write_gguf(demo.CHAT, file, lambda name: "Q4_1" if name.startswith("blk") else "Q8_0")
    with Served("--model", str(file), "--served-model-name", "demo", "--num-gpu-blocks-override", "100") as served:
        (listed,) = ollama.Client(served.root).list().models
    assert listed.size == file.stat().st_size and listed.details
    assert (listed.details.format, listed.details.quantization_level) == ("gguf", "Q4_1")


@pytest.mark.row("ollama", "mirostat", "tfs_z", "typical_p")
def test_invalid_options_are_rejected_by_name(client: ollama.Client, servers: Servers) -> None:
    with pytest.raises(ollama.ResponseError, match="does not exist") as missing:
        client.chat("llama3.2", [{"role": "user", "content": "?"}])
    assert missing.value.status_code == 404
    for options, message in (
        ({"temperature": -1}, "temperature"),
        ({"mirostat": 2}, "mirostat"),
        ({"tfs_z": 0.5}, "tfs_z"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"num_predict": "x"}, "num_predict"),
    ):
        with pytest.raises(ollama.ResponseError, match=message):
            client.generate(MODEL, QUESTION, options=options)
    for call in (
        lambda: client.create("mine", from_=MODEL),
        lambda: client.delete(MODEL),
        lambda: client.copy(MODEL, "other"),
    ):
        with pytest.raises(ollama.ResponseError, match="set when the server starts"):
            call()
    answer = httpx.post(
        f"{servers.get().root}/api/chat", json={"model": MODEL, "messages": [], "unknown": 1, "options": {"tmp": 1}}
    )
    assert answer.headers["x-penstock-ignored"] == "unknown"


@pytest.mark.slow
def test_images_reach_vision_model(tmp_path: Path) -> None:
    save_colours(tmp_path)
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), "green").save(buffer, "PNG")
    with Served("--model", str(tmp_path), "--num-gpu-blocks-override", "100") as server:
        client = ollama.Client(server.root)
        name = client.list().models[0].model
        assert name and "vision" in (client.show(name).capabilities or ())
        message = {"role": "user", "content": "Which colour?", "images": [base64.b64encode(buffer.getvalue()).decode()]}
        assert "green" in (client.chat(name, [message], options=GREEDY).message.content or "")
        assert "green" in client.generate(name, "Which colour?", images=[buffer.getvalue()], options=GREEDY).response
