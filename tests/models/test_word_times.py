"""Word timestamps of Whisper: times of tokens, and division of tokens into words, compared with transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
from serving import Served
from speech_checkpoints import RATE, save_random, sound, wav
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor, WhisperForConditionalGeneration
from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

from penstock.config.options import EngineOptions, ModelOptions
from penstock.core import EngineRequest, PenstockError, PoolingParams, SamplingParams
from penstock.core.audio import Alignment, AudioInput, DecodingRules
from penstock.engine.engine import Engine
from penstock.frontend.input_processor import InputProcessor
from penstock.frontend.speech.words import split_words
from penstock.models.whisper_alignment import token_times

OPTIONS = {"threads": 1, "block_size": 16, "num_gpu_blocks_override": 100, "weight_cache_dir": "none"}
TOKEN_TIMES = PoolingParams(pooling_type="last", normalize=False)
STEP = 0.02
"""Seconds of audio per hidden state of the encoder."""
SOUNDS = {0: 5.0, 1: 6.0, 2: 3.2, 3: 4.24}
"""Duration of each sound in seconds, by seed."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, WhisperForConditionalGeneration]:
    """A checkpoint with heads that attend to few positions in the audio, like trained heads; and transformers'
    model."""
    folder = tmp_path_factory.mktemp("whisper")
    model = save_random(folder)
    for layer in model.model.decoder.layers:
        layer.encoder_attn.q_proj.weight.data *= 6
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="module")
def engine(pair: tuple[Path, WhisperForConditionalGeneration]) -> Engine:
    return Engine(EngineOptions(model=str(pair[0]), dtype="float32", **OPTIONS))


def run(engine: Engine, requests: Mapping[int, EngineRequest]) -> tuple[dict[int, list[int]], dict[int, list[float]]]:
    """Tokens and embeddings of requests that run together, by request id."""
    tokens: dict[int, list[int]] = {i: [] for i in requests}
    vectors: dict[int, list[float]] = {}
    for request in requests.values():
        engine.add(request)
    while engine.busy:
        for delta in engine.step():
            assert not delta.failure
            tokens[int(delta.request_id)] += delta.token_ids
            if delta.embedding:
                vectors[int(delta.request_id)] = np.frombuffer(delta.embedding, np.float32).tolist()
    return tokens, vectors


def aligned(folder: Path, engine: Engine) -> tuple[dict[int, list[int]], dict[int, EngineRequest]]:
    """Tokens of each sound's transcription, and the request for their times, by seed.

    The last token is omitted, as transformers returns no attention for it.
    """
    speech, transcriptions, windows = InputProcessor(folder, ModelOptions()).speech, {}, {}
    assert speech
    for seed, seconds in SOUNDS.items():
        task = speech.task(False, "en", None, True, words=True)
        windows[seed] = speech.open(wav(sound(seconds, seed)), task, 64)
        window = windows[seed].next_window()
        assert window
        prompt, audio, max_tokens = window
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
        transcriptions[seed] = EngineRequest(
            request_id=str(seed), prompt=prompt, sampling=sampling, eos_token_ids=(audio.rules.eos,), audio=audio
        )
    answers, requests = run(engine, transcriptions)[0], {}
    for seed, answer in answers.items():
        alignment = windows[seed].alignment(answer[:-1])
        assert alignment
        requests[seed] = times_request(seed, *alignment)
    return answers, requests


def times_request(number: int, prompt: list[int], audio: AudioInput) -> EngineRequest:
    return EngineRequest(
        request_id=str(number), prompt=prompt, sampling=SamplingParams(max_tokens=1), pooling=TOKEN_TIMES, audio=audio
    )


