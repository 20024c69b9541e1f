"""Images in prompts: comparison with transformers, prefix cache, batches, refused requests, and dialects."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
import struct
import threading
import zlib
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

import anthropic
import httpx
import image_checkpoints as checkpoints
import msgspec
import numpy as np
import openai
import pytest
import torch
from image_checkpoints import COLOURS, PLACEHOLDER, converted, errors, has_state, noise, plain, prompt
from PIL import Image
from repository import ROOT
from serving import Served, Servers
from transformers import AutoImageProcessor, PreTrainedModel, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from penstock.checkpoint.config_json import read_config_json
from penstock.config.options import EngineOptions, ModelOptions
from penstock.core import EngineRequest, PenstockError, SamplingParams
from penstock.engine.engine import Engine
from penstock.frontend.input_processor import InputProcessor
from penstock.frontend.llm import LLM
from penstock.frontend.multimodal import MediaSource
from penstock.frontend.multimodal.guarded_http import is_public
from penstock.models.vision.patches import normalized_patches
from penstock.planning.model_size import model_size_of

MODELS = {
    "qwen2-vl": checkpoints.qwen2_vl,
    "qwen2.5-vl": checkpoints.qwen2_5_vl,
    "qwen3-vl": checkpoints.qwen3_vl,
    "qwen3.5": checkpoints.qwen3_5,
    "qwen3.5-moe": checkpoints.qwen3_5_moe,
    "ernie4.5-vl": checkpoints.ernie4_5_vl,
}
PICTURES = [noise(seed, *size) for seed, size in enumerate([(40, 56), (100, 60), (17, 70), (24, 24)])]
SMALL = {"dtype": "float32", "block_size": 16, "num_gpu_blocks_override": 100, "weight_cache_dir": "none"}
AROUND = (checkpoints.VISION_START, checkpoints.VISION_END)
ONE = SamplingParams(temperature=0, max_tokens=1)
DRAWS = int(os.environ.get("PENSTOCK_FAMILY_DRAWS", "20"))
"""Number of configurations per family in the thorough test."""
SCHEDULES = int(os.environ.get("PENSTOCK_EXACTNESS_SCHEDULES", "100")) // 25


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, checkpoints.save_random(MODELS[request.param](), folder)


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("colours")
    checkpoints.save_colours(folder)
    return folder


# --- Against transformers ---------------------------------------------------------------------------------------------


@torch.inference_mode()
def table(model: PreTrainedModel, tokens: list[int], images: list[Image.Image]) -> torch.Tensor:
    """transformers' log probabilities after each token, ``[tokens, vocabulary]``."""
    ids = torch.tensor([tokens])
    inputs: dict[str, Any] = {}
    if images:
        inputs = dict(checkpoints.image_processor(model)(images=images, return_tensors="pt"))
        inputs["mm_token_type_ids"] = (ids == PLACEHOLDER).int()
        if "ernie" in model.config.model_type:
            inputs["moe_mm_token_type_ids"] = torch.isin(ids, torch.tensor([*AROUND, PLACEHOLDER])).int()
    logits = model(input_ids=ids, **inputs).logits[0]
    return logits.float().log_softmax(-1)


SIZE = {"shortest_edge": 256, "longest_edge": 4096}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("ops", ["reference", "cpu"])
def test_logprobs_and_greedy_tokens_match_transformers(pair: tuple[Path, PreTrainedModel], ops: str) -> None:
    """Prompts run in a batch with texts, in chunks that split images, and again from the prefix cache."""
    if ops == "cpu":
        pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)
    folder, model = pair
    shown: list[list[Image.Image]] = [[], PICTURES[:1], PICTURES[:2], PICTURES, PICTURES[2:3] * 2]
    prompts = [prompt(images, seed=seed) for seed, images in enumerate(shown)]
    llm = LLM(folder, ops=ops, max_num_batched_tokens=37, **SMALL)
    with_prompt_logprobs = SamplingParams(temperature=0, max_tokens=8, logprobs=0, prompt_logprobs=0, ignore_eos=True)
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)
    outputs = llm.generate(prompts, with_prompt_logprobs, use_tqdm=False)
    pairs = []
    for images, output in zip(shown, outputs, strict=True):
        (completion,) = output.outputs
        tokens = output.prompt_token_ids + completion.token_ids
        expected = table(model, tokens, images)
        start = len(output.prompt_token_ids)
        assert expected[start - 1 : -1].argmax(-1).tolist() == completion.token_ids
        found = [
            next(iter(position.values())).logprob
            for position in [*(output.prompt_logprobs or [])[1:], *completion.logprobs]
        ]
        pairs.append(errors(model, tokens, found, partial(table, tokens=tokens, images=images)))
    error, library_error = map(max, zip(*pairs, strict=True))
    assert error <= max(2e-5, 3 * library_error)
    again = llm.generate(prompts, params, use_tqdm=False)
    assert any(output.num_cached_tokens for output in again)
    assert [output.outputs[0].token_ids for output in again] == [output.outputs[0].token_ids for output in outputs]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", MODELS)
