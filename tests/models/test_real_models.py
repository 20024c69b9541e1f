"""Real models in float32, compared with transformers and sentence-transformers (``make thorough``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import real_models
import torch
from real_models import Converted
from serving import Served
from speech_checkpoints import RATE, wav
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from penstock import LLM, SamplingParams
from penstock.frontend.outputs import RequestOutput

pytestmark = [pytest.mark.thorough]

MODELS: dict[str, Callable[[], Converted]] = {"smollm2": real_models.smollm2, "gemma3": real_models.gemma3}
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 40, "max_model_len": 512}
PARAMS = SamplingParams(temperature=0, max_tokens=40, logprobs=5, prompt_logprobs=5, ignore_eos=True)
PROMPTS = [
    "The capital of Canada is",
    "def fibonacci(n):\n    ",
    "Die Donau entspringt im Schwarzwald und mündet ins Schwarze Meer. " * 8,
    "水 means water, 火 means",
]
LIMIT = 1e-4
"""Maximum difference between log probabilities of Penstock and transformers."""
SENTENCES = ["A dog runs in the park.", "A puppy is running outside.", "The stock market fell.", "dogs " * 300, "x"]


def check(outputs: list[RequestOutput], library: PreTrainedModel, limit: float) -> None:
    """Compare log probabilities with transformers', and greedy tokens with its likeliest tokens, except ties.

    Args:
        limit: maximum difference of a log probability.
    """
    largest = 0.0
    for output in outputs:
        prompt, generated = output.prompt_token_ids, output.outputs[0].token_ids
        assert len(generated) == 40
        with torch.inference_mode():
            table = library(torch.tensor([prompt + generated])).logits[0].log_softmax(-1)
        chosen = table[len(prompt) - 1 : -1]
        found = chosen.gather(1, torch.tensor(generated)[:, None])[:, 0]
        assert (chosen.max(1).values - found).max() <= limit
        reported = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
        assert len(reported) == len(table) - 1
        for row, position in zip(table, reported, strict=False):
            for token_id, score in (position or {}).items():
                largest = max(largest, abs(score.logprob - row[token_id].item()))
    print(f"largest difference of log probabilities: {largest:.1e}")
    assert largest <= limit


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_and_logprobs_match_transformers(name: str) -> None:
    folder = MODELS[name]().checkpoint
    outputs = LLM(folder, **OPTIONS).generate(PROMPTS, PARAMS, use_tqdm=False)
    library = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert [output.prompt_token_ids for output in outputs] == [tokenizer(prompt).input_ids for prompt in PROMPTS]
    check(outputs, library, LIMIT)


@pytest.mark.parametrize("name", MODELS)
def test_gguf_file_matches_its_conversion_by_transformers(name: str) -> None:
    model = MODELS[name]()
    llm = LLM(model.gguf, **OPTIONS)
    tokenizer = AutoTokenizer.from_pretrained(model.checkpoint)
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [tokenizer(prompt).input_ids for prompt in PROMPTS]
    check(outputs, AutoModelForCausalLM.from_pretrained(model.checkpoint, dtype=torch.float32).eval(), LIMIT)
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        answer = llm.chat(messages, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)[0]
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert answer.prompt_token_ids == expected
        assert "Paris" in answer.outputs[0].text


def test_embeddings_match_sentence_transformers() -> None:
    from sentence_transformers import SentenceTransformer

    folder = real_models.minilm()
    expected = SentenceTransformer(str(folder), device="cpu").encode(SENTENCES)
    outputs = LLM(folder, dtype="float32").embed(SENTENCES, use_tqdm=False, truncate_prompt_tokens=-1)
    for output, vector in zip(outputs, expected, strict=True):
        assert output.outputs.embedding == pytest.approx(vector.tolist(), abs=2e-5)
    vectors = np.array([output.outputs.embedding for output in outputs])
    assert (
        vectors[0] @ vectors[1] > 0.4 > 0.2 > vectors[0] @ vectors[2]
    )  # the first two texts are similar, the third is unrelated


def test_transcription_matches_transformers() -> None:
    folder = real_models.whisper()
    texts = ["The capital of Canada is Ottawa.", "Please open the window, it is warm in here."]
    recordings = [real_models.speech(text, RATE) for text in texts]
    expected = transcriptions(folder, recordings)
    with Served("--model", str(folder), "--dtype", "float32", "--num-gpu-blocks-override", "100") as server:
        client = openai.OpenAI(base_url=server.url, api_key="-")
        for samples, text in zip(recordings, expected, strict=True):
            answer = client.audio.transcriptions.create(
                file=("speech.wav", wav(samples)), model="default", temperature=0
            )
            assert answer.text == text
    print(expected)
    assert "window" in expected[1]


def transcriptions(folder: Path, recordings: list[np.ndarray]) -> list[str]:
    """Greedy transcriptions by transformers, of samples rounded as in a WAV file."""
    library = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer, extractor = AutoTokenizer.from_pretrained(folder), WhisperFeatureExtractor.from_pretrained(folder)
    texts = []
    for samples in recordings:
        rounded = (samples * 32_768).astype(np.int16).astype(np.float32) / 32_768
        features = extractor(rounded, sampling_rate=RATE, return_tensors="pt").input_features
        with torch.inference_mode():
            tokens = library.generate(features, return_timestamps=False)[0]
        texts.append(tokenizer.decode(tokens, skip_special_tokens=True).strip())
    return texts
