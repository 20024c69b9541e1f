"""Embeddings and classes of encoders, alone and in batches, compared with transformers and sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from encoder_checkpoints import SIZES, SPECIAL, WORDS, draw_config, draw_text, save_encoder
from executors import engine_options
from torch import Tensor
from transformers import AutoTokenizer, BertConfig

from penstock import LLM, PenstockError, PoolingParams
from penstock.core import Code, EngineRequest, SamplingParams
from penstock.engine.engine import Engine
from penstock.planning.kv_size import kv_specs
from penstock.planning.model_size import model_size_of

FAMILIES = ("bert", "roberta", "xlm-roberta", "gte", "modernbert")
OPTIONS: dict[str, Any] = {"block_size": 16, "weight_cache_dir": "none"}
KINDS = ("cls", "last", "mean")


def draw(rng: Random, length: int) -> list[int]:
    return [rng.randrange(5, 300) for _ in range(length)]


PROMPTS = [draw(Random(length), length) for length in (1, 2, 17, 64, 130, 300)]


@torch.inference_mode()
def states(model: Any, prompt: list[int]) -> Tensor:
    found: Tensor = model(torch.tensor([prompt])).last_hidden_state[0]
    return found


def pooled(found: Tensor, kind: str) -> Tensor:
    return {"cls": found[0], "last": found[-1], "mean": found.mean(0)}[kind]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("ops", ["reference", "cpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_match_hidden_states_of_transformers(family: str, ops: str, tmp_path: Path) -> None:
    """The configuration is random; prompts of 1 to 300 tokens run in one batch."""
    if ops == "cpu":
        pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)
    config = draw_config(family, Random(f"{family} {ops}"))
    model = save_encoder(config, tmp_path)
    llm = LLM(tmp_path, dtype="float32", ops=ops, **OPTIONS)
    found = [states(model, prompt) for prompt in PROMPTS]
    for kind in KINDS:
        params = PoolingParams(pooling_type=kind, normalize=False)  # type: ignore[arg-type]
        for output, hidden in zip(llm.embed(PROMPTS, use_tqdm=False, pooling_params=params), found, strict=True):
            assert output.outputs.embedding == pytest.approx(pooled(hidden, kind).tolist(), abs=2e-5)
    (default,) = llm.embed([PROMPTS[2]], use_tqdm=False, pooling_params=PoolingParams(dimensions=24))
    expected = found[2][0][:24]
    assert default.outputs.embedding == pytest.approx((expected / expected.norm()).tolist(), abs=2e-5)
    (each,) = llm.encode([PROMPTS[3]], PoolingParams(normalize=False), use_tqdm=False, pooling_task="token_embed")
    torch.testing.assert_close(each.outputs.data, found[3], atol=2e-5, rtol=0)
    assert llm.engine.scheduler.device_pool.num_free == llm.engine.scheduler.device_pool.total
    with pytest.raises(PenstockError, match="no language model head"):
        llm.generate([[5]], use_tqdm=False)
    longest = llm.engine.max_model_len
    with pytest.raises(PenstockError, match=f"the context has {longest} "):
        llm.embed([[5] * (longest + 1)], use_tqdm=False)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_class_probabilities_match_transformers(family: str, labels: int, tmp_path: Path) -> None:
    """Texts are classified and, with one class, pairs. In some families, second texts have another token type."""
    config = draw_config(family, Random(f"{family} {labels}"))
    model = save_encoder(config, tmp_path, labels)
    tokenizer, rng = AutoTokenizer.from_pretrained(tmp_path), Random(family)
    texts = [draw_text(rng, words) for words in (1, 12, 60)]
    others = [draw_text(rng, words) for words in (4, 33, 90)]

    @torch.inference_mode()
    def logits(*given: str) -> Tensor:
        inputs = tokenizer(*given, return_tensors="pt")
        types = {"token_type_ids": inputs["token_type_ids"]} if getattr(config, "type_vocab_size", 0) > 1 else {}
        found: Tensor = model(inputs["input_ids"], **types).logits[0]
        return found

    llm = LLM(tmp_path, dtype="float32", **OPTIONS)
    for output, text in zip(llm.classify(texts, use_tqdm=False), texts, strict=True):
        expected = logits(text).softmax(0) if labels > 1 else logits(text).sigmoid()
        assert output.outputs.probs == pytest.approx(expected.tolist(), abs=2e-5)
        assert output.outputs.num_classes == labels
    raw = llm.classify(texts[1], use_tqdm=False, pooling_params=PoolingParams(use_activation=False))[0]
    assert raw.outputs.probs == pytest.approx(logits(texts[1]).tolist(), abs=5e-5)
    if labels == 1:
        scores = [output.outputs.score for output in llm.score(texts, others, use_tqdm=False)]
        wanted_scores = [logits(a, b).sigmoid().item() for a, b in zip(texts, others, strict=True)]
        assert scores == pytest.approx(wanted_scores, abs=2e-5)
        (cut,) = llm.score(texts[2], others[2], use_tqdm=False, truncate_prompt_tokens=41)
        kept = tokenizer(texts[2], others[2], truncation="longest_first", max_length=41)["input_ids"]
        assert cut.prompt_token_ids == kept
    with pytest.raises(PenstockError, match="does not support embeddings"):
        llm.embed(texts, use_tqdm=False)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"quantization": "w8a8"},
        {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
        {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
    ],
    ids=lambda options: " ".join(map(str, options)),
)
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_embedding_does_not_depend_on_the_batch(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)
    rng = Random(f"company {family}")
    save_encoder(draw_config(family, rng), tmp_path)
    requests = [
        EngineRequest(
            request_id=str(number),
            prompt=draw(rng, rng.choice((1, rng.randint(2, 60), rng.randint(60, 250)))),
            sampling=SamplingParams(max_tokens=1),
            pooling=PoolingParams(pooling_type=rng.choice(KINDS)),  # type: ignore[arg-type]
        )
        for number in range(16)
    ]
    fixed = {"model": str(tmp_path), "max_model_len": 256, "weight_cache_dir": "none"}
    one_rank = {name: value for name, value in options.items() if name in ("dtype", "quantization")}
    alone = run_all(Engine(engine_options(**fixed, **one_rank)), [[request] for request in requests])
    assert len(alone) == len(requests)
    for _ in range(1 if "distributed_executor_backend" in options else 3):
        drawn = {"max_num_seqs": rng.choice((1, 3, 64)), "block_size": rng.choice((16, 32, 64)), "threads": 2}
        engine = Engine(engine_options(**fixed | options | drawn, max_num_batched_tokens=rng.choice((256, 700))))
        assert run_all(engine, [rng.sample(requests, len(requests))]) == alone
        assert engine.scheduler.device_pool.num_free == engine.scheduler.device_pool.total
        engine.close()


def run_all(engine: Engine, groups: list[list[EngineRequest]]) -> dict[str, bytes]:
    """Embeddings by request id. The requests of a group run together."""
    found: dict[str, bytes] = {}
    for group in groups:
        for request in group:
            engine.add(request)
        while engine.busy:
            found |= {delta.request_id: delta.embedding for delta in engine.step() if delta.embedding}
    return found


def move_transformer(folder: Path, inner: str) -> None:
    """Move the files of the module Transformer to a separate folder."""
    modules = json.loads((folder / "modules.json").read_text())
    assert modules[0]["path"] == ""
    modules[0]["path"] = inner
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / inner).mkdir()
    for path in folder.iterdir():
        if path.is_file() and path.name not in ("modules.json", "config_sentence_transformers.json", "README.md"):
            path.rename(folder / inner / path.name)
    (folder / "config.json").write_text('{"__version__": "0.2.5"}')


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["", "0_Transformer"])
def test_sentence_transformers_checkpoint_matches_its_library(tmp_path: Path, inner: str) -> None:
    """Tests pooling, dense layers, norm, lower case, maximum length, and prompts; also in the layout of older
    versions."""
    from sentence_transformers import SentenceTransformer, models

    save_encoder(BertConfig(**SIZES, max_position_embeddings=128), tmp_path / "encoder")
    encoder = models.Transformer(str(tmp_path / "encoder"), max_seq_length=24, do_lower_case=True)
    size = encoder.get_embedding_dimension()
    parts = [
        encoder,
        models.Pooling(size, "mean"),
        models.Dense(size, 48, activation_function=torch.nn.Tanh()),
        models.Dense(48, 32, bias=False, activation_function=torch.nn.Identity()),
        models.Normalize(),
    ]
    prompts = {"query": "where is the ", "document": ""}
    library = SentenceTransformer(modules=parts, device="cpu", prompts=prompts, default_prompt_name="query")
    library.save_pretrained(str(tmp_path / "whole"))
    if inner:
        move_transformer(tmp_path / "whole", inner)
    llm = LLM(tmp_path / "whole", dtype="float32", **OPTIONS)
    assert llm.engine.max_model_len == 24
    texts = ["The RIVER", "late train", "a cat in the light"]
    for name in (None, "query", ""):
        expected = library.encode(texts, prompt_name=name) if name != "" else library.encode(texts, prompt="")
        for output, vector in zip(llm.embed(texts, use_tqdm=False, prompt_name=name), expected, strict=True):
            assert output.outputs.embedding == pytest.approx(vector.tolist(), abs=2e-5)
    with pytest.raises(PenstockError, match="its prompts are: query"):
        llm.embed(texts, use_tqdm=False, prompt_name="passage")
    long = " ".join(["river"] * 60)
    with pytest.raises(PenstockError, match="the context has 24 "):
        llm.embed(long, use_tqdm=False, prompt_name="")
    (cut,) = llm.embed(long, use_tqdm=False, prompt_name="", truncate_prompt_tokens=-1)
    assert cut.outputs.embedding == pytest.approx(library.encode([long], prompt="")[0].tolist(), abs=2e-5)
    assert len(cut.prompt_token_ids) == 24 and cut.prompt_token_ids[-1] == 3
    assert len(cut.outputs.embedding) == 32
    with pytest.raises(PenstockError, match="at most 32, the dimensions"):
        llm.embed(long[:9], use_tqdm=False, pooling_params=PoolingParams(dimensions=33))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("prefix", ["", "bert."])
def test_old_bert_checkpoint_is_read(prefix: str, tmp_path: Path) -> None:
    """The checkpoint is as converted from TensorFlow: ``gamma`` and ``beta``, a pickle, ``vocab.txt``, and no encoder
    architecture."""
    config = BertConfig(**SIZES, max_position_embeddings=128)
    model = save_encoder(config, tmp_path / "new")
    old = tmp_path / "old"
    old.mkdir()
    tensors = {"cls.predictions.bias": torch.zeros(300)} if prefix else {}
    for name, tensor in model.state_dict().items():
        old_name = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        tensors[prefix + old_name] = tensor
    torch.save(tensors, old / "pytorch_model.bin")
    architectures = {"architectures": ["BertForPreTraining"]} if prefix else {}
    given = {name: value for name, value in config.to_dict().items() if name != "architectures"}
    (old / "config.json").write_text(json.dumps(given | architectures))
    (old / "vocab.txt").write_text("\n".join([*SPECIAL, *WORDS]))
    llm = LLM(old, dtype="float32", **OPTIONS)
    texts, params = ["The RIVER opens", "a late train"], PoolingParams(normalize=False)
    for output, text in zip(llm.embed(texts, use_tqdm=False, pooling_params=params), texts, strict=True):
        expected = states(model, [2, *(len(SPECIAL) + WORDS.index(word) for word in text.lower().split()), 3])[0]
        assert output.outputs.embedding == pytest.approx(expected.tolist(), abs=2e-5)


def test_options_unsupported_for_encoders_are_refused(tmp_path: Path) -> None:
    save_encoder(BertConfig(**SIZES, max_position_embeddings=128), tmp_path)
    for options, field in (
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype"),
        ({"speculative_config": '{"method": "ngram"}'}, "speculative_config"),
        ({"enable_lora": True}, "enable_lora"),
    ):
        with pytest.raises(PenstockError) as refused:
            LLM(tmp_path, **OPTIONS, **options)
        assert refused.value.failure.field == field
        assert refused.value.failure.code is Code.UNSUPPORTED
    with pytest.raises(PenstockError, match="no classifier"):
        LLM(tmp_path, **OPTIONS).classify("river", use_tqdm=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_planned_sizes_equal_the_matrices_of_the_encoder(family: str, tmp_path: Path) -> None:
    """``penstock plan memory`` computes the planned sizes."""
    config = draw_config(family, Random(f"size {family}"))
    model = save_encoder(config, tmp_path)
    size = model_size_of(config.to_dict() | {"architectures": [type(model).__name__]})
    matrices = {name: weight.numel() for name, weight in model.named_parameters() if weight.dim() > 1}
    layers = [count for name, count in matrices.items() if "embedding" not in name and "pooler" not in name]
    assert size.layer_weights == sum(layers)
    assert size.num_layers == config.num_hidden_layers
    assert [spec.kv_heads for spec in kv_specs(size)] == [config.num_attention_heads]


@pytest.mark.parametrize("name", ["BertLMHeadModel", "RobertaForCausalLM"])
def test_decoder_of_encoder_class_has_size(name: str) -> None:
    """These decoders run only with ``--model-impl transformers``; Penstock's own BERT and RoBERTa families are
    encoders."""
    config = BertConfig().to_dict() | {"architectures": [name]}
    size = model_size_of(config)
    assert (size.architecture, size.encoder) == (name, False)
    assert size.layer_weights >= 12 * (4 * 768**2 + 2 * 768 * 3072)