def test_rope_theta_of_vision_config_is_used(family: str, tmp_path: Path) -> None:
    """Tests files of earlier versions of transformers, which have no ``rope_parameters`` in ``vision_config``."""
    model = checkpoints.save_random(MODELS[family](), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"].pop("rope_parameters")
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"vision_config": config["vision_config"] | {"rope_theta": 7.0}})
    )
    changed = type(model).from_pretrained(tmp_path, dtype=torch.float32).eval()
    output = LLM(tmp_path, **SMALL).generate([prompt(PICTURES[:1])], ONE.replace(prompt_logprobs=0), use_tqdm=False)[0]
    tokens = output.prompt_token_ids
    reported = [next(iter(position.values())).logprob for position in (output.prompt_logprobs or [])[1:]]
    before, after = (table(each, tokens, PICTURES[:1])[range(len(tokens) - 1), tokens[1:]] for each in (model, changed))
    error, library_error = errors(changed, tokens, reported, partial(table, tokens=tokens, images=PICTURES[:1]))
    assert error <= max(2e-5, 3 * library_error)
    assert (before - after).abs().max() > 1e-3


@pytest.mark.thorough
@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_drawn_configs_match_transformers(family: str, tmp_path: Path) -> None:
    """The root mean square error relative to transformers in float64 is at most 1e-5, or three times the error of
    transformers in float32. The fixed order of sums has up to 1.5 times the rounding errors of PyTorch."""
    rng = Random(family)
    for number in range(DRAWS):
        folder = tmp_path / str(number)
        model = checkpoints.save_random(checkpoints.draw(family, rng), folder)
        images = [noise(number, rng.randint(10, 70), rng.randint(10, 70)) for _ in range(2)]
        llm = LLM(folder, max_num_batched_tokens=41, **SMALL)
        params = SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=0, ignore_eos=True)
        params = params.replace(logit_bias={PLACEHOLDER: -100.0})  # transformers would read the token as an image
        (output,) = llm.generate([prompt(images, seed=number)], params, use_tqdm=False)
        tokens, made = output.prompt_token_ids, output.outputs[0].token_ids
        found = table(model, tokens + made, images).clone()
        found[:, PLACEHOLDER] -= 100
        assert found[len(tokens) - 1 : -1].argmax(-1).tolist() == made
        reported = torch.tensor(
            [next(iter(position.values())).logprob for position in (output.prompt_logprobs or [])[1:] if position]
        )
        library = table(model, tokens, images)[range(len(tokens) - 1), tokens[1:]]
        if family in ("qwen3-vl-moe", "qwen3.5-moe", "ernie4.5-vl"):
            model.set_experts_implementation("eager")  # other implementations do not compute in float64
        exact = table(model.double(), tokens, images)[range(len(tokens) - 1), tokens[1:]]
        ours, theirs = ((each - exact).square().mean().sqrt() for each in (reported, library))
        assert ours <= max(1e-5, 3 * theirs), number


