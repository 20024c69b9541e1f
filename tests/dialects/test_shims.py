"""``penstock shims`` writes wrapper commands and modules of other systems; the package itself installs none of them."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from repository import ROOT

from penstock.cli.main import main

VLLM_MODULES = {
    f"modules/vllm/{name}.py"
    for name in (
        "__init__ beam_search engine/arg_utils engine/async_llm_engine engine/llm_engine entrypoints/llm inputs "
        "lora/request outputs pooling_params sampling_params utils/argparse_utils v1/engine/async_llm "
        "v1/engine/llm_engine v1/metrics/reader"
    ).split()
}
FILES = {
    "triton": {
        "tritonserver",
        "launch_triton_server.py",
        "fill_template.py",
        "convert_checkpoint.py",
        "quantize.py",
        "trtllm-build",
        "tensorrtllm_backend/scripts/launch_triton_server.py",
        "tensorrtllm_backend/tools/fill_template.py",
        "TensorRT-LLM/examples/qwen/convert_checkpoint.py",
        "TensorRT-LLM/examples/quantization/quantize.py",
    },
    "paddlenlp": {"start_server", "stop_server", "download_model.py"},
    "bladellm": {"blade_llm_server", "blade_llm_quantize", "blade_llm_split"},
    "fastdeploy": {
        "modules/fastdeploy/__init__.py",
        "modules/fastdeploy/engine/sampling_params.py",
        "modules/fastdeploy/entrypoints/llm.py",
        "modules/fastdeploy/entrypoints/openai/api_server.py",
        "modules/fastdeploy/router/launch.py",
    },
    "vllm": {
        "vllm",
        *VLLM_MODULES,
        "modules/vllm/entrypoints/api_server.py",
        "modules/vllm/entrypoints/openai/api_server.py",
    },
    "ascend-vllm": {
        *VLLM_MODULES,
        "llm_tools/PD_separate/start_servers.sh",
        "llm_tools/PD_separate/pd_ranktable_tools.py",
        "modules/vllm/entrypoints/api_server.py",
        "modules/vllm/entrypoints/openai/api_server.py",
    },
}


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def run(*command: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)  # type: ignore[call-overload]


def test_package_installs_only_penstock_command() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(project["scripts"]) == {"penstock"}


@pytest.mark.parametrize("system", FILES)
def test_shims_of_system_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str], system: str) -> None:
    assert main(["shims", str(tmp_path), system]) == 0
    assert files(tmp_path) == FILES[system]
    assert all(os.access(tmp_path / name, os.X_OK) for name in files(tmp_path))
    output = capsys.readouterr().out
    assert (f"export PATH={tmp_path}:$PATH\n" in output) == any("/" not in name for name in FILES[system])
    assert (f"export PYTHONPATH={tmp_path}/modules" in output) == any(
        name.startswith("modules/") for name in FILES[system]
    )


def test_all_or_named_shims_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shims", str(tmp_path / "all")]) == 0
    assert files(tmp_path / "all") == set().union(*FILES.values())
    assert main(["shims", str(tmp_path / "one"), "trtllm-build", "start_server"]) == 0
    assert files(tmp_path / "one") == {"trtllm-build", "start_server"}
    capsys.readouterr()
    assert main(["shims", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[1] for line in lines} == files(tmp_path / "all")
    assert "penstock serve --compat triton" in next(line for line in lines if " tritonserver " in line)
    assert main(["shims", "--list", "bladellm"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["DIR", "tritonservr"],
            "'tritonservr' is neither a system nor a command, see --list; did you mean tritonserver?",
        ),
        ([], "DIR: is missing"),
        (["FILE"], "cannot write to "),
    ],
)
def test_invalid_arguments_are_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (tmp_path / "file").touch()
    paths = {"DIR": str(tmp_path / "dir"), "FILE": str(tmp_path / "file")}
    assert main(["shims", *[paths.get(argument, argument) for argument in arguments]]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_foreign_file_is_not_overwritten_without_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tritonserver").write_text("#!/bin/sh\necho the real one\n")
    assert main(["shims", str(tmp_path), "triton"]) == 2
    assert "tritonserver exists and was not written by" in capsys.readouterr().err
    assert files(tmp_path) == {"tritonserver"}, "no file may be written if one of them exists"
    assert main(["shims", str(tmp_path), "triton", "--force"]) == 0
    assert main(["shims", str(tmp_path), "triton"]) == 0, "existing shims must be overwritten without --force"
    assert "the real one" not in (tmp_path / "tritonserver").read_text()


@pytest.mark.slow
def test_shims_run_from_any_folder_and_python(tmp_path: Path) -> None:
    """The current folder has an unrelated ``penstock.py``, and some commands run in a Python without Penstock."""
    shims, here = tmp_path / "shims", tmp_path / "here"
    assert main(["shims", str(shims)]) == 0
    here.mkdir()
    (here / "penstock.py").write_text("raise SystemExit('the wrong one')")
    for name in ("quantize.py", "tritonserver", "blade_llm_split", "stop_server", "fill_template.py"):
        ran = run(shims / name, "--help", cwd=here)
        assert ran.returncode == 0 and ran.stdout.startswith("usage: "), ran.stderr
    for name in ("tensorrtllm_backend/tools/fill_template.py", "llm_tools/PD_separate/pd_ranktable_tools.py"):
        bare = run(sys.executable, "-I", "-S", shims / name, "--help", cwd=here)
        assert bare.returncode == 0 and bare.stdout.startswith("usage: "), bare.stderr


def test_interpreter_path_may_contain_space(tmp_path: Path) -> None:
    python = tmp_path / "my programs" / "python"
    python.parent.mkdir()
    python.symlink_to(os.path.realpath(sys.executable))
    environment = os.environ | {"PYTHONPATH": ":".join(filter(None, sys.path))}
    assert run(python, "-m", "penstock.cli.main", "shims", tmp_path / "shims", env=environment).returncode == 0
    for name in ("quantize.py", "blade_llm_split"):
        ran = run(tmp_path / "shims" / name, "--help", env=environment)
        assert ran.returncode == 0 and "my programs/python" in (tmp_path / "shims" / name).read_text(), ran.stderr


IMPORTS = {
    "fastdeploy": """
