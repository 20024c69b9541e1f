"""Embeddings: equal to transformers and sentence-transformers, independent of the batch, and served over HTTP."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import openai
import pytest
import torch
from checkpoints import SMALL, save
from executors import engine_options
from peft import LoraConfig, get_peft_model
from serving import Served, Servers
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config

from penstock import LLM, LoRARequest, PenstockError, PoolingParams, demo
from penstock.core import Code, EngineRequest, SamplingParams
from penstock.engine.engine import Engine

CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(**SMALL, head_dim=32, sliding_window=None),
    "llama": LlamaConfig(**SMALL),
}
OPTIONS: dict[str, Any] = {"block_size": 16, "num_gpu_blocks_override": 100, "weight_cache_dir": "none"}
NO_GENERATION = SamplingParams(max_tokens=1)


@pytest.fixture(scope="module", params=CONFIGS)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save(CONFIGS[request.param], folder)
    return folder


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    save(CONFIGS["qwen3"], folder)
    return folder


def random_prompt(seed: int, length: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(2, 300) for _ in range(length)]


PROMPTS = [random_prompt(length, length) for length in (1, 16, 40, 130, 256)]


@torch.inference_mode()
def states(model: Any, prompt: list[int]) -> Tensor:
    """Return the hidden states after the last norm, ``[tokens, hidden]``."""
    found: Tensor = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0]
    return found


def assert_close(ours: list[float], theirs: Tensor) -> None:
    assert ours == pytest.approx(theirs.tolist(), abs=1e-4)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("ops", ["reference", "cpu"])
@pytest.mark.parametrize("pooling_type", ["last", "mean"])
def test_embeddings_equal_pooled_hidden_states_of_transformers(base: Path, pooling_type: Any, ops: str) -> None:
    """Prompts are computed in chunks of 50 tokens; the longest fills the context."""
    if ops == "cpu":
        pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)
    llm = LLM(base, dtype="float32", ops=ops, pooling_type=pooling_type, max_num_batched_tokens=50, **OPTIONS)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for prompt, output in zip(PROMPTS, llm.embed(PROMPTS, use_tqdm=False), strict=True):
        found = states(model, prompt)
        expected = found[-1] if pooling_type == "last" else found.mean(0)
        assert_close(output.outputs.embedding, expected / expected.norm())
        assert output.prompt_token_ids == prompt
        assert output.outputs.hidden_size == 64
    params = [PoolingParams(pooling_type=pooling_type, normalize=normal, dimensions=9) for normal in (True, False)]
    short, raw = llm.embed([PROMPTS[2]] * 2, use_tqdm=False, pooling_params=params)
    found = states(model, PROMPTS[2])
    expected = (found[-1] if pooling_type == "last" else found.mean(0))[:9]
    assert_close(short.outputs.embedding, expected / expected.norm())
    assert_close(raw.outputs.embedding, expected)
    assert llm.engine.scheduler.device_pool.num_free == llm.engine.scheduler.device_pool.total
    assert not llm.engine.busy


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"dtype": "float32"}, {"dtype": "bfloat16", "kv_cache_dtype": "int8"}, {"quantization": "w8a8"}],
    ids=str,
)
def test_embedding_bits_do_not_depend_on_batch(qwen3: Path, options: dict[str, Any]) -> None:
    """Bits are the same in a batch with generating requests, for any chunk size, cached prefixes and preemption."""
    pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)
    rng = Random("embed")
    requests: list[EngineRequest] = []
    for number in range(24):
        prompt = [2 + i for i in range(rng.choice((0, 40)))] + random_prompt(number, rng.randint(1, 120))
        pooling = PoolingParams(pooling_type=rng.choice(("last", "mean")))
        growing = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        params = {"sampling": NO_GENERATION, "pooling": pooling} if number % 2 else {"sampling": growing}
        requests.append(EngineRequest(request_id=str(number), prompt=prompt, **params))

    def run(engine: Engine, batch: list[EngineRequest]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        left = list(batch)
        while left or engine.busy:
            while left and rng.random() < 0.5:
                engine.add(left.pop(0))
            found |= {delta.request_id: delta.embedding for delta in engine.step() if delta.embedding}
        assert engine.scheduler.device_pool.num_free == engine.scheduler.device_pool.total
        return found

    fixed = OPTIONS | {"model": str(qwen3), "max_model_len": 256} | options
    single, alone = Engine(engine_options(**fixed, enable_prefix_caching=False)), dict[str, bytes]()
    for request in requests[1::2]:  # every second request is an embedding request
        alone |= run(single, [request])
    assert len(alone) == 12
    preempted = 0
    for _ in range(12):
        drawn = {
            "max_num_batched_tokens": rng.choice((7, 40, 300)),
            "num_gpu_blocks_override": rng.choice((20, 40)),
            "preemption_mode": rng.choice(("recompute", "swap")),
            "swap_space": 0.001,
            "max_num_partial_prefills": 3,
        }
        engine = Engine(engine_options(**fixed | drawn))
        assert run(engine, rng.sample(requests, len(requests))) == alone
        preempted += engine.scheduler.num_preemptions
    assert preempted > 12


def test_last_pooling_uses_cached_prefix_and_mean_pooling_does_not(qwen3: Path) -> None:
    llm = LLM(qwen3, **OPTIONS)
    for kind, cached in (("last", 96), ("mean", 0)):
        params = PoolingParams(pooling_type=kind)  # type: ignore[arg-type]
        first, again = (llm.embed([random_prompt(5, 100)], use_tqdm=False, pooling_params=params)[0] for _ in "12")
        assert again.num_cached_tokens == cached
        assert first.outputs == again.outputs
        llm.engine.scheduler.device_pool.clear_cache()


def test_adapter_changes_embeddings_as_in_peft(qwen3: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float32)
    changed = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    changed.save_pretrained(tmp_path)
    llm = LLM(qwen3, dtype="float32", enable_lora=True, **OPTIONS)
    adapters = [None, LoRARequest("a", 1, str(tmp_path))]
    plain, adapted = llm.embed([PROMPTS[2]] * 2, use_tqdm=False, lora_request=adapters)
    expected = states(changed, PROMPTS[2])[-1]
    assert_close(adapted.outputs.embedding, expected / expected.norm())
    assert adapted.outputs != plain.outputs


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("pooling", ["lasttoken", "mean"])
@pytest.mark.parametrize("normalize", [True, False])
def test_sentence_transformers_checkpoint_sets_pooling(tmp_path: Path, pooling: str, normalize: bool) -> None:
    """The checkpoint is a decoder without a language model head, with tensor names that lack the usual prefix."""
    from sentence_transformers import (
        SentenceTransformer,
        models,
    )  # imported here because the import takes more than a second

    torch.manual_seed(0)
    model = AutoModel.from_config(CONFIGS["qwen3"])
    model.save_pretrained(tmp_path / "decoder")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.CHAT / name, tmp_path / "decoder" / name)
    decoder = models.Transformer(str(tmp_path / "decoder"))
    parts = [
        decoder,
        models.Pooling(decoder.get_embedding_dimension(), pooling),
        *[models.Normalize()] * normalize,
    ]
    library = SentenceTransformer(modules=parts, device="cpu")
    library.save_pretrained(str(tmp_path / "whole"))
    llm = LLM(tmp_path / "whole", dtype="float32", **OPTIONS)
    ids = [token for token in llm.get_tokenizer().encode("\n\t !") if token < 300] or [5]
    features = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
    with torch.inference_mode():
        expected = library(features)["sentence_embedding"][0]
    (output,) = llm.embed([ids], use_tqdm=False)
    assert_close(output.outputs.embedding, expected)
    with pytest.raises(PenstockError, match="no language model head") as refused:
        llm.generate([ids])
    assert refused.value.failure.code is Code.UNSUPPORTED


def test_invalid_pooling_is_refused_with_field(qwen3: Path, tmp_path: Path) -> None:
    llm = LLM(qwen3, **OPTIONS)
    for params, field in ((PoolingParams(dimensions=65), "dimensions"), (PoolingParams(), "prompt")):
        with pytest.raises(PenstockError) as refused:
            llm.embed([[5], [5] * 257 if field == "prompt" else [6]], use_tqdm=False, pooling_params=params)
        assert refused.value.failure.field == field
        assert not llm.engine.busy
    with pytest.raises(PenstockError, match="dimensions"):
        PoolingParams(dimensions=0)
    shutil.copytree(qwen3, tmp_path, dirs_exist_ok=True)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    (tmp_path / "modules.json").write_text('[{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]')
    with pytest.raises(PenstockError, match="pooling_mode_max_tokens"):
        LLM(tmp_path, **OPTIONS).embed([[5]], use_tqdm=False)
    assert LLM(tmp_path, pooling_type="mean", **OPTIONS).embed([[5]], use_tqdm=False)


# --- Over HTTP --------------------------------------------------------------------------------------------------------

TEXTS = ["What is the capital of Canada?", "Tell me a story.", "巴黎的天气怎么样？"]


@pytest.fixture(scope="module")
def server(servers: Servers) -> Served:
    return servers.get("--num-gpu-blocks-override", "400")


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60) as found:
        yield found


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_gpu_blocks_override=400)


def test_openai_client_gets_embeddings_of_llm(client: openai.OpenAI, llm: LLM) -> None:
    expected = [output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)]
    ids = [llm.get_tokenizer().encode(text) for text in TEXTS]
    for given in (TEXTS, ids):
        answer = client.embeddings.create(model="penstock-demo", input=given)  # the client requests base64 by default
        assert [entry.embedding for entry in answer.data] == expected
        assert [entry.index for entry in answer.data] == [0, 1, 2]
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    for given in (TEXTS[0], ids[0]):
        answer = client.embeddings.create(model="default", input=given, encoding_format="float")
        assert [entry.embedding for entry in answer.data] == expected[:1]
    (short,) = llm.embed(TEXTS[0], use_tqdm=False, pooling_params=PoolingParams(dimensions=16))
    answer = client.embeddings.create(model="default", input=TEXTS[0], dimensions=16)
    assert answer.data[0].embedding == short.outputs.embedding
    many = client.embeddings.create(model="default", input=["x"] * 600)
    assert len({tuple(entry.embedding) for entry in many.data}) == 1


@pytest.mark.slow
def test_scores_equal_cosine_similarity_of_embeddings(server: Served, llm: LLM) -> None:
    for path in ("/score", "/v1/score"):
        body = {"model": "default", "text_1": TEXTS[0], "text_2": TEXTS}
        answer = httpx.post(server.root + path, json=body, timeout=60).json()
        expected = llm.similarity(TEXTS[0], TEXTS, use_tqdm=False)
        assert [entry["score"] for entry in answer["data"]] == [output.outputs.score for output in expected]
        assert answer["data"][0]["score"] == pytest.approx(1, abs=1e-6)
    pairs = httpx.post(f"{server.root}/score", json={"text_1": TEXTS[:2], "text_2": TEXTS[1:]}, timeout=60).json()
    vectors = torch.tensor([output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)])
    expected = torch.cosine_similarity(vectors[:2], vectors[1:]).tolist()
    assert [entry["score"] for entry in pairs["data"]] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": [1, "a"]}, "input"),
        ("/v1/embeddings", {"input": [999_999]}, "input"),
        ("/v1/embeddings", {"input": ["a", [1] * 2049]}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 100_000}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "model": "other"}, "model"),
        ("/score", {"text_1": "a", "text_2": ""}, "text_2"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
        ("/score", {"text_1": "a"}, "text_2"),
    ],
)
def test_invalid_request_is_refused_with_field(server: Served, path: str, body: dict[str, Any], field: str) -> None:
    answer = httpx.post(server.root + path, json=body, timeout=60)
    assert answer.status_code == (404 if field == "model" else 400)
    assert answer.json()["error"]["param"].partition("[")[0] == field


def test_prompt_tokens_of_embeddings_are_counted(server: Served, client: openai.OpenAI) -> None:
    def count() -> float:
        page = httpx.get(f"{server.root}/metrics").text
        return sum(
            float(line.split()[-1]) for line in page.splitlines() if line.startswith("penstock:prompt_tokens_total")
        )

    before = count()
    usage = client.embeddings.create(model="default", input=TEXTS).usage
    assert count() == before + usage.prompt_tokens
