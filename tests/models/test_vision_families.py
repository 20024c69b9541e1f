"""Families with a vision transformer and a projector, compared with transformers."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import vision_checkpoints as checkpoints
from image_checkpoints import converted, noise
from PIL import Image
from safetensors.torch import load_file, save_file
from test_images import ONE, answers
from transformers import PreTrainedModel
from vision_checkpoints import FAMILIES

from penstock.checkpoint.config_json import read_config_json
from penstock.config.options import EngineOptions, ModelOptions
from penstock.core import SamplingParams
from penstock.core.multimodal import ImageInput
from penstock.engine.engine import Engine
from penstock.frontend.input_processor import InputProcessor
from penstock.frontend.llm import LLM
from penstock.planning.model_size import model_size_of

PICTURES = [noise(seed, *size) for seed, size in enumerate([(40, 56), (100, 60), (17, 70), (24, 24)])]
SMALL = {"dtype": "float32", "block_size": 16, "num_gpu_blocks_override": 100, "weight_cache_dir": "none"}
Saved = tuple[str, Path, PreTrainedModel]
"""A family, the folder of its checkpoint, and the model of transformers."""
DRAWS = int(os.environ.get("PENSTOCK_FAMILY_DRAWS", "20"))
"""Number of configurations per family in the thorough test."""


@pytest.fixture(scope="module", params=FAMILIES)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("checkpoint")
    return request.param, folder, checkpoints.save(request.param, folder)


def prompt(family: str, images: list[Image.Image], seed: int = 0, text: int = 30, **kwargs: Any) -> dict[str, Any]:
    """A prompt of random text with line feeds and images."""
    rng = Random(seed)
    words = [rng.choice(("a", "bc ", "\n", "d\n\n")) for _ in range(text)]
    for _ in images:
        words.insert(rng.randint(0, len(words)), FAMILIES[family].marker)
    given: dict[str, Any] = {"prompt": "".join(words)}
    return given | {"multi_modal_data": {"image": images}, "mm_processor_kwargs": kwargs} if images else given


@torch.inference_mode()
def table(
    family: str, model: PreTrainedModel, given: dict[str, Any], generated: list[int]
) -> tuple[list[int], torch.Tensor]:
    """transformers' tokens of the prompt, and its log probabilities after each prompt token and each generated
    token."""
    images = given.get("multi_modal_data", {}).get("image", [])
    tokenizer = checkpoints.tokenizer_of(family)
    kwargs = given.get("mm_processor_kwargs", {})
    inputs = FAMILIES[family].inputs(model, tokenizer, given["prompt"], images, kwargs)
    tokens = inputs["input_ids"][0].tolist()
    inputs["input_ids"] = torch.tensor([tokens + generated])
    if "token_type_ids" in inputs:
        inputs["token_type_ids"] = torch.nn.functional.pad(inputs["token_type_ids"], (0, len(generated)))
    inputs.pop("attention_mask", None)
    inputs = {name: each.to(model.dtype) if torch.is_floating_point(each) else each for name, each in inputs.items()}
    logits = model(**inputs).logits[0]
    return tokens, logits.double().log_softmax(-1)


def best(family: str, logprobs: torch.Tensor, prompt: list[int]) -> list[int]:
    """The likeliest token at each generated position, except image marks."""
    first = FAMILIES[family].id(FAMILIES[family].marks[0])
    return logprobs[len(prompt) - 1 : -1, :first].argmax(-1).tolist()


def no_marks(family: str, **options: Any) -> SamplingParams:
    """Greedy sampling without image marks, which transformers would read as an image."""
    first = FAMILIES[family].id(FAMILIES[family].marks[0])
    return SamplingParams(temperature=0, logit_bias={token: -100.0 for token in range(first, 300)}, **options)


@pytest.mark.parametrize("ops", ["reference", "cpu"])
def test_logprobs_and_greedy_tokens_match_transformers(saved: Saved, ops: str) -> None:
    """Prompts run in a batch with texts, in chunks, and again from the prefix cache."""
    if ops == "cpu":
        pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)
    family, folder, model = saved
    shown: list[list[Image.Image]] = [[], PICTURES[:1], PICTURES[:2], PICTURES, PICTURES[2:3] * 2]
    prompts = [prompt(family, images, seed=seed) for seed, images in enumerate(shown)]
    prompts += [prompt(family, PICTURES[1:2], 9, **kwargs) for kwargs in FAMILIES[family].kwargs[1:]]
    llm = LLM(folder, ops=ops, max_num_batched_tokens=37, **SMALL)
    params = no_marks(family, max_tokens=8, logprobs=0, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for given, output in zip(prompts, outputs, strict=True):
        (completion,) = output.outputs
        tokens, expected = table(family, model, given, completion.token_ids)
        assert output.prompt_token_ids == tokens
        assert best(family, expected, tokens) == completion.token_ids
        found = [next(iter(position.values())).logprob for position in completion.logprobs or []]
        at = range(len(tokens) - 1, len(expected) - 1)
        assert found == pytest.approx(expected[at, completion.token_ids].tolist(), abs=2e-5)
    again = llm.generate(prompts, params, use_tqdm=False)
    assert any(output.num_cached_tokens for output in again)
    assert [output.outputs[0].token_ids for output in again] == [output.outputs[0].token_ids for output in outputs]


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_configs_match_transformers(family: str, tmp_path: Path) -> None:
    """The error relative to transformers in float64 is at most 2e-5, or twice the error of transformers in float32."""
    rng = Random(family)
    for number in range(DRAWS):
        folder = tmp_path / str(number)
        model = checkpoints.save(family, folder, rng)
        images = [noise(number, rng.randint(10, 70), rng.randint(10, 70)) for _ in range(rng.randint(1, 2))]
        given = prompt(family, images, number, **rng.choice(FAMILIES[family].kwargs))
        llm = LLM(folder, max_num_batched_tokens=rng.choice([41, 200]), **SMALL)
        params = no_marks(family, max_tokens=6, prompt_logprobs=0, ignore_eos=True)
        (output,) = llm.generate([given], params, use_tqdm=False)
        generated = output.outputs[0].token_ids
        tokens, found = table(family, model, given, generated)
        assert output.prompt_token_ids == tokens
        assert best(family, found, tokens) == generated
        reported = logprobs_of_prompt(output, FAMILIES[family])
        library = table(family, model, given, [])[1]
        exact = table(family, model.double(), given, [])[1]
        ours = torch.tensor([value for _, value in reported])
        at, own = [place for place, _ in reported], [tokens[place + 1] for place, _ in reported]
        error = (library[at, own] - exact[at, own]).abs().max()
        assert (ours - exact[at, own]).abs().max() <= max(2e-5, 2 * error), number


def logprobs_of_prompt(output: Any, family: checkpoints.Family) -> list[tuple[int, float]]:
    """Previous position and log probability of each prompt token that is not an image mark."""
    pairs = zip(output.prompt_token_ids[1:], (output.prompt_logprobs or [])[1:], strict=True)
    first = family.id(family.marks[0])
    return [(i, entries[token].logprob) for i, (token, entries) in enumerate(pairs) if token < first and entries]


def test_bfloat16_error_is_near_that_of_transformers(saved: Saved) -> None:
    family, folder, exact = saved
    rough = type(exact).from_pretrained(folder, dtype=torch.bfloat16)
    llm = LLM(folder, **SMALL | {"dtype": "bfloat16"})
    errors = np.zeros(2)
    for seed in range(4):
        given = prompt(family, [noise(seed, 40, 56), noise(seed + 9, 30, 90)], seed)
        params = no_marks(family, max_tokens=1, prompt_logprobs=0)
        (output,) = llm.generate([given], params, use_tqdm=False)
        reported = logprobs_of_prompt(output, FAMILIES[family])
        at, own = [place for place, _ in reported], [output.prompt_token_ids[place + 1] for place, _ in reported]
        expected, theirs = (table(family, model, given, [])[1][at, own].numpy() for model in (exact, rough))
        errors += [np.square([value for _, value in reported] - expected).sum(), np.square(theirs - expected).sum()]
    our_error, their_error = np.sqrt(errors)
    assert our_error <= 1.2 * their_error


def test_planned_vision_weights_equal_the_matrices_in_use(saved: Saved) -> None:
    _, folder, model = saved
    given, depth = getattr(model.config, "vision_feature_layer", -1), model.config.vision_config.num_hidden_layers
    used = max(layer % (depth + 1) for layer in ([given] if isinstance(given, int) else given))
    matrices = 0
    for name, weight in model.named_parameters():
        layer = re.search(r"vision_tower.*layers?\.(\d+)", name)
        if weight.dim() > 1 and ("vision_tower" in name or "projector" in name):
            matrices += weight.numel() if layer is None or int(layer[1]) < used else 0
    assert model_size_of(read_config_json(folder)).vision_weights == matrices


@pytest.mark.parametrize("mode", ["RGB", "L", "transparent RGBA", "transparent P"])
def test_preprocessing_matches_transformers(saved: Saved, mode: str) -> None:
    """Compares pixels, in the order of the processor's tiles."""
    family, folder, model = saved
    for kwargs in FAMILIES[family].kwargs:
        processor = InputProcessor(folder, ModelOptions(mm_processor_kwargs=json.dumps(kwargs)))
        for picture in (*PICTURES, noise(9, 8, 120), noise(9, 130, 9)):
            image = converted(picture, mode)
            given = {"prompt": FAMILIES[family].marker, "multi_modal_data": {"image": image}}
            images = processor.create_output_processor("1", processor.tokenize(given), ONE).request.images
            found = np.concatenate([pixels(each) for each in images])
            theirs = FAMILIES[family].image_processor(model, kwargs)(images=[image], return_tensors="np")
            expected = np.asarray(theirs["pixel_values"]).reshape(-1, *found.shape[1:])
            np.testing.assert_allclose(found, expected[: len(found)], rtol=0, atol=1e-6)
            assert not expected[len(found) :].any()  # transformers pads with zeros


