"""Transcription: features, tokens and windows compared with transformers; refused requests; OpenAI's endpoints."""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import torch
from serving import Served, Servers
from speech_checkpoints import RATE, SECONDS, save_random, sound, wav
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

from penstock.checkpoint.config_json import read_config_json
from penstock.config.options import EngineOptions, ModelOptions
from penstock.core import EngineRequest, PenstockError, SamplingParams
from penstock.core.audio import AudioInput, DecodingRules
from penstock.engine.engine import Engine
from penstock.frontend.input_processor import InputProcessor
from penstock.frontend.speech.audio_decoding import decode_audio
from penstock.frontend.speech.features import LogMelFeatures
from penstock.frontend.speech.tokens import read_speech_tokens
from penstock.frontend.speech.transcription import Segment, Transcription
from penstock.planning.model_size import model_size_of
from penstock.text import Tokenizer

av = pytest.importorskip("av", reason="the extra audio is not installed")
OPTIONS = {"threads": 1, "block_size": 16, "num_gpu_blocks_override": 100, "weight_cache_dir": "none"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, WhisperForConditionalGeneration]:
    folder = tmp_path_factory.mktemp("whisper")
    return folder, save_random(folder)


@pytest.fixture(scope="module")
def engine(pair: tuple[Path, WhisperForConditionalGeneration]) -> Engine:
    return Engine(EngineOptions(model=str(pair[0]), dtype="float32", **OPTIONS))


def transcribe(engine: Engine, recordings: Sequence[Transcription]) -> list[list[list[int]]]:
    """Tokens by recording and window. One window of each recording at a time runs in a batch."""
    tokens: list[list[list[int]]] = [[] for _ in recordings]
    while windows := {i: window for i, each in enumerate(recordings) if (window := each.next_window())}:
        for i, (prompt, audio, max_tokens) in windows.items():
            sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
            engine.add(
                EngineRequest(
                    request_id=str(i), prompt=prompt, sampling=sampling, eos_token_ids=(audio.rules.eos,), audio=audio
                )
            )
            tokens[i].append([])
        while engine.busy:
            for delta in engine.step():
                tokens[int(delta.request_id)][-1] += delta.token_ids
        for i in windows:
            recordings[i].add(tokens[i][-1])
    return tokens


def opened(
    folder: Path, seconds: float, seed: int, language: str = "", prompt: str = "", times: bool = False
) -> Transcription:
    speech = InputProcessor(folder, ModelOptions()).speech
    assert speech
    return speech.open(wav(sound(seconds, seed)), speech.task(False, language, prompt, times), 64)


# --- Features and files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bins", [80, 128])
def test_features_match_transformers(bins: int) -> None:
    features, library = LogMelFeatures(feature_size=bins), WhisperFeatureExtractor(feature_size=bins)
    for seconds in (0.01, 7.3, 30):
        expected = library(sound(seconds), sampling_rate=RATE, return_tensors="np").input_features[0]
        np.testing.assert_allclose(features(sound(seconds)), expected, rtol=0, atol=5e-5)
    if bins > 80:
        return
    long = sound(40)
    expected = library(long, sampling_rate=RATE, return_tensors="np", truncation=False, padding=False).input_features[0]
    np.testing.assert_allclose(features(long), expected, rtol=0, atol=5e-5)
    silent = features(np.pad(long, (0, 30 * RATE)))
    whole = np.r_[:998, 1002:3000]  # frames within the recording, and after it
    window = features.window(features(long), 3000)
    np.testing.assert_allclose(window[:, whole], silent[:, 3000:6000][:, whole], rtol=0, atol=5e-5)


def encoded(samples: np.ndarray, kind: str, codec: str, rate: int) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray((samples[None] * 32_768).astype(np.int16), format="s16", layout="mono")
        frame.sample_rate = rate
        for packet in (*stream.encode(frame), *stream.encode()):
            container.mux(packet)
    return file.getvalue()


