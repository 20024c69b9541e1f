"""The text layer (tokenizer, detokenizer, stop strings, chat templates), compared with transformers and tokenizers."""

from __future__ import annotations

import copy
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from penstock import demo
from penstock.core import PenstockError
from penstock.text import ChatTemplate, Detokenizer, StopStrings, Tokenizer
from penstock.text.vocabulary import token_bytes

SAMPLE = "the river runs to the sea 河流入海 über façade 🙂🙃 naïve\n\n  two  spaces"


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return Tokenizer(demo.CHAT)


@given(ids=st.lists(st.integers(0, 3583), max_size=40), cuts=st.lists(st.integers(0, 40)), skip=st.booleans())
@example(ids=[], cuts=[], skip=True)
def test_incremental_decoding_equals_decoding_at_once(
    ours: Tokenizer, tokenizer: PreTrainedTokenizerFast, ids: list[int], cuts: list[int], skip: bool
) -> None:
    """Any ids may be split anywhere: all parts have whole characters, and their concatenation is the library's text."""
    detokenizer, start = ours.detokenizer(skip), 0
    parts = []
    for cut in sorted(cuts):
        parts.append(detokenizer.add(ids[start:cut]))
        start = max(start, cut)
    parts.append(detokenizer.add(ids[start:], last=True))
    assert "".join(parts) == ours.decode(ids, skip) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=60))