def pixels(image: ImageInput) -> np.ndarray:
    """Normalized pixels of an image, ``[tiles, 3, height, width]`` float32."""
    raw = np.frombuffer(image.pixels, np.uint8).reshape(image.tiles, image.height, image.width, 3)
    scaled = (raw.astype(np.float64) / 255).astype(np.float32)
    normalized = (scaled - np.float32(image.mean)) / np.float32(image.std)
    return normalized.transpose(0, 3, 1, 2)


def test_placeholder_of_chat_template_expands_as_in_transformers(saved: Saved) -> None:
    family, folder, model = saved
    llm = LLM(folder, **SMALL)
    parts = [{"type": "image_pil", "image_pil": PICTURES[0]}, {"type": "text", "text": "What?"}]
    (output,) = llm.chat([{"role": "user", "content": parts}], no_marks(family, max_tokens=4), use_tqdm=False)
    text = f"<turn>user\n{FAMILIES[family].marker}What?<end>\n<turn>model\n"
    given = {"prompt": text, "multi_modal_data": {"image": PICTURES[:1]}}
    tokens, expected = table(family, model, given, output.outputs[0].token_ids)
    assert output.prompt_token_ids == tokens
    assert best(family, expected, tokens) == output.outputs[0].token_ids


def test_outputs_do_not_depend_on_the_batch(saved: Saved) -> None:
    """Requests run alone and together, in chunks of any size, with preemption, and with steps in flight."""
    family, folder, _ = saved
    processor, rng = InputProcessor(folder, ModelOptions()), Random(family)
    requests = []
    for number in range(8):
        sampling = no_marks(family, max_tokens=rng.randint(10, 40), logprobs=0, ignore_eos=True, detokenize=False)
        images = [rng.choice(PICTURES) for _ in range(rng.randint(0, 3))]
        given = prompt(family, images, number % 3, rng.randint(1, 40))
        sampling = sampling.replace(prompt_logprobs=rng.choice((None, 0)))
        requests.append(processor.create_output_processor(str(number), processor.tokenize(given), sampling).request)
    largest = max(image.length for request in requests for image in request.images)
    longest = max(len(request.prompt) for request in requests)

    def start(**changes: Any) -> Engine:
        options: dict[str, Any] = {"model": str(folder), **SMALL, "dtype": "bfloat16", "max_model_len": longest + 40}
        return Engine(EngineOptions(**options | {"num_gpu_blocks_override": 400} | changes))

    lone = start(enable_prefix_caching=False)
    alone = {key: value for request in requests for key, value in answers(lone, [request]).items()}
    preempted = 0
    for _ in range(2):
        engine = start(
            num_gpu_blocks_override=-(-(longest + 40) // 16) + rng.choice((1, 3)),
            max_num_batched_tokens=largest + rng.randint(0, 9),
            long_prefill_token_threshold=rng.choice((0, 5)),
            max_num_partial_prefills=rng.randint(1, 3),
            max_concurrent_batches=rng.randint(1, 3),
            enable_prefix_caching=rng.random() < 0.5,
            encoder_cache_size=rng.choice((largest, 4 * largest)),
            speculative_config=rng.choice(("", '{"method": "ngram"}')),
        )
        assert answers(engine, requests, rng) == alone
        preempted += engine.scheduler.num_preempted_sequences
        engine.close()
    assert preempted > 0


def test_checkpoint_of_earlier_transformers_is_read(saved: Saved, tmp_path: Path) -> None:
    """Names of encoder tensors have an additional level, and ``config.json`` lacks several fields."""
    family, folder, _ = saved
    if family not in ("gemma3", "llava", "llava-onevision"):
        pytest.skip(f"earlier versions of transformers saved {family} in the same layout")
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    deeper = {name.replace("vision_tower.", "vision_tower.vision_model."): each for name, each in tensors.items()}
    save_file(deeper, tmp_path / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    del config["vision_config"]["hidden_act"], config["text_config"]["rms_norm_eps"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    given, params = prompt(family, PICTURES[:1]), no_marks(family, max_tokens=6, logprobs=0)
    first, second = (LLM(each, **SMALL).generate([given], params, use_tqdm=False)[0] for each in (folder, tmp_path))
    assert first.outputs[0].logprobs == second.outputs[0].logprobs