def test_audio_files_are_decoded() -> None:
    """Lossless formats are decoded to equal samples; lossy formats have about the same length."""
    samples = sound(2)
    flac = encoded(samples, "flac", "flac", RATE)
    for file in (wav(samples), wav(samples, channels=2), flac):
        np.testing.assert_array_equal(decode_audio(file, RATE, 60, 30), samples)
    for kind, codec in (("mp3", "libmp3lame"), ("mp4", "aac"), ("webm", "libopus")):
        found = decode_audio(encoded(np.repeat(samples, 3), kind, codec, 48_000), RATE, 60, 30)
        assert abs(len(found) - 2 * RATE) < RATE // 10
    for wrong, message in (
        (b"", "damaged"),
        (b"no sound", "damaged"),
        (flac[:3000], "damaged"),
        (wav(samples[:0]), "has no sound"),
        (wav(sound(61)), "is longer than 60 seconds"),
    ):
        with pytest.raises(PenstockError, match=message):
            decode_audio(wrong, RATE, 60, 30)


def test_wav_is_decoded_without_pyav(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    np.testing.assert_array_equal(decode_audio(wav(sound(1), channels=2), RATE, 60, 30), sound(1))
    for wrong in (wav(sound(1), rate=8000), b"no sound"):
        with pytest.raises(PenstockError, match=r"needs PyAV, which is not installed \(pip install 'penstock-llm"):
            decode_audio(wrong, RATE, 60, 30)


# --- Against transformers ---------------------------------------------------------------------------------------------


def test_tokens_match_transformers(engine: Engine, pair: tuple[Path, WhisperForConditionalGeneration]) -> None:
    """One batch has requests with and without timestamps, with detected and given languages, and with a prompt."""
    folder, model = pair
    cases: list[tuple[float, str, str, bool]] = [
        (5, "", "", False),
        (6, "de", "", True),
        (2.5, "", "", True),
        (3, "en", "and so", False),
        (4, "zh", "", True),
    ]
    recordings = [opened(folder, seconds, i, *rest) for i, (seconds, *rest) in enumerate(cases)]
    found, eos = transcribe(engine, recordings), model.config.eos_token_id
    library = WhisperFeatureExtractor.from_pretrained(folder)
    for i, (seconds, language, prompt, times) in enumerate(cases):
        features = library(sound(seconds, i), sampling_rate=RATE, return_tensors="pt").input_features
        assert len(ours := found[i][0]) > 3
        if prompt:  # generate of transformers 5.24 continues prompt_ids with other tokens than its logits' argmax
            window = opened(folder, seconds, i, language, prompt).next_window()
            assert window and ours == likeliest(model, features, window[0], window[1].rules, len(ours))
            continue
        output = model.generate(
            features,
            language=language or None,
            task="transcribe",
            return_timestamps=times,
            max_new_tokens=32,
            return_dict_in_generate=True,
        )
        if times:
            segments = [_text(each.tokens, eos) for each in recordings[i].segments if each.seek == 0]
            assert segments == [_text(each["tokens"].tolist(), eos) for each in output["segments"][0]][: len(segments)]
        else:
            expected = output["sequences"][0].tolist()
            assert ours == expected[len(expected) - len(ours) :], cases[i]
    detected = model.detect_language(library(sound(5, 0), sampling_rate=RATE, return_tensors="pt").input_features)
    assert model.generation_config.lang_to_id[f"<|{recordings[0].language}|>"] == detected.item()


@torch.inference_mode()
def likeliest(
    model: WhisperForConditionalGeneration, features: torch.Tensor, prompt: list[int], rules: DecodingRules, count: int
) -> list[int]:
    encoded, tokens = model.model.encoder(features), list(prompt)
    while len(tokens) < len(prompt) + count:
        logits = model(encoder_outputs=encoded, decoder_input_ids=torch.tensor([tokens])).logits[0, -1]
        first = len(tokens) == len(prompt)
        logits[[*rules.suppressed, *(rules.suppressed_first if first else ())]] = float("-inf")
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def test_windows_of_long_recording_match_transformers(
    engine: Engine, pair: tuple[Path, WhisperForConditionalGeneration]
) -> None:
    """Segments have the same tokens and start times."""
    folder, model = pair
    recording = opened(folder, 14, 11, "en")
    assert len(transcribe(engine, [recording])[0]) > 2
    features = LogMelFeatures(chunk_length=SECONDS)
    mels = features(sound(14, 11))
    mels = np.concatenate((mels, features.window(mels, mels.shape[1])), 1)
    output = model.generate(
        torch.from_numpy(mels)[None],
        attention_mask=torch.ones(1, mels.shape[1]),
        language="en",
        return_timestamps=True,
        return_segments=True,
        max_new_tokens=32,
    )
    last = recording.segments[-1].seek
    ours = [each for each in recording.segments if each.seek < last]
    expected = output["segments"][0][: len(ours)]
    eos = model.config.eos_token_id
    assert [_text(each.tokens, eos) for each in ours] == [_text(each["tokens"].tolist(), eos) for each in expected]
    assert [each.start for each in ours] == pytest.approx([each["start"].item() for each in expected], abs=0.011)


def _text(tokens: list[int], eos: int) -> list[int]:
    return [token for token in tokens if token < eos]


def logprobs(engine: Engine, audio: AudioInput, prompt: list[int]) -> list[float]:
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    engine.add(EngineRequest(request_id="p", prompt=prompt, sampling=sampling, audio=audio))
    found: list[float] = []
    while engine.busy:
        for delta in engine.step():
            found += [each[0].logprob for each in delta.prompt_logprobs or ()]
    return found


@pytest.mark.parametrize(("bins", "tied"), [(80, True), (128, False)])
def test_logprobs_match_transformers(tmp_path: Path, bins: int, tied: bool) -> None:
    """The difference is at most 2e-5 in float32; in bfloat16, the error is near transformers' error."""
    model = save_random(tmp_path, 7, bins, tied)
    prompt = np.random.default_rng(1).integers(4, 250, 60).tolist()
    features = LogMelFeatures(feature_size=bins, chunk_length=SECONDS)(sound(5, 2))
    audio = AudioInput(features.tobytes(), bins, 100 * SECONDS, DecodingRules(eos=model.config.eos_token_id))
    errors: dict[str, list[float]] = {}
    exact = expected_logprobs(model, features, prompt)
    for dtype in ("float32", "bfloat16"):
        engine = Engine(EngineOptions(model=str(tmp_path), dtype=dtype, max_num_batched_tokens=25, **OPTIONS))
        library = expected_logprobs(model.to(getattr(torch, dtype)), features, prompt)
        errors[dtype] = [np.abs(each - exact).mean() for each in (np.array(logprobs(engine, audio, prompt)), library)]
        if dtype == "float32":
            np.testing.assert_allclose(logprobs(engine, audio, prompt), exact, rtol=0, atol=2e-5)
    ours, theirs = errors["bfloat16"]
    assert ours <= 1.2 * theirs


@torch.inference_mode()
def expected_logprobs(model: WhisperForConditionalGeneration, features: np.ndarray, prompt: list[int]) -> np.ndarray:
    ids = torch.tensor([prompt])
    logits = model(input_features=torch.from_numpy(features)[None].to(model.dtype), decoder_input_ids=ids).logits
    return logits[0, :-1].float().log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].numpy()