@pytest.mark.slow_after(1)
def test_bfloat16_error_is_near_that_of_transformers(pair: tuple[Path, PreTrainedModel]) -> None:
    folder, exact = pair
    rough = type(exact).from_pretrained(folder, dtype=torch.bfloat16)
    llm = LLM(folder, **SMALL | {"dtype": "bfloat16"})
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    errors = np.zeros(2)
    for seed in range(6):
        images = [noise(seed, 40, 56), noise(seed + 9, 30, 90)]
        (output,) = llm.generate([prompt(images, text=40, seed=seed)], params, use_tqdm=False)
        tokens = output.prompt_token_ids
        expected, theirs = (
            table(model, tokens, images)[range(len(tokens) - 1), tokens[1:]].double().numpy()
            for model in (exact, rough)
        )
        reported = [
            next(iter(position.values())).logprob for position in (output.prompt_logprobs or [])[1:] if position
        ]
        errors += [np.square(reported - expected).sum(), np.square(theirs - expected).sum()]
    our_error, their_error = np.sqrt(errors)
    assert our_error <= 1.2 * their_error


TRANSPARENT = ["transparent RGBA", "transparent LA", "transparent P", "transparent RGB"]


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "1", *TRANSPARENT])
@pytest.mark.parametrize("kwargs", [{}, {"max_pixels": 1024}, {"size": {"shortest_edge": 2048, "longest_edge": 9000}}])
def test_preprocessing_matches_transformers(colours: Path, mode: str, kwargs: dict[str, Any]) -> None:
    size = SIZE | kwargs.get("size", {}) | ({"longest_edge": kwargs["max_pixels"]} if "max_pixels" in kwargs else {})
    reference = Qwen2VLImageProcessorPil(patch_size=4, size=size)
    processor = InputProcessor(colours, ModelOptions(mm_processor_kwargs=json.dumps(kwargs)))
    for picture in (*PICTURES, noise(9, 8, 300), noise(9, 130, 9)):
        image = converted(picture, mode)
        expected = reference(images=[image], return_tensors="np")
        found = processor.media.load(MediaSource(image, "image"))
        assert (1, 2 * found.rows, 2 * found.columns) == tuple(expected["image_grid_thw"][0])
        np.testing.assert_allclose(normalized_patches(found, 4, 2, 2), expected["pixel_values"], rtol=0, atol=1e-6)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=type(found)) == found


def test_processor_config_overrides_preprocessor_config(colours: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(colours, tmp_path / "model")
    config = json.loads((folder / "preprocessor_config.json").read_text())
    nested = {"image_processor": config | {"size": {"shortest_edge": 64, "longest_edge": 1024}}}
    (folder / "processor_config.json").write_text(json.dumps(nested))
    expected = AutoImageProcessor.from_pretrained(folder)(images=[PICTURES[0]], return_tensors="np")["image_grid_thw"][
        0
    ]
    found = InputProcessor(folder, ModelOptions()).media.load(MediaSource(PICTURES[0], "image"))
    assert (1, 2 * found.rows, 2 * found.columns) == tuple(expected)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen2VLProcessor"}))
    expected = AutoImageProcessor.from_pretrained(folder)(images=[PICTURES[0]], return_tensors="np")["image_grid_thw"][
        0
    ]
    found = InputProcessor(folder, ModelOptions()).media.load(MediaSource(PICTURES[0], "image"))
    assert (1, 2 * found.rows, 2 * found.columns) == tuple(expected)


def test_planned_sizes_equal_the_matrices_of_the_model(pair: tuple[Path, PreTrainedModel]) -> None:
    """Vision tower and language model are counted separately."""
    folder, model = pair
    parts = dict.fromkeys((True, False), 0)
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and not name.endswith("e_score_correction_bias"):
            parts["language_model" in name or name.startswith("lm_head")] += weight.numel()
    size = model_size_of(read_config_json(folder))
    assert (size.layer_weights + size.embedding_weights, size.vision_weights) == (parts[True], parts[False])


# --- Prefix cache, batches and preemption -----------------------------------------------------------------------------


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("offloading", [0.0, 0.01])
def test_prefix_cache_distinguishes_images(pair: tuple[Path, PreTrainedModel], offloading: float) -> None:
    """Prompts with equal tokens share the prefix before the first different image, also in the host tier. With linear
    attention, they share at most that: up to a snapshot of the state."""
    folder, model = pair
    llm = LLM(folder, kv_offloading_size=offloading, **SMALL | {"num_gpu_blocks_override": 32 if offloading else 100})
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=0, ignore_eos=True)
    first, second, third = noise(1, 40, 56), noise(2, 40, 56), noise(3, 40, 56)

    def ask(*images: Image.Image) -> tuple[int, Any]:
        (output,) = llm.generate([prompt(list(images), text=20)], params, use_tqdm=False)
        if offloading:  # evict all blocks from the KV cache, but not from the host tier
            llm.generate([prompt([], text=400, seed=seed) for seed in range(2)], ONE, use_tqdm=False)
        return output.num_cached_tokens, (output.outputs[0].token_ids, output.outputs[0].logprobs)

    length = first.width * first.height // 8**2
    assert length == 35
    _, alone = ask(first, second)
    assert ask(first, second) == (80, alone)  # only the block with the last of 96 tokens is computed
    cached, other = ask(first, third)
    assert (
        cached == 48 or (has_state(model) and cached < 48)
    ) and other != alone  # up to the block with the second image's first placeholder
    cached, swapped = ask(second, first)
    assert (cached == 16 or (has_state(model) and cached < 16)) and swapped not in (alone, other)
    assert ask(first, third)[1] == other and ask(second, first)[1] == swapped


