"""Registered model families in ``LLM``: their reader of ``config.json``, and their attention factory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from checkpoints import SMALL, save
from transformers import LlamaConfig

from penstock import LLM, SamplingParams
from penstock.checkpoint.model_config import dense_config
from penstock.core import PenstockError
from penstock.layers import AttentionLayer, BuildContext
from penstock.models import Family, ModelConfig, register
from penstock.models.decoder import Decoder
from penstock.models.layer import grouped_query_attention
from penstock.models.loader import LoadOptions, load_model
from penstock.models.registry import unregister
from penstock.ops import backend

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 60, "block_size": 16}


def tokens(folder: Path, **options: Any) -> list[list[int]]:
    rng = Random(0)
    prompts = [[rng.randrange(2, 300) for _ in range(length)] for length in (5, 70)]
    outputs = LLM(folder, **OPTIONS | options).generate(prompts, GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def as_architecture(folder: Path, name: str, **fields: Any) -> None:
    """Set the architecture, and other fields, in ``config.json``."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps(config | {"architectures": [name]}))


def full_attention_every_nth(raw: Mapping[str, Any]) -> ModelConfig:
    layers = int(raw["num_hidden_layers"])
    return dense_config(
        raw, sliding_windows=tuple(0 if i % raw["global_every"] == 0 else raw["local"] for i in range(layers))
    )


def fewer_kv_heads_later(context: BuildContext, config: ModelConfig, layer: int, name: str) -> AttentionLayer:
    """Attention factory: the first layer has all KV heads, later layers have half of them."""
    config = replace(config, num_kv_heads=config.num_kv_heads if layer == 0 else config.num_kv_heads // 2)
    return grouped_query_attention(context, config, layer, name)


@pytest.fixture
def families() -> Iterator[None]:
    mixed = partial(Decoder, attention=fewer_kv_heads_later)
    registered = [
        Family(("WindowedForCausalLM",), full_attention_every_nth),
        Family(("MixedForCausalLM",), dense_config, mixed),
    ]
    for family in registered:
        register(family)
    yield
    for family in registered:
        unregister(family)


@pytest.mark.slow
def test_registered_family_reads_config_and_generates(families: None, tmp_path: Path) -> None:
    types = ["full_attention", "sliding_attention", "full_attention"]
    save(LlamaConfig(**SMALL), tmp_path)
    plain = tokens(tmp_path)
    as_architecture(tmp_path, "LlamaForCausalLM", layer_types=types, sliding_window=20)
    expected = tokens(tmp_path)
    assert expected != plain, "the window changes the tokens"
    as_architecture(tmp_path, "WindowedForCausalLM", layer_types=None, global_every=2, local=20)
    assert tokens(tmp_path) == expected
    as_architecture(tmp_path, "WindowedForCausalLM", global_every=None)
    with pytest.raises(PenstockError, match="an invalid value"):
        tokens(tmp_path)


def test_layers_may_have_different_numbers_of_kv_heads(families: None, tmp_path: Path) -> None:
    pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)
    save(LlamaConfig(**SMALL), tmp_path)
    as_architecture(tmp_path, "MixedForCausalLM")
    options = {"load_format": "dummy", "kv_cache_memory_bytes": 2**20, "num_gpu_blocks_override": 0}
    assert tokens(tmp_path, ops="cpu", **options) == tokens(tmp_path, ops="reference", **options)
    llm = LLM(tmp_path, **OPTIONS | options)
    model = load_model(tmp_path, backend(torch.device("cpu")), LoadOptions(dtype=torch.float32, load_format="dummy"))
    specs = model.kv_specs(16)
    assert [spec.kv_heads for spec in specs] == [2, 1, 1]
    block = 16 * (2 + 1 + 1) * 2 * 16 * 4  # tokens, heads, keys and values, head size, bytes per number
    assert sum(spec.bytes_per_block for spec in specs) == block
    assert llm.engine.scheduler.device_pool.total == 2**20 // block
    host = LLM(tmp_path, **OPTIONS | options, preemption_mode="swap", swap_space=2**-10).engine.scheduler.swap_space
    assert host and host.num_blocks == 2**20 // block


def test_unknown_architecture_is_refused(tmp_path: Path) -> None:
    save(LlamaConfig(**SMALL), tmp_path)
    as_architecture(tmp_path, "MixedForCausalLM")
    with pytest.raises(PenstockError, match=r"architecture MixedForCausalLM is not supported; supported: Bamba"):
        tokens(tmp_path)