def test_tokens_do_not_depend_on_the_batch(engine: Engine, pair: tuple[Path, WhisperForConditionalGeneration]) -> None:
    """Requests run alone, and together with too few KV blocks, so that some are preempted."""
    folder, _ = pair
    few = Engine(EngineOptions(model=str(folder), dtype="float32", **OPTIONS | {"num_gpu_blocks_override": 6}))
    seeds = range(5)
    together = transcribe(few, [opened(folder, 4, seed, times=True) for seed in seeds])
    assert together == [transcribe(engine, [opened(folder, 4, seed, times=True)])[0] for seed in seeds]


def test_planned_sizes_equal_the_matrices_of_the_model(pair: tuple[Path, WhisperForConditionalGeneration]) -> None:
    folder, model = pair
    size = model_size_of(read_config_json(folder))
    matrices = sum(each.numel() for each in model.parameters() if each.dim() > 1)
    assert size.layer_weights + size.embedding_weights + size.vision_weights == matrices


# --- The endpoints ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(servers: Servers, pair: tuple[Path, WhisperForConditionalGeneration]) -> Served:
    return servers.get("--model", str(pair[0]), "--dtype", "float32", "--num-gpu-blocks-override", "100")


@pytest.fixture(scope="module")
def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key="-", max_retries=0)


def segments_of(engine: Engine, folder: Path, seconds: float, seed: int) -> list[Segment]:
    recording = opened(folder, seconds, seed, "en", times=True)
    transcribe(engine, [recording])
    return recording.segments


