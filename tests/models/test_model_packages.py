"""An installed package adds a family of models in all processes, with the code of docs/cookbook/add_a_model.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import torch
from checkpoints import SMALL, save
from safetensors.torch import load_file, save_file
from serving import Served
from test_config_defaults import CONFIGS, drawn
from test_docs import DOCS, blocks
from transformers import LlamaConfig

NEW_TOKENS = 12
GENERATE = """
import json, sys
from penstock import LLM, SamplingParams

ranks = int(sys.argv[4])
llm = LLM(sys.argv[1], dtype="float32", num_gpu_blocks_override=60, block_size=16, tensor_parallel_size=ranks)
params = SamplingParams(temperature=0, max_tokens=int(sys.argv[2]), ignore_eos=True)
print(json.dumps([each.outputs[0].token_ids for each in llm.generate(json.loads(sys.argv[3]), params, use_tqdm=False)]))
"""
READ = """
import json, sys
from pathlib import Path
from penstock.models import read_config
from penstock.planning.model_size import size_of

for folder in sys.argv[1:]:
    assert size_of(read_config(Path(folder))).layer_weights
assert "torch" not in sys.modules
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables. ``PYTHONPATH`` has the package of the page, and a package that cannot be imported."""
    source, target = tmp_path_factory.mktemp("penstock-acme"), tmp_path_factory.mktemp("site-packages")
    code = dict(blocks(DOCS / "cookbook" / "add_a_model.md"))
    (source / "penstock_acme.py").write_text(code["python"])
    (source / "pyproject.toml").write_text(code["toml"])
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True)
    broken = target / "penstock_broken-1.0.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: penstock-broken\nVersion: 1.0\n")
    (broken / "entry_points.txt").write_text("[penstock.models]\nother = penstock_broken:FAMILY\n")
    return {**os.environ, "PYTHONPATH": f"{target}:{os.environ.get('PYTHONPATH', '')}"}


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint of ``AcmeForCausalLM``, and the Llama of transformers with its weights."""
    folder = tmp_path_factory.mktemp("acme")
    llama = save(LlamaConfig(**SMALL, mlp_bias=True), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["AcmeForCausalLM"], "model_type": "acme", "depth": config.pop("num_hidden_layers")}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    names = {"self_attn": "attention", "mlp": "feed_forward"}
    renamed = {".".join(names.get(part, part) for part in name.split(".")): each for name, each in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, llama


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_family_of_a_package_matches_transformers(packages: dict[str, str], acme: tuple[Path, Any], ranks: int) -> None:
    folder, llama = acme
    rng = Random(0)
    prompts = [[rng.randrange(2, 300) for _ in range(length)] for length in (5, 70)]
    command = [sys.executable, "-c", GENERATE, str(folder), str(NEW_TOKENS), json.dumps(prompts), str(ranks)]
    ran = subprocess.run(command, env=packages, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = [llama.generate(torch.tensor([each]), **options)[0, len(each) :].tolist() for each in prompts]
    assert json.loads(ran.stdout) == expected
    assert "model family other of package penstock-broken is not available" in ran.stderr


@pytest.mark.slow
def test_engine_and_api_processes_load_the_family_of_a_package(
    packages: dict[str, str], acme: tuple[Path, Any]
) -> None:
    folder, llama = acme
    path = {"PYTHONPATH": packages["PYTHONPATH"]}
    with Served("--model", str(folder), "--num-gpu-blocks-override", "100", environment=path) as server:
        body = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/completions", json=body, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 4, answer
        size = httpx.get(f"{server.root}/api/tags").json()["models"][0]["details"]["parameter_size"]
        matrices = sum(each.numel() for each in llama.parameters() if each.dim() > 1)
        assert size == f"{matrices / 1000:.1f}K"


@pytest.mark.slow
def test_architecture_is_refused_without_the_package(acme: tuple[Path, Any]) -> None:
    ran = subprocess.run([sys.executable, "-c", GENERATE, str(acme[0]), "1", "[]", "1"], capture_output=True, text=True)
    assert ran.returncode and "architecture AcmeForCausalLM is not supported; supported:" in ran.stderr


def test_configuration_of_every_family_is_read_without_torch(tmp_path: Path) -> None:
    for number, family in enumerate(CONFIGS):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(drawn(family, 0)))
    subprocess.run([sys.executable, "-c", READ, *map(str, tmp_path.iterdir())], check=True)
