"""Scoring, reranking, classification and pooling over HTTP (vLLM, Cohere, Jina), against ``LLM`` and transformers."""

from __future__ import annotations

import base64
import json
from array import array
from pathlib import Path
from random import Random
from typing import Any

import cohere
import httpx
import numpy as np
import openai
import pytest
import torch
from checkpoints import SMALL, save
from encoder_checkpoints import SIZES, WORDS, draw_config, draw_text, save_encoder
from repository import ROOT
from sentence_transformers.util.quantization import quantize_embeddings
from serving import Served, Servers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BertConfig, LlamaConfig, Qwen3Config

from penstock import LLM, PenstockError
from penstock.text import ChatTemplate

QUERY = "when is the bridge"
OPTIONS: dict[str, Any] = {"block_size": 16, "weight_cache_dir": "none"}
DOCUMENTS = [draw_text(Random(words), words) for words in (3, 40, 9, 17, 80)]


def post(server: Served, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(server.root + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of a random cross-encoder."""
    folder = tmp_path_factory.mktemp("cross")
    save_encoder(draw_config("bert", Random(3)), folder, labels=1)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, servers: Servers) -> Served:
    return servers.get("--model", str(folder), "--served-model-name", "ranker", "--task", "score", "--dtype", "float32")


@pytest.fixture(scope="module")
def scores(folder: Path) -> list[float]:
    outputs = LLM(folder, dtype="float32", **OPTIONS).score(QUERY, DOCUMENTS, use_tqdm=False)
    return [output.outputs.score for output in outputs]


@pytest.mark.row("vllm", "POST /rerank", "/v1/rerank", "/v2/rerank")
@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank_sorts_documents_by_score(server: Served, scores: list[float], path: str) -> None:
    answer = post(server, path, model="ranker", query=QUERY, documents=DOCUMENTS)
    assert [result["relevance_score"] for result in answer["results"]] == sorted(scores, reverse=True)
    for result in answer["results"]:
        assert result["relevance_score"] == scores[result["index"]]
        assert result["document"] == {"text": DOCUMENTS[result["index"]]}
    objects = [{"text": text} for text in DOCUMENTS]
    short = post(server, path, query=QUERY, documents=objects, top_n=2, return_documents=False)
    assert [result.items() for result in short["results"]] == [
        {key: result[key] for key in ("index", "relevance_score")}.items() for result in answer["results"][:2]
    ]
    assert short["usage"] == answer["usage"]


@pytest.mark.row("vllm", "use_activation")
def test_score_equals_llm_score(server: Served, scores: list[float]) -> None:
    for path in ("/score", "/v1/score"):
        for names in (("text_1", "text_2"), ("queries", "documents")):
            answer = post(server, path, **dict(zip(names, (QUERY, DOCUMENTS), strict=True)))
            assert [entry["score"] for entry in answer["data"]] == scores
    raw = post(server, "/score", text_1=QUERY, text_2=DOCUMENTS, use_activation=False)
    found = torch.tensor([entry["score"] for entry in raw["data"]]).sigmoid().tolist()
    assert found == pytest.approx(scores, abs=1e-6)
    cut = post(server, "/rerank", query=QUERY, documents=[DOCUMENTS[1]], max_tokens_per_doc=5)
    words = DOCUMENTS[1].split()[:5]
    whole = post(server, "/rerank", query=QUERY, documents=[" ".join(words)])
    assert cut["results"][0]["relevance_score"] == whole["results"][0]["relevance_score"]
    assert cut["usage"] == whole["usage"]


@pytest.mark.row("vllm", "/classify", "/pooling")
def test_classify_and_pooling_equal_llm_classify(server: Served, folder: Path) -> None:
    answer = post(server, "/classify", input=DOCUMENTS)
    outputs = LLM(folder, dtype="float32", **OPTIONS).classify(DOCUMENTS, use_tqdm=False)
    assert [entry["probs"] for entry in answer["data"]] == [output.outputs.probs for output in outputs]
    assert {(entry["label"], entry["num_classes"]) for entry in answer["data"]} == {("LABEL_0", 1)}
    pooled = post(server, "/pooling", input=DOCUMENTS)
    assert [entry["data"] for entry in pooled["data"]] == [entry["probs"] for entry in answer["data"]]
    coded = post(server, "/pooling", input=DOCUMENTS, encoding_format="base64", task="classify")
    for entry, plain in zip(coded["data"], pooled["data"], strict=True):
        assert array("f", base64.b64decode(entry["data"])).tolist() == plain["data"]
    tokens = post(server, "/pooling", input=[[5, 6, 7]], task="token_classify")["data"][0]["data"]
    assert [len(vector) for vector in tokens] == [1, 1, 1]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/embeddings", {"input": "river"}, "does not support embeddings"),
        ("/v1/completions", {"prompt": "river"}, "no language model head"),
        ("/rerank", {"query": "river", "documents": []}, "documents"),
        ("/rerank", {"query": "river", "documents": ["a " * 400]}, "documents"),
        ("/rerank", {"documents": ["river"]}, "query"),
        ("/classify", {"input": []}, "input"),
        ("/pooling", {"input": "river", "task": "plugin"}, "task"),
    ],
)
def test_unsupported_request_is_rejected_by_name(server: Served, path: str, body: Any, message: str) -> None:
    answer = httpx.post(server.root + path, json=body, timeout=60)
    assert answer.status_code in (400, 422, 501), answer.text
    assert message in answer.text


PROMPTS = {"query": "where is the ", "document": "the "}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    save_encoder(BertConfig(**SIZES, max_position_embeddings=128), folder)
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS}))
    return folder


@pytest.fixture(scope="module")
def embedder(encoder: Path, servers: Servers) -> Served:
    config = '{"pooling_type": "MEAN", "normalize": false}'
    return servers.get("--model", str(encoder), "--runner", "pooling", "--pooler-config", config, "--dtype", "float32")


def vectors(encoder: Path, texts: list[str]) -> list[list[float]]:
    llm = LLM(encoder, dtype="float32", pooling_type="mean", pooling_activation="off", **OPTIONS)
    return [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]


def test_openai_client_embeds_with_encoder(encoder: Path, embedder: Served) -> None:
    expected = vectors(encoder, DOCUMENTS)
    with openai.OpenAI(base_url=embedder.url, api_key="none", max_retries=0, timeout=60) as client:
        answer = client.embeddings.create(model="default", input=DOCUMENTS)
        assert [entry.embedding for entry in answer.data] == expected
        with pytest.raises(openai.BadRequestError, match="context length is 128"):
            client.embeddings.create(model="default", input="a " * 400)
        extra = {"truncate_prompt_tokens": -1}
        assert client.embeddings.create(model="default", input="a " * 400, extra_body=extra).usage.prompt_tokens == 128
    near = post(embedder, "/rerank", query=DOCUMENTS[1], documents=DOCUMENTS)["results"]
    assert near[0]["index"] == 1
    assert near[0]["relevance_score"] == pytest.approx(1, abs=1e-6)


@pytest.mark.slow
def test_cohere_embeddings_have_each_type(encoder: Path, embedder: Served) -> None:
    """Float embeddings equal ``LLM.embed``. Integer and binary embeddings are quantized as by sentence-transformers."""
    prompted = [PROMPTS["query"] + text for text in DOCUMENTS], [PROMPTS["document"] + text for text in DOCUMENTS]
    queries, documents, plain = (vectors(encoder, texts) for texts in (*prompted, DOCUMENTS))
    client = cohere.ClientV2("none", base_url=embedder.root)
    types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    answer = client.embed(model="default", input_type="search_query", texts=DOCUMENTS, embedding_types=types)
    found = answer.embeddings
    assert (found.float_, answer.texts) == (queries, DOCUMENTS)
    assert [array("f", base64.b64decode(text)).tolist() for text in found.base64 or ()] == queries
    for name, bits in (("binary", found.binary), ("ubinary", found.ubinary)):
        assert bits == quantize_embeddings(np.array(queries), precision=name).tolist()  # type: ignore[arg-type]
    for integers, shift in ((found.int8, 0), (found.uint8, 128)):
        for quantized, vector in zip(np.array(integers) - shift, np.array(queries), strict=True):
            assert abs(quantized).max() == 127
            assert quantized @ vector / np.linalg.norm(quantized) / np.linalg.norm(vector) == pytest.approx(1, abs=1e-3)
    answer = client.embed(model="default", input_type="search_document", texts=DOCUMENTS, output_dimension=16)
    assert answer.embeddings.float_ == [vector[:16] for vector in documents] and answer.embeddings.int8 is None
    parts = [{"content": [{"type": "text", "text": text}]} for text in DOCUMENTS]
    assert client.embed(model="default", input_type="clustering", inputs=parts).embeddings.float_ == plain  # type: ignore[arg-type]
    old = cohere.Client("none", base_url=embedder.root)
    assert old.embed(model="default", texts=DOCUMENTS).embeddings == plain
    assert old.embed(model="default", texts=DOCUMENTS, embedding_types=["float"]).embeddings.float_ == plain  # type: ignore[union-attr]


def test_cohere_embed_truncates_long_texts(encoder: Path, embedder: Served) -> None:
    client = cohere.ClientV2("none", base_url=embedder.root)
    words = WORDS * 20
    start, end = vectors(encoder, [" ".join(words[-126:]), " ".join(words[:126])])
    (text,) = vectors(encoder, [" ".join(words[:5])])

    def embed(**options: Any) -> list[list[float]] | None:
        answer = client.embed(model="default", input_type="clustering", texts=[" ".join(words)], **options)
        return answer.embeddings.float_

    assert embed() == embed(truncate="END") == [end]
    assert embed(truncate="START") == [start]
    assert embed(max_tokens=7) == [text]
    answer = httpx.post(f"{embedder.root}/v2/embed", json={"model": "default", "texts": [" ".join(words), "river"]})
    assert int(answer.headers["x-penstock-truncated"]) == len(words) - 126
    with pytest.raises(cohere.BadRequestError, match=r"the context has 128 \(max_model_len\)"):
        embed(truncate="NONE")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"images": ["data:image/png;base64,AA"]}, "images: this endpoint embeds text only"),
        (
            {"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "this endpoint embeds text only",
        ),
        ({}, "texts: give either texts or inputs"),
        ({"texts": ["river"], "max_tokens": 5, "truncate": "NONE"}, "max_tokens: requires truncate"),
        ({"texts": ["river"], "embedding_types": ["int4"]}, "embedding_types"),
    ],
)
def test_unsupported_cohere_embed_request_is_rejected(embedder: Served, fields: Any, message: str) -> None:
    answer = httpx.post(embedder.root + "/v2/embed", json=fields | {"input_type": "clustering"}, timeout=60)
    assert answer.status_code in (400, 422, 501), answer.text
    assert message in answer.json()["message"]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_decoder_classifies_by_last_token(family: str, tmp_path: Path) -> None:
    configs = {"qwen3": Qwen3Config(**SMALL, head_dim=32, sliding_window=None), "llama": LlamaConfig(**SMALL)}
    config = configs[family]
    save(config, tmp_path)
    config.num_labels, config.pad_token_id = 3, None
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    model.save_pretrained(tmp_path)
    llm = LLM(tmp_path, dtype="float32", max_num_batched_tokens=50, **OPTIONS)
    prompts = [[5 + number % 290 for number in range(length)] for length in (1, 30, 200)]
    for _ in range(2):  # the second pass reads the prefixes from the cache
        for output, prompt in zip(llm.classify(prompts, use_tqdm=False), prompts, strict=True):
            with torch.inference_mode():
                expected = model(torch.tensor([prompt])).logits[0].softmax(0)
            assert output.outputs.probs == pytest.approx(expected.tolist(), abs=2e-5)
    rewards = llm.reward(prompts[1], use_tqdm=False)[0].outputs.data
    assert len(rewards) == 30
    assert rewards[-1].tolist() == pytest.approx(llm.classify(prompts[1], use_tqdm=False)[0].outputs.probs, abs=1e-6)


def test_qwen3_reranker_template_equals_original() -> None:
    source = ROOT / "examples" / "score_templates" / "qwen3_reranker.jinja"
    messages = [{"role": "query", "content": "a?"}, {"role": "document", "content": "b."}]
    text = ChatTemplate(source.read_text(), {}).render(messages)
    assert text.startswith("<|im_start|>system\nJudge whether the Document meets the requirements")
    assert "<|im_end|>\n<|im_start|>user\n<Instruct>: Given a web search query, retrieve" in text
    assert text.endswith("\n<Query>: a?\n<Document>: b.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.slow
def test_yes_no_reranker_scores_pairs(tmp_path: Path) -> None:
    """The score is the probability of the token "yes" relative to "No" after the prompt, as in Qwen3-Reranker."""
    save(Qwen3Config(**SMALL | {"vocab_size": 4096}, head_dim=32, sliding_window=None), tmp_path)
    template = "<q>{{ messages[0].content }}</q><d>{{ messages[1].content }}</d>"
    tokens = ("No", "yes")  # both are single tokens of the vocabulary
    llm = LLM(
        tmp_path, dtype="float32", pooling_task="score", classifier_tokens=tokens, chat_template=template, **OPTIONS
    )
    no, yes = (llm.get_tokenizer().convert_tokens_to_ids(token) for token in tokens)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for output, document in zip(llm.score(QUERY, WORDS[:4], use_tqdm=False), WORDS, strict=False):
        assert output.prompt_token_ids == llm.get_tokenizer().encode(f"<q>{QUERY}</q><d>{document}</d>")
        with torch.inference_mode():
            logits = model(torch.tensor([output.prompt_token_ids])).logits[0, -1, [no, yes]]
        assert output.outputs.score == pytest.approx(logits.softmax(0)[1].item(), abs=2e-5)
    assert llm.embed(QUERY, use_tqdm=False)
    with pytest.raises(PenstockError, match="not a token of this model"):
        LLM(tmp_path, pooling_task="score", classifier_tokens=("No", "certainly not"), **OPTIONS).score("a", "b")