def test_response_formats_have_text_segments_and_times(
    client: openai.OpenAI, engine: Engine, pair: tuple[Path, WhisperForConditionalGeneration]
) -> None:
    file, options = ("sound.wav", wav(sound(14, 5))), {"model": "default", "language": "en"}
    segments = segments_of(engine, pair[0], 14, 5)
    text = "".join(each.text for each in segments).strip()
    create = client.audio.transcriptions.create
    assert create(file=file, **options).text == text
    assert create(file=file, response_format="text", **options) == f"{text}\n"
    verbose = create(file=file, response_format="verbose_json", timestamp_granularities=["segment"], **options)
    assert (verbose.language, verbose.duration, verbose.text) == ("english", 14.0, text)
    assert verbose.segments
    given = [(each.start, each.end, each.text, each.tokens) for each in verbose.segments]
    assert given == [(each.start, each.end, each.text, each.tokens) for each in segments]
    assert all(each.avg_logprob < 0 and each.compression_ratio > 0 for each in verbose.segments)
    first = segments[0]
    start, end = (f"00:00:{time:06.3f}" for time in (first.start, first.end))
    assert create(file=file, response_format="vtt", **options).startswith(f"WEBVTT\n\n{start} --> {end}\n")
    srt = create(file=file, response_format="srt", **options)
    assert srt.startswith(f"1\n{start.replace('.', ',')} --> {end.replace('.', ',')}\n")


def test_words_contain_all_text_of_the_segments(
    client: openai.OpenAI, pair: tuple[Path, WhisperForConditionalGeneration]
) -> None:
    """The words are in the order of the text, over all windows."""
    file = ("sound.wav", wav(sound(14, 5)))
    options = {"file": file, "model": "default", "language": "zh", "response_format": "verbose_json"}
    create = client.audio.transcriptions.create
    answer = create(timestamp_granularities=["word"], **options)
    both = create(timestamp_granularities=["segment", "word"], **options)
    assert answer.segments is None
    assert answer.words and both.segments
    assert answer.words == both.words
    assert create(**options).words is None
    spaceless = "".join("".join(each.word for each in answer.words).split())
    assert spaceless == "".join("".join(each.text for each in both.segments).split())
    assert all(0 <= each.start <= each.end <= 14 for each in answer.words)
    assert len({each.seek for each in both.segments}) > 1


@pytest.mark.parametrize("seconds", [5, 14])
def test_streamed_text_equals_whole_text(client: openai.OpenAI, seconds: float) -> None:
    file = ("sound.wav", wav(sound(seconds, 4)))
    whole = client.audio.transcriptions.create(file=file, model="default").text
    *deltas, done = client.audio.transcriptions.create(file=file, model="default", stream=True)
    assert "".join(each.delta for each in deltas) == done.text == whole
    assert deltas
    assert done.usage.seconds == seconds


def test_translation_differs_from_transcription(client: openai.OpenAI) -> None:
    file = ("sound.wav", wav(sound(5, 4)))
    translated = client.audio.translations.create(file=file, model="default").text
    assert translated != client.audio.transcriptions.create(file=file, model="default").text


def test_invalid_request_is_refused(server: Served, client: openai.OpenAI) -> None:
    file = ("sound.wav", wav(sound(1)))
    for wrong, message in (
        ({"file": ("x.mp3", b"nothing")}, "file: is damaged"),
        ({"language": "tlh"}, "language: 'tlh' is not supported by this model; supported are de, en, zh"),
        ({"prompt": "<|de|>"}, "prompt: contains a special token"),
        ({"temperature": 1.5}, "temperature"),
        ({"response_format": "diarized_json"}, "response_format"),
        ({"response_format": "vtt", "stream": True}, "stream"),
        ({"timestamp_granularities": ["segment"]}, "timestamp_granularities: requires"),
        ({"include": ["logprobs"]}, "include: log probabilities"),
        ({"chunking_strategy": "auto"}, "chunking_strategy"),
        ({"file": ("x.wav", bytes(26 * 2**20))}, "at most"),
    ):
        with pytest.raises(openai.APIStatusError, match=message):
            client.audio.transcriptions.create(**{"file": file, "model": "default"} | wrong)
    form = {"timestamp_granularities[]": "word", "response_format": "verbose_json", "model": "default"}
    answer = httpx.post(f"{server.url}/audio/translations", data=form, files={"file": file})
    assert answer.status_code == 400
    assert "word timestamps are supported for transcriptions" in answer.text
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    for path, body in (("chat/completions", chat), ("completions", {"prompt": "a"}), ("embeddings", {"input": "a"})):
        answer = httpx.post(f"{server.url}/{path}", json=body)
        assert answer.status_code == 400
        assert "file to /v1/audio/transcriptions" in answer.text


