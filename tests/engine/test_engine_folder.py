"""Engine folders: answers equal to the checkpoint's, recorded limits, resumed builds, and damaged folders."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from checkpoints import SMALL, save
from quantized import KINDS, quantize
from serving import Served
from test_lora import adapter
from test_speculation import with_head
from transformers import Qwen2Config
from xxhash import xxh3_64_intdigest

from penstock import LLM, PenstockError, SamplingParams, demo
from penstock.cli.main import main
from penstock.config.options import EngineOptions
from penstock.core.lora import LoRARequest
from penstock.engine.engine_folder import build_engine

OPTIONS: dict[str, Any] = {"block_size": 16, "num_gpu_blocks_override": 60, "weight_cache_dir": "none"}
PROMPTS = [list(range(5 * i, 5 * i + 40)) for i in range(3)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of a model family with biases and a separate language model head."""
    folder = tmp_path_factory.mktemp("checkpoint")
    save(Qwen2Config(**SMALL, tie_word_embeddings=False), folder)
    return folder


@pytest.fixture(scope="module")
def engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    build(checkpoint, folder, recorded={"max_num_seqs": 7, "max_model_len": 200})
    return folder


def build(
    checkpoint: Path, folder: Path, workers: int = 1, recorded: dict[str, int | str] | None = None, **options: Any
) -> None:
    build_engine(EngineOptions(model=str(checkpoint), **options), folder, workers=workers, recorded=recorded)


def answers(folder: Path, **options: Any) -> tuple[str, list[Any]]:
    """Return the weights version, and the generated tokens with logprobs of each prompt."""
    llm = LLM(folder, **OPTIONS | options)
    with closing(llm.engine):
        return llm.engine.info.weights_version, generated(llm)


