"""Videos in prompts: frames, pixels, positions and tokens compared with transformers; refused requests; dialects."""

from __future__ import annotations

import base64
import io
import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import image_checkpoints as checkpoints
import numpy as np
import openai
import pytest
import torch
import video_library
from image_checkpoints import PLACEHOLDER, VIDEO, VISION_START, errors, noise, prompt
from safetensors.torch import load_file, save_file
from serving import Served, Servers
from transformers import PreTrainedModel

from penstock.checkpoint.config_json import read_config_json
from penstock.config.options import ModelOptions
from penstock.core import PenstockError, SamplingParams
from penstock.core.multimodal import ImageInput
from penstock.engine.sequence.mrope import mrope_positions, next_position
from penstock.frontend.input_processor import InputProcessor
from penstock.frontend.llm import LLM
from penstock.frontend.multimodal import VIDEO as KIND
from penstock.frontend.multimodal import MediaSource
from penstock.frontend.multimodal.video import Video
from penstock.models.vision.patches import normalized_patches
from penstock.planning.model_size import model_size_of

av = pytest.importorskip("av", reason="the extra video is not installed")
MODELS = {
    "qwen2-vl": checkpoints.qwen2_vl,
    "qwen2.5-vl": checkpoints.qwen2_5_vl,
    "qwen3-vl": checkpoints.qwen3_vl,
    "qwen3-vl-moe": checkpoints.qwen3_vl_moe,
    "qwen3.5": checkpoints.qwen3_5,
}
SMALL = {"dtype": "float32", "block_size": 16, "num_gpu_blocks_override": 100, "weight_cache_dir": "none"}
ONE = SamplingParams(temperature=0, max_tokens=1)


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, checkpoints.save_random(MODELS[request.param](), folder)


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("colours")
    checkpoints.save_colours(folder, latest=True)
    return folder


def frames(seed: int, count: int, height: int, width: int) -> np.ndarray:
    """Random pixels, ``[count, height, width, 3]`` uint8."""
    return np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def plain(*colours: str) -> np.ndarray:
    """Frames of one colour each, ``[colours, 32, 48, 3]``."""
    return np.stack([np.asarray(checkpoints.plain(colour, 32, 48)) for colour in colours])


def encoded(pictures: np.ndarray, fps: int = 2, codec: str = "libx264", kind: str = "mp4") -> bytes:
    """Encode pictures as a video file."""
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=fps)
        stream.height, stream.width = pictures.shape[1:3]
        stream.pix_fmt = {"gif": "rgb8", "ffv1": "bgr0", "mjpeg": "yuvj420p"}.get(codec, "yuv420p")
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, "rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def data_url(data: bytes) -> str:
    return f"data:video/mp4;base64,{base64.b64encode(data).decode()}"


# --- Against transformers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kwargs", [{}, {"num_frames": 6}, {"fps": 7.5}, {"size": {"shortest_edge": 64, "longest_edge": 40000}}]
)
def test_frames_and_pixels_match_transformers(pair: tuple[Path, PreTrainedModel], kwargs: dict[str, Any]) -> None:
    """Resized frames may differ by up to 2 of 255 levels, as PyTorch rounds differently."""
    folder, model = pair
    processor = InputProcessor(folder, ModelOptions())
    for seed, (count, height, width, fps) in enumerate([(9, 32, 48, 4.0), (23, 50, 37, 10.0), (70, 9, 40, 23.976)]):
        given = frames(seed, count, height, width)
        expected = video_library.process(model, given, fps, return_tensors="np", **kwargs)
        found = processor.media.load(MediaSource((given, {"fps": fps}), "video", KIND), kwargs)
        assert isinstance(found, Video)
        first = found.frames[0]
        assert [len(found.frames), 2 * first.rows, 2 * first.columns] == expected["video_grid_thw"][0].tolist()
        patches = np.concatenate([normalized_patches(each, 4, 2, 2) for each in found.frames])
        resized = (first.height, first.width) != (height, width)
        tolerance = 2.01 / 255 / 0.26 if resized else 1e-6
        np.testing.assert_allclose(patches, expected["pixel_values_videos"], rtol=0, atol=tolerance)


