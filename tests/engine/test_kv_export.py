"""KV export: a step copies its keys and values layer by layer to a transfer buffer; another KV cache imports them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import SMALL, save
from torch import Tensor
from transformers import LlamaConfig

from penstock.checkpoint.kv_spec import PROGRESS_BITS
from penstock.engine.worker.model_runner import ModelRunner
from penstock.models.loader import LoadOptions, load_model
from penstock.models.model import Model
from penstock.ops import AttentionMetadata, Batch, LayerExport, Ops, backend

CPU = torch.device("cpu")
SLOT_TOKENS, TOKENS = 32, 150


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save(LlamaConfig(**SMALL), folder)
    return folder


@pytest.fixture(params=["cpu", "reference"])
def ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    if request.param == "cpu":
        pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)
    threads = torch.get_num_threads()
    yield backend(CPU, request.param)
    torch.set_num_threads(threads)


def runner(model: Model, ops: Ops, block_size: int, quantization: str, export: list[LayerExport]) -> ModelRunner:
    specs = model.kv_specs(block_size, quantization)
    made = ModelRunner(
        model, ops, CPU, specs, max_tokens=TOKENS, max_rows=2, max_len=TOKENS + block_size, block_size=block_size
    )
    made.init_cache(-(-TOKENS // block_size) + 1, 0, export)
    return made


def batch_of(tokens: Tensor, first: int, block_size: int) -> Batch:
    """Return a batch with the tokens of one sequence from position ``first`` on, with a reversed block table."""
    positions, blocks = torch.arange(first, len(tokens)), -(-TOKENS // block_size) + 1
    table = torch.arange(blocks, dtype=torch.int32).flip(0)
    count, length = len(positions), len(tokens)
    return Batch(
        token_ids=tokens[first:],
        positions=positions,
        slot_mapping=table.long()[positions // block_size] * block_size + positions % block_size,
        attention=AttentionMetadata(torch.tensor([0, count]).int(), torch.tensor([length]).int(), table[None]),
        logits_indices=torch.tensor([count - 1]),
        logits_attention=AttentionMetadata(torch.tensor([0, 1]).int(), torch.tensor([length]).int(), table[None]),
    )


@pytest.mark.parametrize("quantization", ["", "int8", "fp8"])
def test_imported_kv_gives_same_hidden_states(checkpoint: Path, ops: Ops, quantization: str) -> None:
    if quantization == "fp8" and ops.NAME == "cpu":
        pytest.skip("an fp8 KV cache needs a GPU")
    model = load_model(checkpoint, ops)
    layouts = model.transfer_layouts(SLOT_TOKENS, quantization)
    slots = -(-TOKENS // SLOT_TOKENS)
    buffer = torch.zeros(slots * layouts[0].slot_bytes, dtype=torch.uint8)
    progress = torch.zeros(1, dtype=torch.int64)
    sender = runner(model, ops, 16, quantization, [LayerExport(buffer, layout, progress) for layout in layouts])
    tokens = torch.randint(2, SMALL["vocab_size"], (TOKENS,), generator=torch.Generator().manual_seed(0))
    for step, (first, end) in enumerate([(0, 70), (70, TOKENS - 1), (TOKENS - 1, TOKENS)]):
        batch = batch_of(tokens[:end], first, 16)
        if end < TOKENS:
            batch.export_places, batch.export_step = torch.arange(first, end), 7 + step
        hidden = sender.forward(batch).clone()
        assert progress.item() == (min(7 + step, 8) << PROGRESS_BITS) + len(layouts)
    ends = [*(layout.offset for layout in layouts[1:]), layouts[0].slot_bytes]
    parts = [slice(layout.offset, end) for layout, end in zip(layouts, ends, strict=True)]
    assert all(buffer.view(slots, -1)[:-1, part].any(-1).all() for part in parts)

    receiver = runner(model, ops, 64, quantization, [])
    before = batch_of(tokens[: TOKENS - 1], 0, 64)
    for cache, layout in zip(receiver.cache, layouts, strict=True):
        ops.import_kv(cache, before.slot_mapping, buffer, before.positions, layout)
    last = batch_of(tokens, TOKENS - 1, 64)
    again = receiver.forward(last)
    assert torch.equal(again, hidden) if ops.BATCH_INVARIANT else torch.allclose(again, hidden, atol=1e-3)
    for cache, layout, part in zip(sender.cache, layouts, parts, strict=True):
        whole = torch.zeros_like(buffer)
        ops.export_kv(cache, batch_of(tokens[:-1], 0, 16).slot_mapping, whole, before.positions, layout)
        assert torch.equal(whole.view(slots, -1)[:, part], buffer.view(slots, -1)[:, part])


def test_layouts_of_stages_equal_layouts_of_whole_model(checkpoint: Path) -> None:
    ops = backend(CPU, "reference")
    whole = load_model(checkpoint, ops).transfer_layouts(SLOT_TOKENS)
    stages = [
        load_model(checkpoint, ops, LoadOptions(layers=layers)).transfer_layouts(SLOT_TOKENS)
        for layers in (range(1), range(1, 3))
    ]
    assert [*stages[0], *stages[1]] == whole