def draw_requests(folder: Path, rng: Random, count: int) -> list[EngineRequest]:
    processor = InputProcessor(folder, ModelOptions())
    pictures = [noise(seed, rng.randrange(16, 60), rng.randrange(16, 60)) for seed in range(4)]
    videos = [[noise(seed, 24, 40) for seed in range(first, first + 4)] for first in range(2)]
    requests = []
    for number in range(count):
        images = [rng.choice(pictures) for _ in range(rng.choice((0, 1, 1, 2, 3)))]
        sampling = SamplingParams(
            temperature=rng.choice((0.0, 0.8)),
            n=rng.choice((1, 1, 2)),
            seed=number,
            max_tokens=rng.randint(20, 60),
            logprobs=0,
            prompt_logprobs=rng.choice((None, 0)),
            ignore_eos=True,
            detokenize=False,
        )
        shown = [rng.choice(videos)] if processor.media.sees_videos and len(images) < 2 and rng.random() < 0.4 else []
        given = prompt(images, text=rng.randint(1, 40), seed=number % 3, videos=shown)
        requests.append(processor.create_output_processor(str(number), processor.tokenize(given), sampling).request)
    return requests


def answers(engine: Engine, requests: list[EngineRequest], rng: Random | None = None) -> dict[tuple[str, int], bytes]:
    """Tokens and log probabilities of each sequence, as bytes. With ``rng``, requests are added at random steps."""
    reported: dict[tuple[str, int], list[Any]] = {}
    left = list(requests)
    while left or engine.busy:
        while left and (rng is None or rng.random() < 0.5):
            engine.add(left.pop(0))
        for delta in engine.step():
            assert not delta.failure, delta
            own = reported.setdefault((delta.request_id, delta.sequence), [[], [], []])
            own[0] += delta.token_ids
            own[1] += delta.logprobs or []
            own[2] += delta.prompt_logprobs or []
    assert engine.scheduler.device_pool.num_free == engine.scheduler.device_pool.total
    return {key: msgspec.msgpack.encode(value) for key, value in reported.items()}


@pytest.mark.slow
def test_outputs_do_not_depend_on_the_batch(pair: tuple[Path, PreTrainedModel]) -> None:
    """Requests run alone and together, in chunks of any size, with preemption, with an encoder cache of the size of the
    largest image, and with steps in flight, worker processes and drafts."""
    folder, model = pair
    dtype = "float32" if isinstance(model, Qwen2VLForConditionalGeneration) else "bfloat16"
    rng = Random(dtype)
    requests = draw_requests(folder, rng, 12)
    options = {"model": str(folder), "dtype": dtype, "block_size": 16, "max_model_len": 256, "weight_cache_dir": "none"}

    def start(**changes: Any) -> Engine:
        return Engine(EngineOptions(**{"num_gpu_blocks_override": 100} | options | changes))

    lone = start(enable_prefix_caching=False)
    alone = {key: value for request in requests for key, value in answers(lone, [request]).items()}
    preempted = 0
    for number in range(SCHEDULES):
        engine = start(
            num_gpu_blocks_override=rng.choice((16, 18, 24)),
            threads=rng.randint(1, 2),
            max_num_batched_tokens=rng.choice((rng.randint(8, 40), 200)),
            max_num_seqs=16,
            max_num_partial_prefills=rng.randint(1, 3),
            max_concurrent_batches=rng.randint(1, 3),
            enable_prefix_caching=rng.random() < 0.5,
            preemption_mode=rng.choice(("recompute", "swap")),
            swap_space=0.001,
            encoder_cache_size=rng.choice((64, 128, 16384)),
            speculative_config=rng.choice(("", '{"method": "ngram"}')),
            distributed_executor_backend="uni" if number or dtype == "bfloat16" else "mp",
            tensor_parallel_size=1 if number or dtype == "bfloat16" else 2,
        )
        assert answers(engine, requests, rng) == alone
        preempted += engine.scheduler.num_preempted_sequences
        engine.close()
    assert preempted > 0