def test_numbers_of_sampled_frames_match_transformers(pair: tuple[Path, PreTrainedModel]) -> None:
    folder, model = pair
    rng = random.Random(1)
    processor = InputProcessor(folder, ModelOptions()).media.video_processor
    assert processor
    with video_library.library():
        library = video_library.processor_of(model)
        for _ in range(500):
            total, fps = rng.randint(2, 700), rng.choice([rng.uniform(1, 60), 24.0, 30000 / 1001])
            given = rng.choice([{}, {"fps": rng.uniform(0.1, 5)}, {"num_frames": 2 * rng.randint(1, total // 2)}])
            metadata = video_library.video_processing_utils.VideoMetadata(total_num_frames=total, fps=fps)
            library.fps = None if "num_frames" in given else 2
            expected = [int(index) for index in library.sample_frames(metadata=metadata, **given)]
            assert processor.with_kwargs(given).sample(total, fps) == expected


@torch.inference_mode()
def table(model: PreTrainedModel, tokens: list[int], videos: list[np.ndarray], fps: float, image: Any) -> torch.Tensor:
    """transformers' log probabilities after each token, ``[tokens, vocabulary]``."""
    ids = torch.tensor([tokens])
    processed = [video_library.process(model, video, fps, return_tensors="pt") for video in videos]
    inputs = {name: torch.cat([each[name] for each in processed]) for name in ("pixel_values_videos", "video_grid_thw")}
    inputs |= checkpoints.image_processor(model)(images=[image], return_tensors="pt")
    inputs["mm_token_type_ids"] = (ids == PLACEHOLDER).int() + 2 * (ids == VIDEO).int()
    if model.config.model_type == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = torch.tensor([2 / each["video_metadata"][0].sampled_fps for each in processed])
    return model(input_ids=ids, **inputs).logits[0].log_softmax(-1)


@pytest.mark.slow_after(1)
def test_logprobs_and_greedy_tokens_match_transformers(pair: tuple[Path, PreTrainedModel]) -> None:
    """Prompts run in a batch, in chunks that split frames, with an image, and again from the prefix cache."""
    folder, model = pair
    shown = [[frames(0, 8, 40, 64)], [frames(1, 6, 64, 48), frames(2, 9, 48, 32)]]
    image, fps = noise(5, 24, 40), 4.0
    prompts = [
        prompt([image], seed=seed, videos=[(video, {"fps": fps}) for video in videos])
        for seed, videos in enumerate(shown)
    ]
    llm = LLM(folder, max_num_batched_tokens=37, **SMALL)
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=0, prompt_logprobs=0, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    pairs = []
    for videos, output in zip(shown, outputs, strict=True):
        (completion,) = output.outputs
        tokens = output.prompt_token_ids + completion.token_ids
        expected = table(model, tokens, videos, fps, image)
        start = len(output.prompt_token_ids)
        assert expected[start - 1 : -1].argmax(-1).tolist() == completion.token_ids
        found = [
            next(iter(position.values())).logprob
            for position in [*(output.prompt_logprobs or [])[1:], *completion.logprobs]
        ]
        pairs.append(errors(model, tokens, found, partial(table, tokens=tokens, videos=videos, fps=fps, image=image)))
    error, library_error = map(max, zip(*pairs, strict=True))
    assert error <= max(2e-5, 3 * library_error)
    again = llm.generate(prompts, params.replace(prompt_logprobs=None), use_tqdm=False)
    assert any(output.num_cached_tokens for output in again)
    assert [output.outputs[0].token_ids for output in again] == [output.outputs[0].token_ids for output in outputs]


def test_transposed_experts_are_read(tmp_path: Path) -> None:
    """Qwen's checkpoints have ``[experts, inputs, outputs]``; transformers saves ``[experts, outputs, inputs]``."""
    folders = [tmp_path / "saved", tmp_path / "transposed"]
    for folder in folders:
        checkpoints.save_random(checkpoints.qwen3_vl_moe(), folder)
    weights = load_file(folders[1] / "model.safetensors")
    for name, weight in weights.items():
        weights[name] = weight.transpose(1, 2).contiguous() if ".experts." in name else weight
    save_file(weights, folders[1] / "model.safetensors", metadata={"format": "pt"})
    given = prompt([noise(0, 24, 24)], text=20)
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True)
    saved, transposed = (LLM(folder, **SMALL).generate([given], params, use_tqdm=False)[0] for folder in folders)
    assert saved.outputs[0].logprobs == transposed.outputs[0].logprobs
    size = model_size_of(read_config_json(folders[0]))
    matrices = sum(weight.numel() for weight in weights.values() if weight.dim() > 1)
    assert size.layer_weights + size.embedding_weights + size.vision_weights == matrices


@pytest.mark.parametrize("ids", [False, True])
def test_timestamps_of_frames_match_transformers(tmp_path: Path, ids: bool) -> None:
    """In Qwen3-VL, the time of each pair of frames is text before the frames."""
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    checkpoints.save_random(checkpoints.qwen3_vl(), tmp_path)
    processor = InputProcessor(tmp_path, ModelOptions())
    text = "Look:<|vision_start|><|video_pad|><|vision_end|>!"
    given: dict[str, Any] = {"prompt_token_ids": processor.encode(text)} if ids else {"prompt": text}
    video = (frames(0, 5, 16, 24), {"fps": 25.0, "frames_indices": [0, 30, 61, 89, 120], "total_num_frames": 130})
    output = processor.create_output_processor(
        "0", processor.tokenize(given | {"multi_modal_data": {"video": video}}), ONE
    )
    times = Qwen3VLProcessor._calculate_timestamps(None, [0, 30, 61, 89, 120], 25.0)  # type: ignore[arg-type]
    length = output.request.images[0].length
    parts = [f"<{time:.1f} seconds><|vision_start|>{'<|video_pad|>' * length}<|vision_end|>" for time in times]
    assert output.request.prompt == processor.encode(f"Look:{''.join(parts)}!")
    assert [image.offset for image in output.request.images] == [
        i + 1 for i, token in enumerate(output.request.prompt) if token == VISION_START
    ]


def test_text_after_long_video_continues_at_the_largest_position() -> None:
    """As in Qwen's and vLLM's code; transformers 5.24 counts only the edges of frames."""

    def frame(offset: int, time: int, continues: bool) -> ImageInput:
        return ImageInput(b"", offset, 1, 2, 8, 16, b"", *((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)), 1, continues, time)

    images = [frame(2, 0, False), frame(4, 3, True), frame(6, 6, True)]
    positions = mrope_positions(10, images)
    assert positions[0].tolist() == [0, 1, 2, 2, 5, 5, 8, 8, 9, 10]
    assert positions[1].tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 9, 10]
    assert positions[2].tolist() == [0, 1, 2, 3, 2, 3, 2, 3, 9, 10]
    assert next_position(10, images) == 11


def test_prefix_cache_distinguishes_times_of_frames(tmp_path: Path) -> None:
    """Equal frames at other times are a different prompt, but are encoded only once."""
    checkpoints.save_random(checkpoints.qwen2_5_vl(), tmp_path)
    llm = LLM(tmp_path, **SMALL)
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=0, ignore_eos=True)
    video = frames(0, 6, 32, 32)

    def ask(fps: float) -> tuple[int, Any]:
        given = (video, {"fps": fps, "frames_indices": range(6)})
        (output,) = llm.generate([prompt([], text=20, videos=[given])], params, use_tqdm=False)
        return output.num_cached_tokens, (output.outputs[0].token_ids, output.outputs[0].logprobs)

    _, slow = ask(0.5)
    assert ask(0.5) == (64, slow)
    cached, fast = ask(4)
    assert cached == 32 and fast != slow
    assert llm.engine.scheduler.encoder_cache.num_encoded == 3


# --- Files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "kind"), [("libx264", "mp4"), ("libvpx", "webm"), ("gif", "gif"), ("mjpeg", "avi"), ("ffv1", "matroska")]
)
def test_frames_of_video_files_are_sampled(colours: Path, codec: str, kind: str) -> None:
    processor = InputProcessor(colours, ModelOptions(media_io_kwargs='{"video": {"num_frames": 4}}'))
    names = ("red", "red", "red", "green", "green", "green", "blue", "blue")
    found = processor.media.load(MediaSource(data_url(encoded(plain(*names), 5, codec, kind)), "video", KIND))
    assert isinstance(found, Video)
    pixels = [np.frombuffer(each.pixels, np.uint8).reshape(2, -1, 3).mean(1).argmax(1) for each in found.frames]
    assert np.concatenate(pixels).tolist() == [0, 0, 1, 2]  # frames 0, 2, 4 and 6


