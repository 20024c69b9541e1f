"""Reading of checkpoint tensors: rows of a rank, layers of a stage, PyTorch files, stored dtypes, and versions."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import SMALL, save
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, Qwen2Config

from penstock import ops
from penstock.core import PenstockError
from penstock.layers import BuildContext, ColumnParallelLinear
from penstock.models import read_config
from penstock.models.loader import LoadOptions, load_model
from penstock.models.registry import find_family
from penstock.models.weights import Checkpoint
from penstock.parallel import SINGLE_RANK, Group, shard_heads, shard_outputs
from penstock.parallel.shared_memory import SharedMemoryGroup, create_memory

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save(Qwen2Config(**SMALL | {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 512}), folder)
    return folder


def groups(size: int) -> list[Group]:
    memory = create_memory()
    return [SharedMemoryGroup(memory, rank, size) for rank in range(size)]


def context(folder: Path, group: Group = SINGLE_RANK, layers: range | None = None) -> tuple[BuildContext, Checkpoint]:
    weights = Checkpoint(folder)
    return BuildContext(ops.backend(CPU), weights, torch.float32, CPU, 64, group=group, layers=layers), weights


def test_version_depends_on_every_tensor_and_not_on_the_path(folder: Path, tmp_path: Path) -> None:
    """The checkpoint has tensors of all sizes, in several files."""
    tensors = {"model.embed_tokens.weight": torch.zeros(2**14, 2**10), "a": torch.ones(2**11, 40), "b": torch.ones(1)}
    shutil.copy(folder / "config.json", tmp_path)
    save_file({}, tmp_path / "model.safetensors")

    def version(changed: str = "") -> str:
        given = {name: tensor + (name == changed) for name, tensor in tensors.items()}
        save_file({name: given.pop(name) for name in ("a", "b")}, tmp_path / "other.safetensors")
        save_file(given, tmp_path / "model.safetensors")
        return Checkpoint(tmp_path).version

    before = version()
    assert version() == before
    assert len({before, *(version(name) for name in tensors)}) == 4
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder / name, tmp_path)
    (tmp_path / "other.safetensors").unlink()
    assert Checkpoint(tmp_path).version == Checkpoint(folder).version


@pytest.mark.parametrize("ranks", [1, 2])
def test_rank_reads_only_its_rows(folder: Path, ranks: int) -> None:
    config = read_config(folder)
    stored = load_file(folder / "model.safetensors")
    whole = sum(tensor.nbytes for name, tensor in stored.items() if "norm" in name)
    split = sum(tensor.nbytes for tensor in stored.values()) - whole
    for group in groups(ranks):
        build, weights = context(folder, group)
        find_family(config.architecture, config.architecture).build(build, config, 0)
        assert weights.bytes_read == whole + split / ranks


def test_stage_reads_only_its_layers(folder: Path) -> None:
    """The first stage also reads the embedding; the last stage also reads the last norm and the head (the tied
    embedding)."""
    config = read_config(folder)
    stored = load_file(folder / "model.safetensors")
    for layers in (range(2), range(2, 3)):
        build, weights = context(folder, layers=layers)
        find_family(config.architecture, config.architecture).build(build, config, 0)
        names = ["model.embed_tokens", *(f"model.layers.{number}." for number in layers)]
        names += ["model.norm"] if layers.stop == 3 else []
        own = [tensor.nbytes for name, tensor in stored.items() if name.startswith(tuple(names))]
        assert weights.bytes_read == sum(own) < sum(tensor.nbytes for tensor in stored.values())


def test_reading_rows_touches_only_their_pages(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(4096, 1024)}, path)
    weights = Checkpoint(tmp_path)
    assert weights.read("a", 4096, 1024, rows=(1024, 2048)).sum() == 1024 * 1024
    mappings = re.findall(
        rf"{re.escape(str(path))}\n(?:\w+:.*\n)*?Rss: +(\d+) kB", Path("/proc/self/smaps").read_text()
    )
    assert 4096 <= sum(map(int, mappings)) < 8192, f"KiB of the file's 16384 KiB that are mapped: {mappings}"


def test_outputs_of_ranks_equal_outputs_of_one_rank(folder: Path) -> None:
    """The bits are identical, since every output is a sum on one rank. Each of the merged matrices is split."""
    names, sizes = [f"model.layers.1.self_attn.{part}_proj" for part in "qkv"], [128, 64, 64]
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))

    def parts(group: Group) -> list[Tensor]:
        shards = [shard_outputs(group, size) for size in sizes]
        layer = ColumnParallelLinear(context(folder, group)[0], names, 128, shards, bias=True)
        return list(layer(x).split([shard.size for shard in shards], -1))

    whole = parts(SINGLE_RANK)
    for size in (2, 3):
        for *shares, both in zip(*(parts(group) for group in groups(size)), whole, strict=True):
            assert torch.equal(torch.cat(shares, -1), both)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "shares"),
    [
        (8, 4, 2, [(0, 4, 0, 2), (4, 8, 2, 4)]),
        (8, 4, 3, [(0, 2, 0, 1), (2, 4, 1, 2), (4, 8, 2, 4)]),
        (8, 2, 4, [(0, 2, 0, 1), (2, 4, 0, 1), (4, 6, 1, 2), (6, 8, 1, 2)]),
    ],
)
def test_ranks_share_query_and_kv_heads(heads: int, kv_heads: int, ranks: int, shares: list[tuple[int, ...]]) -> None:
    """A rank has the KV heads of its query heads. With fewer KV heads than ranks, several ranks have the same KV
    heads."""
    found = [shard_heads(group, heads, kv_heads) for group in groups(ranks)]
    assert [(*queries.rows, *keys.rows) for queries, keys in found] == shares


def test_heads_that_ranks_cannot_share_are_refused(folder: Path) -> None:
    with pytest.raises(PenstockError, match="3 ranks cannot share 4 query heads"):
        load_model(folder, ops.backend(CPU), LoadOptions(group=groups(3)[0]))


@pytest.mark.parametrize("shards", [1, 3])
def test_pytorch_files_are_read(folder: Path, tmp_path: Path, shards: int) -> None:
    """Reads whole tensors and ranges of rows. The version changes with the weights."""
    tensors = dict(sorted(load_file(folder / "model.safetensors").items()))
    shutil.copy(folder / "config.json", tmp_path)

    def write(tensors: dict[str, Tensor]) -> Checkpoint:
        if shards == 1:
            torch.save(tensors, tmp_path / "pytorch_model.bin")
            return Checkpoint(tmp_path)
        places = {name: f"pytorch_model-{number % shards}.bin" for number, name in enumerate(tensors)}
        for file in set(places.values()):
            own = {name: tensors[name] for name in places if places[name] == file}
            torch.save(own, tmp_path / file)
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
        return Checkpoint(tmp_path)

    written = write(tensors)
    before = written.version, written.state
    for name, tensor in tensors.items():
        assert torch.equal(written.read(name, *tensor.shape), tensor)
        assert torch.equal(written.read(name, *tensor.shape, rows=(8, 24)), tensor[8:24])
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}
    again = write(parameters)
    assert not again.read("model.norm.weight", 128).requires_grad
    changed = write(tensors | {"model.norm.weight": tensors["model.norm.weight"] + 1})
    assert changed.version != before[0] and changed.state != before[1]
    model = load_model(tmp_path, ops.backend(CPU))
    assert model.weights_version == changed.version


def test_pickle_of_other_objects_than_tensors_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    torch.save({"model.norm.weight": Path("x")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(PenstockError, match=r"is not loaded, because its pickle would run pathlib\.\w+\. Convert it"):
        Checkpoint(tmp_path)


def test_tensors_are_read_in_their_stored_dtype(tmp_path: Path) -> None:
    save(LlamaConfig(**SMALL), tmp_path)
    path = tmp_path / "model.safetensors"
    own = {
        "q": torch.arange(-64, 64, dtype=torch.int8).view(16, 8),
        "z": torch.arange(4, dtype=torch.int32),
        "s": torch.ones(16, dtype=torch.float16),
        "f": torch.ones(16, 8).to(torch.float8_e4m3fn),
    }
    save_file(load_file(path) | own, path)
    build, weights = context(tmp_path)
    for name, expected in own.items():
        found = build.read_weight(name, *expected.shape, as_stored=True)
        assert found.dtype == expected.dtype and torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(build.read_weight("q", 16, 8, rows=(4, 8), as_stored=True), own["q"][4:8])
    assert build.read_weight("s", 16).dtype == torch.float32
    with pytest.raises(PenstockError, match=r"tensor q is of torch\.int8"):
        build.read_weight("q", 16, 8)
    with pytest.raises(PenstockError, match=r"has shape \(16, 8\)"):
        build.read_weight("q", 8, 16, rows=(0, 1), as_stored=True)
    assert weights.has("q") and not weights.has("r")