def test_equal_images_are_encoded_once(colours: Path) -> None:
    llm = LLM(colours, **SMALL)
    cache = llm.engine.scheduler.encoder_cache
    red, blue = plain("red"), plain("blue")
    llm.generate([prompt([red], seed=seed) for seed in range(3)], ONE, use_tqdm=False)
    assert (cache.num_encoded, cache.num_hits) == (1, 0)  # three equal images in one step
    llm.generate([prompt([red, blue], seed=7), prompt([blue], seed=8)], ONE, use_tqdm=False)
    assert (cache.num_encoded, cache.num_hits) == (2, 1)
    llm.sleep()
    llm.wake_up()
    llm.generate([prompt([blue], seed=9)], ONE, use_tqdm=False)
    assert cache.num_encoded == 3


# --- Refused images ---------------------------------------------------------------------------------------------------


def encoded(image: Image.Image, format: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, format)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb(width: int, height: int) -> bytes:
    """A small PNG file with this width and height in its header."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + png_chunk(b"IDAT", zlib.compress(bytes(1000))) + png_chunk(b"IEND", b"")


PICTURE = encoded(plain("red"))
LIMITS = {"max_image_size": 5000, "max_image_pixels": 100_000, "media_timeout": 5.0}
REFUSED = {
    "no image": (data_url(b"hello"), "is not an image in a supported format (PNG, JPEG, WEBP, GIF, BMP)"),
    "svg": (data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"), "is not an image in a supported"),
    "tiff": (data_url(encoded(plain("red"), "TIFF")), "is not an image in a supported"),
    "empty": (data_url(b""), "is not an image in a supported"),
    "cut off": (data_url(encoded(noise(0, 30, 30))[:-200]), "is a damaged image"),
    "cut off in the header": (data_url(PICTURE[:20]), "is "),
    "a bomb": (data_url(bomb(400, 400)), "has 400 x 400 pixels, more than max_image_pixels (100000)"),
    "a larger bomb": (data_url(bomb(60_000, 60_000)), "more pixels than max_image_pixels (100000)"),
    "an incomplete bomb": (data_url(bomb(300, 300)), "is a damaged image"),
    "too many bytes": (data_url(encoded(noise(0, 60, 60))), "has more than 5000 bytes (max_image_size)"),
    "not base64": ("data:image/png;base64,%%%", "has a data URL that is not base64"),
    "no comma": ("data:image/png;base64", "has a data URL without a comma"),
    "narrow": (data_url(encoded(noise(0, 2, 402))), "is too narrow, the largest aspect ratio is 200"),
    "another scheme": ("ftp://example.com/a.png", "must be a URL that begins with data:, https: or http:"),
    "no URL": ("a.png", "must be a URL that begins with"),
    "broken URL": ("http://[::1", "is not a valid URL"),
    "a local file": ("file:///etc/passwd", "local files are disabled on this server (allowed_local_media_path)"),
    "loopback": ("http://127.0.0.1:1/a.png", "is not allowed: 127.0.0.1 has an address that is not public"),
    "loopback by name": ("https://localhost/a.png", "is not allowed: localhost has an address that is not public"),
    "cloud metadata": ("http://169.254.169.254/latest", "is not allowed: 169.254.169.254 has an address"),
    "a number": ("http://2130706433/a.png", "is not allowed"),
    "IPv6": ("http://[::ffff:10.0.0.1]/a.png", "has an address that is not public"),
}


@pytest.fixture(scope="module")
def limited(colours: Path) -> InputProcessor:
    return InputProcessor(colours, ModelOptions(**LIMITS))


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_image_is_refused_in_one_line(limited: InputProcessor, name: str) -> None:
    url, message = REFUSED[name]
    with pytest.raises(PenstockError) as error:
        limited.media.load(MediaSource(url, "messages[0].content[1]"))
    failure = error.value.failure
    assert message in failure.message and failure.message.startswith("messages[0].content[1]: ")
    assert len(failure.message) < 250 and "\n" not in failure.message


ADDRESSES = "127.0.0.1 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1 255.255.255.255"
ADDRESSES_6 = "::1 :: fe80::1%eth0 fc00::1 ff02::1 ::ffff:127.0.0.1 64:ff9b::7f00:1 2002:7f00:1::"


def test_private_and_reserved_addresses_are_not_public() -> None:
    assert is_public("8.8.8.8") and is_public("2606:4700::1111")
    assert not any(map(is_public, f"{ADDRESSES} {ADDRESSES_6}".split()))


class Pictures(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        match self.path:
            case "/red.png":
                self._answer(200, PICTURE)
            case "/long":
                self._answer(200, bytes(10_000))
            case "/there":
                self._answer(302, b"", Location="/red.png")
            case "/elsewhere":
                self._answer(302, b"", Location=f"http://localhost:{self.server.server_port}/red.png")
            case "/file":
                self._answer(302, b"", Location="file:///etc/passwd")
            case "/round":
                self._answer(302, b"", Location="/round")
            case _:
                self._answer(404, b"")

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def pictures() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Pictures) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_images_are_fetched_from_allowed_places_only(colours: Path, pictures: str, tmp_path: Path) -> None:
    """An allowed host may have an address that is not public. Redirects are followed only to allowed hosts."""
    options = ModelOptions(allowed_media_domains=("127.0.0.1",), allowed_local_media_path=str(tmp_path), **LIMITS)
    processor = InputProcessor(colours, options)
    (tmp_path / "red.png").write_bytes(PICTURE)
    (tmp_path / "link.png").symlink_to("/etc/passwd")
    expected = processor.media.load(MediaSource(plain("red"), ""))
    for url in (f"{pictures}/red.png", f"{pictures}/there", data_url(PICTURE), (tmp_path / "red.png").as_uri()):
        assert processor.media.load(MediaSource(url, "image")) == expected
    refused = {
        f"{pictures}/none": "image: cannot be fetched: the server returned status 404",
        f"{pictures}/long": "image: has more than 5000 bytes (max_image_size)",
        f"{pictures}/elsewhere": "image: is not allowed: localhost is not in allowed_media_domains",
        f"{pictures}/file": "image: cannot be fetched: it redirects to a URL that is not HTTP",
        f"{pictures}/round": "image: cannot be fetched: it redirects more than 5 times",
        "http://example.com/a.png": "image: is not allowed: example.com is not in allowed_media_domains",
        (tmp_path / "link.png").as_uri(): "image: is not a file in allowed_local_media_path",
        (tmp_path.parent / "x.png").as_uri(): "image: is not a file in allowed_local_media_path",
    }
    for url, message in refused.items():
        with pytest.raises(PenstockError) as error:
            processor.media.load(MediaSource(url, "image"))
        assert error.value.failure.message == message


def test_silent_host_times_out(colours: Path) -> None:
    options = ModelOptions(allowed_media_domains=("127.0.0.1",), **LIMITS | {"media_timeout": 0.2})
    with ThreadingHTTPServer(("127.0.0.1", 0), Pictures, bind_and_activate=True) as silent:  # serves no connection
        url = f"http://127.0.0.1:{silent.server_port}/red.png"
        with pytest.raises(PenstockError, match=r"image: was not received within 0\.2 seconds \(media_timeout\)"):
            InputProcessor(colours, options).media.load(MediaSource(url, "image"))


def test_images_of_python_prompts_are_checked(colours: Path) -> None:
    llm = LLM(colours, limit_mm_per_prompt={"image": 2}, encoder_cache_size=20, **SMALL)
    red = plain("red")
    array = np.asarray(red)
    expected = llm.generate([prompt([red])], ONE, use_tqdm=False)[0].outputs[0].text
    assert llm.generate([prompt([array])], ONE, use_tqdm=False)[0].outputs[0].text == expected == "red"
    text = {"prompt": "a<|vision_start|><|image_pad|><|vision_end|>b", "multi_modal_data": {"image": plain("blue")}}
    (output,) = llm.generate(text, ONE, use_tqdm=False)
    assert output.outputs[0].text == "blue" and output.prompt_token_ids.count(PLACEHOLDER) == 9
    wrong: list[tuple[dict[str, Any], str]] = [
        (prompt([red] * 3), r"images: the prompt has 3 images, and at most 2 are allowed \(limit_mm_per_prompt\)"),
        (prompt([red]) | {"prompt_token_ids": [5]}, "images: the prompt has 0 placeholders for 1 images"),
        (prompt([red]) | {"multi_modal_data": {"audio": red}}, "multi_modal_data: audio is not supported, only image"),
        (prompt([red]) | {"multi_modal_data": {"image": [5]}}, r"image\[0\]: must be a Pillow image"),
        (prompt([red]) | {"multi_modal_data": {"image": array / 255}}, "an array must be"),
        (prompt([red]) | {"mm_processor_kwargs": {"crop": 1}}, "mm_processor_kwargs: 'crop' is not supported"),
        (prompt([red]) | {"mm_processor_kwargs": {"min_pixels": 1e5}}, "must be integers of at least 1"),
        (prompt([red]) | {"mm_processor_kwargs": {"min_pixels": 2**31}}, "more than max_image_pixels"),
        (prompt([noise(0, 60, 60)]), r"images: take \d+ tokens, more than encoder_cache_size \(20\)"),
    ]
    for given, message in wrong:
        with pytest.raises(PenstockError, match=message):
            llm.generate([given], ONE, use_tqdm=False)


DOCS = ROOT / "docs" / "multimodal.md"
ROWS = re.findall(r"^\| `--([a-z-]+) ([^`]+)` \| (runs|refused)\b", DOCS.read_text(encoding="utf-8"), re.M)
"""Rows of the documented table: option, value and outcome."""


@pytest.mark.parametrize(("name", "value", "outcome"), ROWS)
def test_option_runs_or_is_refused_as_documented(colours: Path, name: str, value: str, outcome: str) -> None:
    option = name.replace("-", "_")
    types = {"pipeline_parallel_size": int, "kv_offloading_size": float}
    given = True if value == "true" else types.get(option, str)(value)
    options = SMALL | {option: given}
    if outcome == "refused":
        with pytest.raises(PenstockError) as error:
            Engine(EngineOptions(model=str(colours), **options))
        message = f"{option}: {given} is not supported for models with image input; remove this option"
        assert error.value.failure.message == message
        return
    llm = LLM(colours, **options)
    outputs = llm.generate([prompt([plain(colour)]) for colour in COLOURS], ONE, use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == list(COLOURS)
    llm.engine.close()


def test_documented_table_has_rows_of_both_outcomes() -> None:
    assert {outcome for _, _, outcome in ROWS} == {"runs", "refused"}


# --- Dialects ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(servers: Servers, colours: Path, pictures: str) -> Served:
    flags = ["--num-gpu-blocks-override", "100", "--block-size", "16", "--limit-mm-per-prompt", '{"image": 3}']
    return servers.get("--model", str(colours), "--allowed-media-domains", "127.0.0.1", *flags)


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "Which colour?"}, *parts]}]


def openai_part(image: Image.Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(encoded(image))}}


@pytest.mark.parametrize("colour", COLOURS)
def test_answer_depends_on_the_content_of_the_image(server: Served, colour: str, pictures: str) -> None:
    data = encoded(plain(colour), "JPEG")
    client = openai.OpenAI(base_url=server.url, api_key="-")
    options: dict[str, Any] = {"model": "default", "max_tokens": 1, "temperature": 0}
    part = {"type": "image_url", "image_url": {"url": data_url(data, "image/jpeg"), "detail": "low"}}
    answer = client.chat.completions.create(messages=user(part), **options)
    assert answer.choices[0].message.content == colour
    chunks = client.chat.completions.create(messages=user(part), stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == colour
    input_image = {"type": "input_image", "image_url": data_url(data, "image/jpeg")}
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Which?"}, input_image]}]
    response = client.responses.create(model="default", input=items, max_output_tokens=1, temperature=0, store=False)
    assert response.output_text == colour
    other = anthropic.Anthropic(base_url=server.root, api_key="-")
    source = {"type": "base64", "media_type": "image/jpeg", "data": base64.b64encode(data).decode()}
    blocks: Any = [{"type": "image", "source": source}, {"type": "text", "text": "Which colour?"}]
    message = other.messages.create(max_tokens=1, messages=[{"role": "user", "content": blocks}], model="default")
    assert message.content[0].text == colour
    source = {"type": "url", "url": f"{pictures}/red.png"}
    blocks = [{"type": "image", "source": source}]
    message = other.messages.create(max_tokens=1, messages=[{"role": "user", "content": blocks}], model="default")
    assert message.content[0].text == "red"


def test_usage_counts_tokens_of_images(server: Served) -> None:
    client = openai.OpenAI(base_url=server.url, api_key="-")
    small, large = (
        client.chat.completions.create(
            model="default", max_tokens=1, messages=user(openai_part(plain("red", height, 24)))
        ).usage
        for height in (24, 48)
    )
    assert small and large and large.prompt_tokens - small.prompt_tokens == 9


def test_typed_placeholder_is_plain_text(server: Served) -> None:
    typed = [{"type": "text", "text": text} for text in ("<|image_pad|>", "<|vision_start|><|image_pad|>")]
    for parts in ([typed[0], openai_part(plain("red"))], [openai_part(plain("red")), *typed], typed):
        messages = [{"role": "user", "content": parts}]
        answer = httpx.post(f"{server.url}/chat/completions", json={"max_tokens": 1, "messages": messages})
        assert answer.status_code == 200


def test_metrics_have_hits_and_size_of_the_encoder_cache(server: Served) -> None:
    body = {"messages": user(openai_part(noise(7, 24, 24))), "max_tokens": 1}
    for salt in ("a", "b"):  # different salts prevent hits in the prefix cache
        httpx.post(f"{server.url}/chat/completions", json=body | {"cache_salt": salt}).raise_for_status()
    found: dict[str, float] = {}
    while found.get("vllm:mm_cache_hits_total", 0) < 1:  # the engine reports periodically
        page = httpx.get(f"{server.root}/metrics").text
        found = {name: float(value) for name, value in re.findall(r"^(\w+:\w+){[^}]*} (\S+)$", page, re.M)}
    assert found["vllm:mm_cache_queries_total"] > found["penstock:mm_cache_hits_total"]
    tokens = found["penstock:encoder_cache_tokens"]
    assert tokens >= 9 * found["penstock:encoder_cache_entries"] > 0
    assert found["penstock:encoder_cache_bytes"] == tokens * 64 * 4  # float32


def test_invalid_image_request_is_refused_with_status_400(server: Served) -> None:
    red = openai_part(plain("red"))
    refused: list[tuple[dict[str, Any], str, str]] = [
        ({"messages": user({"type": "image_url", "image_url": {"url": data_url(b"x")}})}, "is not an image", "[1]"),
        ({"messages": user({"type": "image_url", "image_url": {}})}, "image_url.url: is missing", "[1]"),
        ({"messages": user({"type": "input_audio", "input_audio": {}})}, "input_audio is not supported", "[1]"),
        ({"messages": user({"type": "image_url", "image_url": {"url": "http://10.0.0.1/"}})}, "is not allowed", "[1]"),
        ({"messages": user(red, red, red, red)}, "images: the prompt has 4 images, and at most", "images"),
        ({"messages": user(red), "truncate_prompt_tokens": 5}, "truncate_prompt_tokens: is not supported", ""),
        ({"messages": user(red), "mm_processor_kwargs": {"crop": 2}}, "'crop' is not supported", "mm_processor_kwargs"),
    ]
    for body, message, field in refused:
        answer = httpx.post(f"{server.url}/chat/completions", json={"max_tokens": 1, **body})
        error = answer.json()["error"]
        assert answer.status_code == 400 and message in error["message"] and field in (error["param"] or "")
    answer = httpx.post(f"{server.url}/chat/completions", json={"max_tokens": 1, "messages": user(red)})
    assert answer.json()["choices"][0]["message"]["content"] == "red"