@pytest.mark.slow
def test_python_prompts_accept_video_files_and_arrays(colours: Path, tmp_path: Path) -> None:
    data = encoded(plain("red", "red", "green", "green"))
    (tmp_path / "video.mp4").write_bytes(data)
    llm = LLM(colours, **SMALL)
    text = "<|vision_start|><|video_pad|><|vision_end|>Which?"
    for video in (data, tmp_path / "video.mp4", [data], plain("red", "red", "green"), [checkpoints.plain("green")]):
        (output,) = llm.generate({"prompt": text, "multi_modal_data": {"video": video}}, ONE, use_tqdm=False)
        assert output.outputs[0].text == "green"


LIMITS: dict[str, Any] = {"max_video_size": 20_000, "max_image_pixels": 10_000, "max_video_frames": 50}
GOOD = encoded(plain("red", "red", "green", "green"))
REFUSED = {
    "no video": (b"hello", "is damaged, or in an unsupported format"),
    "empty": (b"", "is damaged, or in an unsupported format"),
    "cut off": (GOOD[: len(GOOD) // 2], "is damaged"),
    "a playlist": (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "in an unsupported format"),
    "a list of files": (b"ffconcat version 1.0\nfile /etc/passwd\n", "in an unsupported format"),
    "an image": (encoded(plain("red"), codec="mjpeg", kind="mjpeg"), "in an unsupported format"),
    "too large": (bytes(20_001), "has more than 20000 bytes (max_video_size)"),
    "large frames": (
        encoded(frames(0, 2, 128, 128) // 128 * 0),
        "has frames of 128 x 128 pixels, and at most 10000 are allowed (max_image_pixels)",
    ),
    "many frames": (
        encoded(plain(*["red"] * 60), 30),
        "has 60 frames, more than max_video_frames (50); sample fewer (fps)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_video_is_refused_in_one_line(colours: Path, name: str) -> None:
    data, expected = REFUSED[name]
    processor = InputProcessor(colours, ModelOptions(media_io_kwargs='{"video": {"num_frames": -1}}', **LIMITS))
    with pytest.raises(PenstockError) as error:
        processor.media.load(MediaSource(data_url(data), "messages[0].content[1]", KIND))
    message = error.value.failure.message
    assert expected in message and message.startswith("messages[0].content[1]: ")
    assert len(message) < 300 and "\n" not in message


def test_decoding_has_a_time_limit(colours: Path) -> None:
    processor = InputProcessor(colours, ModelOptions(video_timeout=0.01))
    with pytest.raises(PenstockError, match=r"v: takes more than 0\.01 seconds to decode \(video_timeout\)"):
        processor.media.load(MediaSource(GOOD, "v", KIND))


def test_invalid_videos_of_python_prompts_are_refused(colours: Path) -> None:
    llm = LLM(colours, max_model_len=128, limit_mm_per_prompt={"video": 1}, **SMALL)
    video = plain("red", "red")
    wrong: list[tuple[dict[str, Any], str]] = [
        (prompt([], videos=[video, video]), r"videos: the prompt has 2 videos, and at most 1 are allowed"),
        (
            prompt([], videos=[video]) | {"prompt_token_ids": [5]},
            "videos: the prompt has 0 placeholders for 1 videos",
        ),
        (prompt([], videos=[5]), r"video\[0\]: must be a uint8 array"),
        (prompt([], videos=[video[:0]]), "has no frames"),
        (prompt([], videos=[(video, {"fps": -1})]), "has metadata that do not match its frames"),
        (prompt([], videos=[(video, {"fps": 2, "frames_indices": [1]})]), "has metadata that do not match its frames"),
        (prompt([], videos=[video]) | {"mm_processor_kwargs": {"fps": 1, "num_frames": 2}}, "cannot be combined"),
        (prompt([], videos=[video]) | {"mm_processor_kwargs": {"num_frames": 1.5}}, "must be integers"),
        (
            prompt([], videos=[video]) | {"mm_processor_kwargs": {"videos_kwargs": {"crop": 1}}},
            "'crop' is not supported",
        ),
    ]
    for given, message in wrong:
        with pytest.raises(PenstockError, match=message):
            llm.generate([given], ONE, use_tqdm=False)


def test_positions_beyond_the_context_are_refused(tmp_path: Path) -> None:
    """In Qwen2.5-VL, a few frames over a long time are few tokens with distant positions."""
    checkpoints.save_random(checkpoints.qwen2_5_vl(), tmp_path)
    llm = LLM(tmp_path, max_model_len=128, **SMALL)
    video = frames(0, 4, 16, 16)

    def ask(fps: float) -> int:
        given = prompt([], videos=[(video, {"fps": fps, "frames_indices": range(4)})])
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        return len(llm.generate([given], params, use_tqdm=False)[0].outputs[0].token_ids)

    # context length - 3 text tokens - vision start - 9 positions of the video - 2 (vision end, 1 text token)
    assert ask(1) == 128 - 3 - 1 - 9 - 2
    with pytest.raises(PenstockError, match=r"videos: end at position \d+, but the context ends at 128"):
        ask(0.05)


# --- Dialects ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(servers: Servers, colours: Path) -> Served:
    flags = ["--num-gpu-blocks-override", "100", "--block-size", "16", "--limit-mm-per-prompt", '{"video": 2}']
    return servers.get("--model", str(colours), *flags)


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("names", [("red", "green", "blue"), ("blue", "green", "red"), ("red", "blue", "green")])
def test_answer_depends_on_the_order_of_frames(server: Served, names: tuple[str, ...]) -> None:
    url = data_url(encoded(plain(*(name for name in names for _ in range(2)))))
    client = openai.OpenAI(base_url=server.url, api_key="-")
    for part in ({"type": "video_url", "video_url": {"url": url}}, {"type": "video", "video": url}):
        answer = client.chat.completions.create(
            model="default",
            max_tokens=1,
            temperature=0,
            messages=user(part),  # type: ignore[arg-type]
        )
        assert answer.choices[0].message.content == names[-1]
    body = {"messages": user(part), "max_tokens": 1, "temperature": 0}
    for kwargs in ({"media_io_kwargs": {"video": {"num_frames": 2}}}, {"mm_processor_kwargs": {"num_frames": 2}}):
        reply = httpx.post(f"{server.url}/chat/completions", json=body | kwargs).json()
        assert reply["choices"][0]["message"]["content"] in names[:2]  # frames 0 and 3 are encoded together
        assert reply["usage"]["prompt_tokens"] < answer.usage.prompt_tokens


def test_invalid_video_request_is_refused_with_status_400(server: Served) -> None:
    part = {"type": "video_url", "video_url": {"url": data_url(GOOD)}}
    refused: list[tuple[dict[str, Any], str]] = [
        ({"messages": user({"type": "video_url", "video_url": {"url": data_url(b"x")}})}, "is damaged"),
        ({"messages": user({"type": "video_url", "video_url": {}})}, "video_url.url: is missing"),
        ({"messages": user({"type": "video_url", "video_url": {"url": "http://10.0.0.1/"}})}, "is not allowed"),
        ({"messages": user(part, part, part)}, "videos: the prompt has 3 videos, and at most"),
        ({"messages": user(part), "media_io_kwargs": {"audio": {}}}, "media_io_kwargs: 'audio' is not supported"),
    ]
    for body, message in refused:
        answer = httpx.post(f"{server.url}/chat/completions", json={"max_tokens": 1, **body})
        assert answer.status_code == 400 and message in answer.json()["error"]["message"]
    assert json.loads(httpx.get(f"{server.url}/models").text)["data"]
