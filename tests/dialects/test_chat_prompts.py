"""Prompts of chats: content parts, token ids, truncation and chat templates, tested with OpenAI's Python client."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving import Served, Servers, descendants
from transformers import AutoTokenizer

from penstock import demo
from penstock.config.options import ModelOptions
from penstock.core import PenstockError
from penstock.frontend.chat_renderer import Steps, run_inline
from penstock.frontend.input_processor import InputProcessor

QUESTION = [{"role": "user", "content": "What is the capital of Canada?"}]
ANSWER = "The capital of Canada is Ottawa."
TEMPLATE = """
{%- if documents %}<|im_start|>system
{% for document in documents %}{{ document.text }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
{% if reasoning_effort == "none" %}<think>

</think>

{% endif %}{# </think> #}"""


@pytest.fixture(scope="module")
def server(servers: Servers) -> Served:
    return servers.get("--num-gpu-blocks-override", "400")


@pytest.fixture(scope="module")
def trusting_server() -> Iterator[Served]:
    arguments = ("--num-gpu-blocks-override", "400", "--trust-request-chat-template", "--chat-template", TEMPLATE)
    with Served(*arguments) as served:
        yield served


def client_of(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)


def ask(server: Served, messages: Any = QUESTION, stream: bool = False, **extra: Any) -> dict[str, Any]:
    """Return the answer's text and the token ids of the prompt."""
    fields: dict[str, Any] = {"model": "default", "messages": messages, "temperature": 0, "max_tokens": 100}
    fields["extra_body"] = {"return_token_ids": True, **extra}
    if not stream:
        answer = client_of(server).chat.completions.create(**fields).to_dict()
        return {"text": answer["choices"][0]["message"]["content"], "ids": answer["prompt_token_ids"]}
    chunks = [chunk.to_dict() for chunk in client_of(server).chat.completions.create(**fields, stream=True)]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    return {"text": text, "ids": chunks[0]["prompt_token_ids"]}


both = pytest.mark.parametrize("stream", [False, True])


@both
def test_prompt_token_ids_replace_messages(server: Served, stream: bool) -> None:
    rendered = ask(server)
    assert rendered["text"] == ANSWER
    assert ask(server, [], stream, prompt_token_ids=rendered["ids"]) == rendered
    thinking = ask(server, chat_template_kwargs={"enable_thinking": True})
    assert ask(server, [], stream, prompt_token_ids=thinking["ids"]) == thinking
    for fields, message in (
        ({"messages": QUESTION, "prompt_token_ids": [5]}, "messages: cannot be combined with prompt_token_ids"),
        (
            {"messages": [], "prompt_token_ids": [5], "continue_final_message": True},
            "continue_final_message: cannot be combined",
        ),
        ({"messages": []}, "messages: must have at least one"),
        ({"messages": [], "prompt_token_ids": []}, "prompt_token_ids"),
        ({"messages": [], "prompt_token_ids": [10**6]}, "token ids go from 0"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            ask(server, stream=stream, **fields)


@both
def test_content_parts_are_joined_by_newlines(server: Served, stream: bool) -> None:
    parts = [{"type": "text", "text": "What is the capital"}, {"type": "text", "text": "of Canada?"}]
    joined = [{"role": "user", "content": "What is the capital\nof Canada?"}]
    assert ask(server, [{"role": "user", "content": parts}], stream) == ask(server, joined)
    for kind in ("image_url", "input_audio", "file"):
        with pytest.raises(openai.BadRequestError, match=rf"messages\[0\].content\[0\]: {kind} is not supported"):
            ask(server, [{"role": "user", "content": [{"type": kind, kind: {}}]}], stream)


def test_unknown_role_error_lists_known_roles(server: Served) -> None:
    with pytest.raises(
        openai.BadRequestError, match="'king' is not one of system, developer, user, assistant, tool"
    ) as refused:
        ask(server, [*QUESTION, {"role": "king", "content": "x"}])
    assert refused.value.param == "messages[1].role"


@both
def test_continue_final_message_extends_last_message(server: Served, stream: bool) -> None:
    prefill = {"role": "assistant", "content": "The capital of Canada"}
    answer = ask(server, [*QUESTION, prefill], stream, continue_final_message=True)
    assert prefill["content"] + answer["text"] == ANSWER
    with pytest.raises(openai.BadRequestError, match="continue_final_message"):
        ask(server, [*QUESTION, prefill], stream, continue_final_message=True, add_generation_prompt=True)
    bare = ask(server, add_generation_prompt=False)["ids"]
    assert ask(server)["ids"][: len(bare)] == bare


@both
def test_prompts_are_truncated_from_the_left(server: Served, stream: bool) -> None:
    whole = ask(server)["ids"]
    assert ask(server, stream=stream, truncate_prompt_tokens=7)["ids"] == whole[-7:]
    assert ask(server, stream=stream, truncate_prompt_tokens=1000)["ids"] == whole
    client = client_of(server)
    extra = {"truncate_prompt_tokens": 2, "return_token_ids": True}
    for prompt in ("one two three four", [5, 6, 7, 8]):
        answer = client.completions.create(model="default", prompt=prompt, echo=True, max_tokens=1, extra_body=extra)
        assert len(answer.choices[0].to_dict()["prompt_token_ids"]) == 2  # type: ignore[arg-type]
        assert answer.usage and answer.usage.prompt_tokens == 2


def test_documents_are_rejected_unless_template_reads_them(server: Served, trusting_server: Served) -> None:
    documents = [{"title": "a", "text": "The code is 1234."}]
    with pytest.raises(openai.BadRequestError, match="this model's chat template does not read it"):
        ask(server, documents=documents)
    assert ask(server, reasoning_effort="high")["ids"] == ask(server)["ids"]
    plain, none = ask(trusting_server)["ids"], ask(trusting_server, reasoning_effort="none")["ids"]
    assert none == ask(server)["ids"] and none[: len(plain)] == plain
    read = httpx.post(
        f"{trusting_server.root}/detokenize", json={"tokens": ask(trusting_server, documents=documents)["ids"]}
    )
    assert documents[0]["text"] in read.json()["prompt"]


# --- Templates of requests --------------------------------------------------------------------------------------------


def test_chat_template_of_request_is_rejected_by_default(server: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="trust_request_chat_template"):
        ask(server, chat_template=TEMPLATE)


@both
def test_chat_template_of_request_is_used_if_trusted(server: Served, trusting_server: Served, stream: bool) -> None:
    template = TEMPLATE.replace("{{ message.content }}", "{{ message.content | replace('Japan', 'Canada') }}")
    messages = [{"role": "user", "content": "What is the capital of Japan?"}]
    extra = {"chat_template": template, "reasoning_effort": "none"}
    assert ask(trusting_server, messages, stream, **extra) == ask(server)
    by_kwargs = ask(
        trusting_server, messages, stream, chat_template=template, chat_template_kwargs={"reasoning_effort": "none"}
    )
    assert by_kwargs["text"] == ANSWER


ENDLESS = "more than 2 seconds of processor time"
WRONG = {
    "{% for %}": "line 1",
    "{{ raise_exception('not so') }}": "not so",
    "{{ raise_exception('half a pair: \\ud800') }}": r"half a pair: .+ud800",
    "{{ ''.__class__.__mro__ }}": "cannot render",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": ENDLESS,
    "{{ 9 ** (9 ** 9) }}": ENDLESS,
    "{{ 'x' * 10 ** 12 }}": "or 1 GiB of memory",
    "{{ 'x' * 10 ** 8 }}": "the limit is 67108864|more than 2 seconds",
    "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}": "chat_template",
    "x" * 65_537: "chat_template",
}


@pytest.mark.slow
def test_ctrl_c_does_not_interrupt_template_rendering() -> None:
    """SIGINT arrives while the template renderer process starts. The server completes its requests before it exits."""
    with (
        Served("--trust-request-chat-template", "--num-gpu-blocks-override", "100") as server,
        ThreadPoolExecutor() as pool,
    ):
        answer = pool.submit(ask, server, chat_template=TEMPLATE, reasoning_effort="none")
        server.interrupt("penstock.text.template_process")
        assert answer.result(60)["text"] == ANSWER
        assert server.ended() == 0


@pytest.mark.slow
def test_malicious_templates_fail_without_delaying_others(trusting_server: Served) -> None:
    """Other requests are answered while the server stops a template with an endless loop."""
    answered_starts: list[float] = []
    """Times at which the answered probe requests were sent."""
    ended = threading.Event()

    def probe() -> None:
        while not ended.wait(0.2):
            begun = time.monotonic()
            assert ask(trusting_server, reasoning_effort="none")["text"] == ANSWER
            answered_starts.append(begun)

    probing = threading.Thread(target=probe)
    probing.start()
    try:
        for source, message in WRONG.items():
            begun = time.monotonic()
            with pytest.raises(openai.BadRequestError, match=message):
                ask(trusting_server, chat_template=source)
            assert message != ENDLESS or any(at > begun for at in [*answered_starts]), (
                "no probe was sent and answered while the template ran"
            )
            assert ask(trusting_server, chat_template=TEMPLATE, reasoning_effort="none")["text"] == ANSWER
    finally:
        ended.set()
        probing.join()
    assert len(descendants(trusting_server.pid)) <= 7, "engine, API, a grammar compiler, four template renderers"


# --- Templates by name ------------------------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
DEFAULT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
RAG_TEMPLATE = "{% for d in documents %}{{ d.text }}\n{% endfor %}" + DEFAULT_TEMPLATE


@pytest.fixture(scope="module", params=["tokenizer_config.json", "files"])
def several_templates(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model with three templates: ``default`` (without tools), ``tool_use`` (the original) and ``rag``."""
    folder = shutil.copytree(demo.CHAT, tmp_path_factory.mktemp("named") / "model")
    original = (folder / "chat_template.jinja").read_text()
    if request.param == "files":
        (folder / "chat_template.jinja").write_text(DEFAULT_TEMPLATE)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(original)
        (folder / "additional_chat_templates" / "rag.jinja").write_text(RAG_TEMPLATE)
    else:
        (folder / "chat_template.jinja").unlink()
        config = json.loads((folder / "tokenizer_config.json").read_text())
        templates = {"default": DEFAULT_TEMPLATE, "tool_use": original, "rag": RAG_TEMPLATE}
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
def test_template_for_tools_is_chosen_by_python(several_templates: Path) -> None:
    hf_tokenizer = AutoTokenizer.from_pretrained(several_templates)
    processor = InputProcessor(several_templates, ModelOptions())
    for tools in (None, TOOLS):
        expected = hf_tokenizer.apply_chat_template(QUESTION, tools=tools, add_generation_prompt=True, tokenize=False)
        assert processor.tokenizer.render(QUESTION, tools=tools) == expected
    assert processor.chats.response_formats().tools is not None
    by_name = InputProcessor(several_templates, ModelOptions(chat_template="rag"))
    documents = [{"text": "Ottawa."}]
    expected = hf_tokenizer.apply_chat_template(
        QUESTION, documents=documents, chat_template="rag", add_generation_prompt=True, tokenize=False
    )
    assert by_name.tokenizer.render(QUESTION, documents=documents) == expected
    with pytest.raises(PenstockError, match="tools: this model's chat template does not support tools"):
        run_inline(by_name.chats.text(QUESTION, {"tools": TOOLS}, Steps()))
    with pytest.raises(PenstockError, match="rage cannot be read"):
        InputProcessor(several_templates, ModelOptions(chat_template="rage"))


@pytest.mark.slow
@pytest.mark.parametrize("several_templates", ["files"], indirect=True)
def test_template_for_tools_is_chosen_over_http(several_templates: Path) -> None:
    hf_tokenizer = AutoTokenizer.from_pretrained(several_templates)

    def expected(**options: Any) -> list[int]:
        rendered = hf_tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False, **options)
        return hf_tokenizer.encode(rendered, add_special_tokens=False)

    with Served("--model", str(several_templates), "--num-gpu-blocks-override", "100") as server:
        assert ask(server)["ids"] == expected()
        assert ask(server, tools=TOOLS)["ids"] == expected(tools=TOOLS)
        documents = [{"text": "Ottawa."}]
        found = ask(server, documents=documents, chat_template="rag")["ids"]
        assert found == expected(documents=documents, chat_template="rag")
        with pytest.raises(openai.BadRequestError, match="does not read it"):
            ask(server, documents=documents)
        with pytest.raises(openai.BadRequestError, match="trust_request_chat_template"):
            ask(server, chat_template="another")