def generated(llm: LLM, **options: Any) -> list[Any]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, **options)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "w4a8"},
        {"dtype": "float32", "ops": "reference"},
        {
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 2,
            "pipeline_parallel_layers": "1,2",
            "quantization": "w8a8",
        },
    ],
    ids=str,
)
def test_engine_folder_answers_equal_deleted_checkpoint(
    checkpoint: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    shutil.copytree(checkpoint, tmp_path / "checkpoint")
    build(tmp_path / "checkpoint", tmp_path / "engine", workers=options.get("pipeline_parallel_size", 1), **options)
    shutil.rmtree(tmp_path / "checkpoint")
    sizes = [options.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline")]
    assert len(list((tmp_path / "engine").glob("rank_*"))) == sizes[0] * sizes[1]
    same_weights = {name: value for name, value in options.items() if name in ("quantization", "dtype", "ops")}
    ops = {name: value for name, value in options.items() if name == "ops"}
    assert answers(tmp_path / "engine", **ops) == answers(checkpoint, **same_weights)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("ops", ["reference", "cpu"])
@pytest.mark.parametrize("kind", ["gptq asymmetric, act-order, v2", "fp8 blocks"])
def test_build_from_quantized_checkpoint_keeps_answers(tmp_path: Path, kind: str, ops: str) -> None:
    if ops == "cpu":
        pytest.importorskip("penstock.ops.cpu", reason="the CPU kernels were not built", exc_type=ImportError)
    quantize(tmp_path / "checkpoint", KINDS[kind])
    build(tmp_path / "checkpoint", tmp_path / "engine", ops=ops)
    assert answers(tmp_path / "engine", ops=ops) == answers(tmp_path / "checkpoint", ops=ops)


@pytest.mark.slow
def test_replicas_share_memory_of_weights(engine: Path) -> None:
    flags = ("--data-parallel-size", "2", "--num-gpu-blocks-override", "20")
    with Served(str(engine), *flags) as served:
        prompt = {"model": str(engine), "prompt": PROMPTS[0], "max_tokens": 3}
        assert httpx.post(f"{served.url}/completions", json=prompt, timeout=60).status_code == 200
        mapped = [mapping(pid, engine / "rank_0" / "weights-00000.packed") for pid in served.pids["engine"]]
    assert len(mapped) == 2
    assert all(sizes["Rss"] > 0 == sizes["Private_Dirty"] + sizes["Private_Clean"] for sizes in mapped)


def mapping(pid: int, file: Path) -> dict[str, int]:
    """Return the sizes (KiB) of a process's memory mapping of a file, by name in /proc/PID/smaps."""
    text = Path(f"/proc/{pid}/smaps").read_text()
    begin = re.search(rf"^\S+ r--s .* {file.stat().st_ino} +{file}$", text, re.MULTILINE)
    assert begin, text
    return {
        name: int(size)
        for name, size in re.findall(r"^(\w+): +(\d+) kB$", text[begin.end() :].split("VmFlags")[0], re.MULTILINE)
    }


@pytest.mark.slow
def test_engine_folder_supports_lora_drafts_and_weight_updates(checkpoint: Path, tmp_path: Path) -> None:
    adapter(checkpoint, tmp_path / "adapter")
    other = with_head(tmp_path / "head", accurate=True)
    build(other, tmp_path / "engine", dtype="float32")
    shutil.copytree(other, tmp_path / "new")
    changed = (tmp_path / "new" / "model.safetensors").read_bytes()
    (tmp_path / "new" / "model.safetensors").write_bytes(changed[:-400] + bytes(400))
    expected = answers(other, dtype="float32")
    for speculative in (
        {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False},
        {"method": "draft_model", "model": str(tmp_path / "engine"), "adaptive": False},
    ):
        llm = LLM(tmp_path / "engine", speculative_config=speculative, **OPTIONS)
        assert (llm.engine.info.weights_version, generated(llm)) == expected
        assert llm.engine.scheduler.speculation and llm.engine.scheduler.speculation.stats.accepted_tokens
    llm = LLM(tmp_path / "engine", **OPTIONS)
    llm.update_weights(tmp_path / "new")
    assert generated(llm) == answers(tmp_path / "new", dtype="float32")[1]
    llm.update_weights(tmp_path / "engine")
    llm.sleep(2)
    llm.wake_up()
    assert (llm.engine.info.weights_version, generated(llm)) == expected
    build(checkpoint, tmp_path / "plain")
    lora = {"lora_request": LoRARequest("a", 1, str(tmp_path / "adapter"))}
    found = [generated(LLM(folder, enable_lora=True, **OPTIONS), **lora) for folder in (tmp_path / "plain", checkpoint)]
    assert found[0] == found[1]


def test_recorded_limits_are_default_options(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def configured(*flags: str) -> dict[str, Any]:
        assert main(["config", "--json", *flags]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]

    found = configured("--model", str(engine))
    assert found["max_num_seqs"] == {**found["max_num_seqs"], "value": 7, "source": str(engine)}
    assert (found["max_model_len"]["value"], found["dtype"]["value"]) == (200, "float32")
    assert configured("--model", str(engine), "--max-num-seqs", "3")["max_num_seqs"]["value"] == 3
    assert configured("--compat", "paddlenlp", "--model", str(engine))["max_num_seqs"]["value"] == 7
    llm = LLM(engine, compat="fastdeploy", **OPTIONS)
    assert (llm.options.max_num_seqs, llm.engine.max_model_len) == (7, 200)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size: is 2, but .* was built with 1: leave it out, or build"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size: is 2, but .* was built with 1"),
        ({"quantization": "w8a8"}, "quantization: is w8a8, but .* was built with none"),
        ({"dtype": "bfloat16"}, "dtype: is bfloat16, but .* was built with float32"),
        (
            {"ops": "reference"},
            "built for kernels with layout cpu-3; the kernels here use layout reference-3; build it",
        ),
    ],
)
def test_options_contradicting_the_build_are_refused(engine: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PenstockError, match=message) as refused:
        LLM(engine, **OPTIONS | options)
    assert "\n" not in str(refused.value)