def test_any_text_round_trips(ours: Tokenizer, tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert ours.encode(text) == tokenizer.encode(text)
    assert ours.decode(ours.encode(text), skip_special_tokens=False) == text


def sentencepiece_like() -> tokenizers.Tokenizer:
    """BPE as converted from SentencePiece: a marker for spaces, and byte fallback tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([SAMPLE[:30]], trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def test_sentencepiece_byte_fallback_tokens_decode_to_bytes() -> None:
    tokenizer = sentencepiece_like()
    spellings = token_bytes(tokenizer)
    ids = tokenizer.encode(SAMPLE, add_special_tokens=False).ids
    assert b"".join(spellings[i] for i in ids).decode() == SAMPLE == tokenizer.decode(ids)
    assert any(tokenizer.id_to_token(i).startswith("<0x") for i in ids)


DECODERS: dict[str, Any] = {
    "ByteLevel": decoders.ByteLevel(),
    "Metaspace": decoders.Metaspace(),
    "Metaspace, no prefix": decoders.Metaspace(prepend_scheme="never"),
    "Llama": decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "Gemma": decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "replaced text": decoders.Sequence([decoders.Replace("ab", "c"), decoders.Fuse(), decoders.Replace("b", "x")]),
    "stripped tokens": decoders.Sequence([decoders.Strip("a", 2, 0), decoders.Fuse()]),
    "WordPiece": decoders.WordPiece(cleanup=False),
    "none": None,
    "BPEDecoder": decoders.BPEDecoder(),
    "CTC": decoders.CTC(),
    "replaced pattern": decoders.Replace(tokenizers.Regex(" +"), " "),
    "replaced across tokens": decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]),
}
REFUSED = ("BPEDecoder", "CTC", "replaced pattern", "replaced across tokens")
TOKEN = st.text(st.sampled_from("ab\u2581 Ġéß#<>0x41_河\n"), min_size=1, max_size=6) | st.sampled_from(
    ["\u2581\u2581", "\u2581" * 4, "<0x41>", "##ab", "</w>", "<\u2581mask>", "Ġ", "\n\n"]
)


@pytest.mark.parametrize("name", [name for name in DECODERS if name not in REFUSED])
@given(data=st.data())
@settings(deadline=None)
def test_tokens_decode_as_in_tokenizers_library(name: str, data: st.DataObject) -> None:
    """Model tokens and added tokens with any flags are decoded at once and one by one."""
    plain = ["w", *data.draw(st.lists(TOKEN, min_size=1, max_size=6, unique=True))]
    added = data.draw(st.lists(TOKEN, max_size=6, unique=True))
    tokenizer = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(plain)}, []))
    flag = st.booleans()
    for content in added:
        token = tokenizers.AddedToken(content, normalized=data.draw(flag), lstrip=data.draw(flag))
        (tokenizer.add_special_tokens if data.draw(flag) else tokenizer.add_tokens)([token])
    if DECODERS[name]:
        tokenizer.decoder = DECODERS[name]
    ids = [
        0,
        *data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=8)),
    ]  # the ids begin with a plain word
    skip = data.draw(flag)
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special and skip}
    detokenizer = Detokenizer(token_bytes(tokenizer), special)
    parts = [detokenizer.add([token_id]) for token_id in ids] + [detokenizer.add([], last=True)]
    assert "".join(parts) == Detokenizer(token_bytes(tokenizer), special).add(ids, last=True)
    assert "".join(parts).removeprefix(" ") == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_decoder_is_refused_by_name(name: str) -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.decoder = DECODERS[name]
    with pytest.raises(PenstockError, match=r"the tokenizer's decoder (BPEDecoder|CTC|Replace) is not supported"):
        token_bytes(tokenizer)


STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)


@given(text=st.text("abcd", max_size=20), stops=STOPS, include=st.booleans(), cuts=st.lists(st.integers(0, 20)))
@example(text="abcd", stops=["abcd", "bc"], include=False, cuts=[1, 2, 3])
def test_stop_strings_do_not_depend_on_chunk_boundaries(
    text: str, stops: list[str], include: bool, cuts: list[int]
) -> None:
    def run(chunks: list[str]) -> tuple[str, str | None]:
        output, search = "", StopStrings(stops, include)
        for i, chunk in enumerate(chunks):
            found = search.add(chunk, last=i == len(chunks) - 1)
            output += found.text
            if found.stop is not None:
                return output, found.stop
            assert not any(stop in output for stop in stops)
        return output, None

    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    whole = run([text])
    assert run([text[a:b] for a, b in itertools.pairwise(edges)]) == whole
    assert (whole[1] is None) == (not any(stop in text for stop in stops))


MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Your name is Ada. <b>&</b> 'quoted'"},
    {"role": "user", "content": "天气怎么样？"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "北京"}}}],
    },
    {"role": "tool", "content": '{"sky": "晴天"}'},
    {"role": "assistant", "content": "北京是晴天。"},
    {"role": "user", "content": "Thank you."},
]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("options", [{}, {"enable_thinking": True}, {"add_generation_prompt": False}])
def test_template_renders_as_transformers_does(
    ours: Tokenizer, tokenizer: PreTrainedTokenizerFast, tools: Any, options: dict[str, Any]
) -> None:
    expected = tokenizer.apply_chat_template(
        MESSAGES, tools=tools, tokenize=False, **{"add_generation_prompt": True} | options
    )
    assert ours.render(MESSAGES, tools=tools, **options) == expected


def test_final_message_can_be_continued(ours: Tokenizer, tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "You are"}]
    expected = tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert ours.render(messages, add_generation_prompt=False, continue_final_message=True) == expected
    for begun in ("<", "end", "|", "n"):  # these also occur in the end-of-turn token
        continued = ours.render(
            [*messages[:-1], {"role": "assistant", "content": begun}],
            add_generation_prompt=False,
            continue_final_message=True,
        )
        assert continued.endswith(f"\n{begun}")


UNCHANGED = "{% for message in messages %}<{{ message.role }}>\n{{ message.content }}<end>\n{% endfor %}"
CONTINUED = {
    "keeps": UNCHANGED,
    "trims": UNCHANGED.replace("message.content", "message.content | trim"),
    "strips": UNCHANGED.replace("message.content", "message.content.strip('\\n')"),
    "parts": UNCHANGED.replace(
        "{{ message.content }}",
        "{% if message.content is string %}{{ message.content }}{% else %}"
        "{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}",
    ),
    "demo": "",
}


@pytest.mark.parametrize("template", CONTINUED)
@pytest.mark.parametrize("content", ["You are", " You are ", "You are\n", "\n\n  You", "def f():\n    ", " ", "", "."])
def test_continued_message_keeps_whitespace_as_transformers_does(
    tokenizer: PreTrainedTokenizerFast, template: str, content: str
) -> None:
    source = CONTINUED[template] or tokenizer.chat_template
    contents: list[Any] = [content]
    if template == "parts":
        contents.append([{"type": "text", "text": "So. "}, {"type": "text", "text": content}])
    for begun in contents:
        messages = [*MESSAGES, {"role": "assistant", "content": begun}]
        expected = tokenizer.apply_chat_template(
            copy.deepcopy(messages), chat_template=source, tokenize=False, continue_final_message=True
        )
        rendered = ChatTemplate(source).render(messages, add_generation_prompt=False, continue_final_message=True)
        assert rendered == expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.missing.deeper }}", "cannot render"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "cannot render"),
        ("{% for x in range(10 ** 9) %}{% endfor %}", "cannot render"),
        ("{{ messages.append(1) }}", "cannot render"),
    ],
)
def test_template_failure_is_error_of_messages_field(source: str, message: str) -> None:
    with pytest.raises(PenstockError, match=message) as refused:
        ChatTemplate(source).render(MESSAGES)
    assert refused.value.failure.field == "messages"


def test_template_syntax_error_names_line() -> None:
    with pytest.raises(PenstockError, match="line 2"):
        ChatTemplate("{% if x %}\n{% endfor %}")


def test_template_can_use_tool_arguments_as_object_or_text() -> None:
    """Some chat templates use an object (Hermes), others JSON text (DeepSeek)."""
    arguments = {"city": "北京"}
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    source = "{% set a = messages[0].tool_calls[0].function.arguments %}{{ a is mapping }} {{ a.city }} "
    source += "{{ a | tojson }} {{ '(' + a + ')' }} {{ '' ~ a }} {{ a }}"
    text = json.dumps(arguments, ensure_ascii=False)
    rendered = ChatTemplate(source).render([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert rendered == f"True 北京 {text} ({text}) {text} {text}"


def test_generation_blocks_tojson_and_break_are_supported() -> None:
    source = "{% for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}{% break %}{% endfor %}"
    assert ChatTemplate(source).render(MESSAGES) == json.dumps(MESSAGES[0], ensure_ascii=False)


def test_missing_or_broken_tokenizer_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(PenstockError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(PenstockError, match="cannot be read"):
        Tokenizer(tmp_path)


def test_text_and_scheduler_import_no_torch() -> None:
    code = (
        "import penstock.text, penstock.core, penstock.engine.scheduling.scheduler, sys; print('torch' in sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert printed.stdout == "False\n"