from fastdeploy import LLM, SamplingParams
from fastdeploy.entrypoints.llm import LLM as same_llm
from fastdeploy.engine.sampling_params import SamplingParams as same_params
(result,) = LLM(model="", num_gpu_blocks_override=64).chat(MESSAGES, SamplingParams(top_p=0))
assert same_llm is LLM and same_params is SamplingParams and result.finished and result.error_code == 200
print(result.outputs.text)
""",
    "vllm": """
from vllm import LLM, EngineArgs, LLMEngine, SamplingParams, TokensPrompt
from vllm.beam_search import BeamSearchOutput
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs as same_args
from vllm.engine.async_llm_engine import AsyncLLMEngine
from vllm.engine.llm_engine import LLMEngine as same_engine
from vllm.entrypoints.llm import LLM as same_llm
from vllm.inputs import TextPrompt
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams as same_params, StructuredOutputsParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.reader import Counter
assert (same_args, same_engine, same_llm, same_params) == (EngineArgs, LLMEngine, LLM, SamplingParams)
assert AsyncLLM is AsyncLLMEngine and BeamSearchOutput and LoRARequest and PoolingParams and RequestOutputKind
parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
parser.set_defaults(model="", num_gpu_blocks_override=64)
parser.add_argument("--max-tokens", type=int)
args = vars(parser.parse_args(["--max_tokens=20"]))
max_tokens = args.pop("max_tokens")
llm = LLM(**args)
params = llm.get_default_sampling_params()
params.max_tokens, params.temperature = max_tokens, 0
(result,) = llm.chat(MESSAGES, params, use_tqdm=False)
assert isinstance(result, RequestOutput) and result.finished
choice = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes"]))
for prompt in (TextPrompt(prompt="a"), TokensPrompt(prompt_token_ids=[5])):
    assert llm.generate(prompt, choice, use_tqdm=False)[0].outputs[0].text == "yes"
assert any(isinstance(metric, Counter) and metric.value for metric in llm.get_metrics())
print(result.outputs[0].text)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("system", IMPORTS)
def test_written_modules_are_importable(tmp_path: Path, system: str) -> None:
    assert main(["shims", str(tmp_path), system]) == 0
    messages = "MESSAGES = [{'role': 'user', 'content': 'What is the capital of Canada?'}]"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "modules")}
    ran = run(sys.executable, "-c", messages + IMPORTS[system], env=environment)
    assert ran.stdout == "The capital of Canada is Ottawa.\n", ran.stderr


def test_import_without_penstock_names_the_interpreter(tmp_path: Path) -> None:
    assert main(["shims", str(tmp_path), "fastdeploy"]) == 0
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'modules')!r}); from fastdeploy import LLM"
    ran = run(sys.executable, "-I", "-S", "-c", code)
    assert f"ImportError: penstock is not installed in this Python; run {sys.executable}" in ran.stderr