def test_unsupported_engine_option_is_refused(pair: tuple[Path, WhisperForConditionalGeneration]) -> None:
    for name, value in (
        ("tensor_parallel_size", 2),
        ("pipeline_parallel_size", 2),
        ("role", "prefill"),
        ("enable_lora", True),
        ("speculative_config", '{"method": "ngram", "num_speculative_tokens": 2}'),
        ("quantization", "w8a8"),
        ("kv_cache_dtype", "int8"),
    ):
        with pytest.raises(PenstockError, match=f"{name}: .* is not supported for speech-to-text models"):
            Engine(EngineOptions(model=str(pair[0]), **{name: value}))


def test_text_model_refuses_audio() -> None:
    engine = Engine(EngineOptions(max_model_len=256, **OPTIONS))
    audio = AudioInput(bytes(4 * 80 * 3000), 80, 3000, DecodingRules(eos=5))
    with pytest.raises(PenstockError, match="audio: this model does not support audio input"):
        engine.add(EngineRequest(request_id="a", prompt=[1], sampling=SamplingParams(), audio=audio))


def test_english_only_model_refuses_translation_and_languages(tmp_path: Path) -> None:
    save_random(tmp_path, english=True)
    speech = InputProcessor(tmp_path, ModelOptions()).speech
    assert speech
    window = speech.open(wav(sound(1)), speech.task(False, "english", None, True), 64).next_window()
    assert window and len(window[0]) == 1
    with pytest.raises(PenstockError, match="does not support translation"):
        speech.task(True, None, None, False)
    with pytest.raises(PenstockError, match="supported are en"):
        speech.task(False, "de", None, False)


@pytest.mark.parametrize("missing", [("lang_to_id",), ("lang_to_id", "task_to_id"), ()])
def test_languages_are_read_from_the_tokenizer(tmp_path: Path, missing: tuple[str, ...]) -> None:
    """In early checkpoints, the generation config has no languages."""
    save_random(tmp_path)
    path = tmp_path / "generation_config.json"
    given = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in given.items() if name not in missing}))
    speech = InputProcessor(tmp_path, ModelOptions()).speech
    assert speech
    tokenizer = Tokenizer(tmp_path)
    for translate, language in ((False, "de"), (True, "german"), (False, "zh")):
        task = speech.task(translate, language, None, False)
        window = speech.open(wav(sound(1)), task, 64).next_window()
        assert window
        names = [tokenizer.id_to_token(token_id) for token_id in window[0]]
        assert names[1] == f"<|{language[:2].replace('ge', 'de')}|>"
        assert names[2] == ("<|translate|>" if translate else "<|transcribe|>")
    with pytest.raises(PenstockError, match="supported are de, en, zh"):
        speech.task(False, "fr", None, False)


@pytest.mark.parametrize(("vocab_size", "languages"), [(51_864, set()), (51_865, {"en", "de", "zh"})])
def test_vocabulary_size_identifies_english_only_models(tmp_path: Path, vocab_size: int, languages: set[str]) -> None:
    save_random(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    tokens = read_speech_tokens(tmp_path, Tokenizer(tmp_path).token_to_id, 256, vocab_size)
    assert set(tokens.languages) == languages
    assert set(tokens.tasks) == ({"transcribe", "translate"} if languages else set())


def test_ctrl_c_does_not_interrupt_audio_decoding(pair: tuple[Path, WhisperForConditionalGeneration]) -> None:
    """The terminal's signal arrives when the decoding process starts. The server drains."""
    flags = ["--model", str(pair[0]), "--dtype", "float32", "--num-gpu-blocks-override", "100"]
    with Served(*flags) as server, ThreadPoolExecutor() as pool:
        client = openai.OpenAI(base_url=server.url, api_key="-", max_retries=0)
        file = ("sound.wav", wav(sound(14, 5)))
        transcription = pool.submit(client.audio.transcriptions.create, file=file, model="default", language="en")
        server.interrupt("penstock.frontend.speech.audio_decoding")
        assert transcription.result(60).text
        assert server.ended() == 0