def edit_config(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Return a function that damages an engine folder by changing its ``config.json``."""

    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        change(config["engine_config"])
        (folder / "config.json").write_text(json.dumps(config))

    return apply


def edit_shard(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Return a function that damages an engine folder by changing the bytes of its only shard."""

    def apply(folder: Path) -> None:
        shard = folder / "rank_0" / "weights-00000.packed"
        shard.write_bytes(change(shard.read_bytes()))

    return apply


def edit_header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Return a function that damages an engine folder by changing its shard's header (with a correct checksum)."""

    def changed(data: bytes) -> bytes:
        length = int.from_bytes(data[8:16], "little")
        header = msgspec.json.decode(data[24 : 24 + length])
        change(header["entries"])
        text = msgspec.json.encode(header).ljust(length)
        numbers = b"".join(number.to_bytes(8, "little") for number in (len(text), xxh3_64_intdigest(text)))
        return data[:8] + numbers + text + data[24 + length :]

    return edit_shard(changed)


def flip_bits(data: bytes) -> bytes:
    changed, rng = bytearray(data), random.Random(0)
    for _ in range(300):
        changed[rng.randrange(2**21, len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def replace_shard_by_fifo(folder: Path) -> None:
    (folder / "rank_0" / "weights-00000.packed").unlink()
    os.mkfifo(folder / "rank_0" / "weights-00000.packed")


REBUILD_HINT = r": run the same penstock build again \(from the checkpoint /.*\)$"
DAMAGES = {
    "cut": (edit_shard(lambda data: data[:-100]), r"cannot be used .it has \d+ bytes instead of \d+." + REBUILD_HINT),
    "cut in its header": (edit_shard(lambda data: data[:50]), "cannot be used .its header is damaged." + REBUILD_HINT),
    "empty": (edit_shard(lambda data: b""), "cannot be used .it does not begin with .*" + REBUILD_HINT),
    "flipped bits": (edit_shard(flip_bits), " is damaged" + REBUILD_HINT),
    "other header": (
        edit_shard(lambda data: data.replace(b"float32", b"float23")),
        "its header is damaged.*" + REBUILD_HINT,
    ),
    "not a shard": (edit_shard(lambda data: b"x" * len(data)), "cannot be used" + ".*" + REBUILD_HINT),
    "fifo": (replace_shard_by_fifo, "it is not a regular file.*" + REBUILD_HINT),
    "missing shard": (
        lambda folder: (folder / "rank_0" / "weights-00000.packed").unlink(),
        "is missing or empty" + REBUILD_HINT,
    ),
    "missing rank": (lambda folder: shutil.rmtree(folder / "rank_0"), "rank_0 is missing or empty" + REBUILD_HINT),
    "missing tensor": (
        edit_header(lambda entries: entries.pop("model.norm.weight")),
        "lacks model.norm.weight" + REBUILD_HINT,
    ),
    "other shape": (
        edit_header(lambda entries: entries["model.norm.weight"][""].update(shape=[63])),
        "is damaged" + REBUILD_HINT,
    ),
    "outside the file": (
        edit_header(
            lambda entries: entries.pop("model.norm.weight") and entries["lm_head"]["values"].update(offset=2**40)
        ),
        "its header is inconsistent.*" + REBUILD_HINT,
    ),
    "misaligned": (
        edit_header(
            lambda entries: entries["lm_head"]["values"].update(offset=entries["lm_head"]["values"]["offset"] + 1)
        ),
        "its header is inconsistent.*" + REBUILD_HINT,
    ),
    "other version": (edit_config(lambda built: built.update(producer="9.9")), "by Penstock 9.9; this is"),
    "other layout": (
        edit_config(lambda built: built.update(layout="cpu-9")),
        "with layout cpu-9; the kernels here use",
    ),
    "other weights": (
        edit_config(lambda built: built.update(weights_version="x")),
        "are from different builds" + ".*" + REBUILD_HINT,
    ),
    "other layers": (edit_config(lambda built: built.update(layers=[2])), "stages with 2 layers"),
    "size of zero": (
        edit_config(lambda built: built.update(tensor_parallel_size=0)),
        "engine_config is inconsistent",
    ),
    "unexpected option": (
        edit_config(lambda built: built.update(options={"chat_template": "/etc/passwd"})),
        "engine_config is inconsistent",
    ),
    "text instead of numbers": (edit_config(lambda built: built.update(layers="../..")), "engine_config is damaged"),
    "unfinished": (
        lambda folder: (folder / "config.json").rename(folder / "config.json.part"),
        "has not finished: run the same command again",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_folder_is_refused_with_one_line_message(engine: Path, tmp_path: Path, damage: str) -> None:
    shutil.copytree(engine, tmp_path / "engine")
    change, message = DAMAGES[damage]
    change(tmp_path / "engine")
    with pytest.raises(PenstockError) as refused:
        LLM(tmp_path / "engine", **OPTIONS)
    assert re.search(message, str(refused.value)) and "\n" not in str(refused.value), refused.value


def digest(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


BUILD = [sys.executable, "-m", "penstock.cli.main", "build", "--tensor-parallel-size", "2", "--quantization", "wint8"]
BUILD += ["--max-shard-size", "200KB"]


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "kills"), [(1, 1), pytest.param(2, 20, marks=pytest.mark.thorough)])
def test_killed_build_is_resumed(tmp_path: Path, workers: int, kills: int) -> None:
    assert main([*BUILD[3:], "--output-dir", str(tmp_path / "whole")]) == 0
    expected, folder, rng = digest(tmp_path / "whole"), tmp_path / "killed", random.Random(workers)
    command = [*BUILD, "--workers", str(workers), "--output-dir", str(folder)]
    for _ in range(kills):
        number = rng.randrange(2 * len(expected))
        building = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        while building.poll() is None and written(folder) < number:
            pass
        building.kill()
        building.wait()
        if (folder / "config.json").exists():  # the build was completed before the kill
            assert digest(folder) == expected
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*.packed")}
    assert main(command[3:]) == 0
    assert digest(folder) == expected
    assert all(path.stat().st_mtime_ns == times[path] for path in times)


def written(folder: Path) -> int:
    """Return a measure of the build's progress: one per partial file and two per complete file."""
    return sum(2 - path.name.endswith(".part") for path in folder.rglob("*.*"))


def test_second_build_in_same_folder_replaces_first(tmp_path: Path) -> None:
    for options in ({"quantization": "w8a8", "tensor_parallel_size": 2}, {}):
        build(demo.CHAT, tmp_path / "engine", **options)
    build(demo.CHAT, tmp_path / "new")
    assert digest(tmp_path / "engine") == digest(tmp_path / "new")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--output-dir OTHER", "output_dir: OTHER already has notes.txt: name an empty or new folder"),
        (
            "--output-dir CHECKPOINT --model CHECKPOINT",
            "output_dir: CHECKPOINT is the folder of the model: name another",
        ),
        ("--output-dir NOTES", "output_dir: NOTES cannot be written: File exists"),
        ("--output-dir NEW --model ENGINE", "model: ENGINE is an engine folder already: name the checkpoint"),
        ("--output-dir NEW --tensor-parallel-size 7", "--tensor-parallel-size: "),
        ("--output-dir NEW --pipeline-parallel-size 32", "--pipeline-parallel-size: is 32, more than"),
        (
            "--output-dir NEW --max-model-len 999999",
            "--max-model-len: must be at most 2048",
        ),
        ("--output-dir NEW --workers 0", "workers: must be at least 1, is 0"),
        ("--output-dir NEW --max-shard-size 5XB", "'5XB' is not a size such as 5GB or 500MB"),
    ],
)
def test_invalid_build_is_refused(
    engine: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, message: str
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    paths = {"OTHER": "other", "NOTES": "other/notes.txt", "NEW": "new"}
    names = {name: tmp_path / path for name, path in paths.items()} | {"ENGINE": engine, "CHECKPOINT": checkpoint}
    for name, path in names.items():
        flags, message = flags.replace(name, str(path)), message.replace(name, str(path))
    try:
        status: object = main(["build", *flags.split()])
    except SystemExit as ended:
        status = ended.code
    output = capsys.readouterr()
    assert status == 2 and message in output.err, output.err
    assert not (tmp_path / "new").exists()