def test_token_times_equal_transformers(engine: Engine, pair: tuple[Path, WhisperForConditionalGeneration]) -> None:
    folder, model = pair
    answers, requests = aligned(folder, engine)
    times = run(engine, requests)[1]
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    for seed, seconds in SOUNDS.items():
        inputs = extractor(sound(seconds, seed), sampling_rate=RATE, return_tensors="pt", return_attention_mask=True)
        output = model.generate(
            **inputs,
            language="en",
            task="transcribe",
            return_timestamps=True,
            return_token_timestamps=True,
            return_segments=True,
            max_new_tokens=32,
        )
        window = output["segments"][0][0]["result"]
        count = len(answers[seed])
        assert window["sequences"][-count:].tolist() == answers[seed]
        ours = np.array(times[seed]) * STEP
        np.testing.assert_allclose(ours, window["token_timestamps"][-count:-1], rtol=0, atol=1e-6)
        assert len(set(times[seed])) > 1


@pytest.mark.parametrize(("tokens", "positions", "length"), [(40, 300, 300), (40, 300, 181), (30, 20, 20), (5, 9, 3)])
def test_alignment_equals_transformers(tokens: int, positions: int, length: int) -> None:
    """Heads follow the speech, with noise. Some cases have more tokens than positions, or fewer positions than half the
    width of the median filter."""
    random = torch.Generator().manual_seed(tokens + length)
    heads, size = 5, 16
    places = torch.linspace(0, 6, positions)[:, None] * torch.arange(1, size // 2 + 1)
    keys = torch.cat((places.sin(), places.cos()), 1).repeat(heads, 1, 1)
    queries = 4 * keys[:, torch.arange(tokens) * positions // tokens]
    queries = queries + 6 * torch.randn(queries.shape, generator=random)
    weights = (queries * size**-0.5 @ keys.transpose(1, 2)).softmax(-1)[..., :length]
    std, mean = weights.std(-2, keepdim=True, unbiased=False), weights.mean(-2, keepdim=True)
    rows, columns = _dynamic_time_warping(-_median_filter((weights - mean) / std, 7).mean(0).double().numpy())
    expected = [int(columns[rows == row].min()) for row in range(tokens)]
    assert token_times(queries, keys, length, 7).tolist() == expected
    assert len(set(expected)) > min(tokens, length) / 3


def test_token_times_are_batch_invariant(engine: Engine, pair: tuple[Path, WhisperForConditionalGeneration]) -> None:
    """The bits are the same alone and together in chunks, with the audio encoded again or cached."""
    requests = aligned(pair[0], engine)[1]
    expected = {seed: run(engine, {seed: request})[1][seed] for seed, request in requests.items()}
    options = OPTIONS | {"num_gpu_blocks_override": 6, "max_num_batched_tokens": 13}
    few = Engine(EngineOptions(model=str(pair[0]), dtype="float32", **options))
    assert run(few, requests)[1] == expected
    assert run(few, requests)[1] == expected


def test_invalid_alignment_is_refused(engine: Engine, pair: tuple[Path, WhisperForConditionalGeneration]) -> None:
    audio = AudioInput(bytes(4 * 80 * 600), 80, 600, DecodingRules(eos=256))
    for heads, start, length, pooling, message in (
        (((1, 0),), 1, 300, None, "requires a pooling request with pooling_type last"),
        (((1, 0),), 1, 300, PoolingParams(pooling_type="all"), "requires a pooling request with pooling_type last"),
        ((), 1, 300, TOKEN_TIMES, "attention heads"),
        (((3, 0),), 1, 300, TOKEN_TIMES, "attention heads"),
        (((1, 0), (1, 2)), 1, 300, TOKEN_TIMES, "attention heads"),
        (((1, 0),), 3, 300, TOKEN_TIMES, "starts at token 1 to 2 of the prompt, not at 3"),
        (((1, 0),), 1, 301, TOKEN_TIMES, "hidden states"),
    ):
        aligned_audio = AudioInput(audio.features, 80, 600, audio.rules, alignment=Alignment(heads, start, length))
        with pytest.raises(PenstockError, match=message):
            engine.add(
                EngineRequest(
                    request_id="a", prompt=[1, 2, 3], sampling=SamplingParams(), pooling=pooling, audio=aligned_audio
                )
            )


def test_checkpoint_without_alignment_heads_is_refused(tmp_path: Path) -> None:
    save_random(tmp_path)
    path = tmp_path / "generation_config.json"
    given = json.loads(path.read_text())
    del given["alignment_heads"]
    path.write_text(json.dumps(given))
    speech = InputProcessor(tmp_path, ModelOptions()).speech
    assert speech
    with pytest.raises(PenstockError, match="timestamp_granularities: word timestamps need alignment_heads"):
        speech.task(False, None, None, True, words=True)


TEXTS = {
    "en": (" \"Hello,\" she said (twice) - it's 3.50, isn't it?", "english"),
    "de": (" Größe: „schön“ … na, prima! [Ende]", "german"),
    "zh": ("你好，世界。今天 the weather 很好！😀", "chinese"),
    "ja": ("「こんにちは」、元気ですか？", "japanese"),
}


@pytest.mark.parametrize("size", [256, 300, 360])
def test_words_equal_transformers(size: int) -> None:
    """Tests vocabularies with single-byte tokens only, and with longer tokens."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator([text for text, _ in TEXTS.values()] * 2, trainer)
    library.add_special_tokens(["<|endoftext|>"])  # gets a larger id than text tokens, as in Whisper
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=library, eos_token="<|endoftext|>")
    for code, (text, language) in TEXTS.items():
        ids = library.encode(text).ids
        texts, _, indices = _combine_tokens_into_words(tokenizer, ids, language)
        ours = split_words(ids, tokenizer.decode, code)
        assert [each.text for each in ours] == texts
        assert [[*range(each.first, each.end)] for each in ours] == indices
        assert "".join(texts) == text


SPEECH = (
    "The quick brown fox jumps over the lazy dog. Yesterday, we walked along the river, and talked about the weather. "
    "There are many ways to measure the speed of a computer; most of them are wrong in some way. "
    "She sells sea shells by the sea shore, and the shells that she sells are sea shells, for sure. "
    "In the morning, the train leaves the station at half past seven, and arrives in the city before nine o'clock. "
    "Nobody knows how long it will take, but everybody hopes that it will be finished soon."
)


@pytest.mark.thorough
def test_whisper_tiny_word_times_are_near_transformers() -> None:
    """Transcribes speech of more than one window over HTTP. Compares words that both systems transcribe equally."""
    from real_models import speech, whisper
    from transformers import WhisperTokenizer, pipeline

    folder = whisper()
    samples = (speech(SPEECH) * 32_768).astype(np.int16).astype(np.float32) / 32_768  # rounded as in the WAV file
    assert len(samples) > 30 * RATE
    recognizer = pipeline(
        "automatic-speech-recognition",
        model=WhisperForConditionalGeneration.from_pretrained(folder),
        tokenizer=WhisperTokenizer.from_pretrained(folder),
        feature_extractor=WhisperFeatureExtractor.from_pretrained(folder),
    )
    expected = recognizer(samples.copy(), return_timestamps="word")["chunks"]
    with Served("--model", str(folder), "--dtype", "float32") as server:
        client = openai.OpenAI(base_url=server.url, api_key="-", max_retries=0)
        answer = client.audio.transcriptions.create(
            file=("speech.wav", wav(samples)),
            model="default",
            response_format="verbose_json",
            timestamp_granularities=["word"],
        )
    words = answer.words
    assert words
    theirs = [each["text"].strip() for each in expected]
    matcher = SequenceMatcher(None, [each.word for each in words], theirs, autojunk=False)
    same = [(block.a + i, block.b + i) for block in matcher.get_matching_blocks() for i in range(block.size)]
    assert len(same) >= 0.8 * len(theirs), "more than 20 % of the words differ (some do: window splits differ)"
    ours = np.array([(words[a].start, words[a].end) for a, _ in same])
    differences = np.abs(ours - np.array([expected[b]["timestamp"] for _, b in same]))
    assert np.median(differences) < 0.011
    assert np.mean(differences < 0.11) >= 0.9
