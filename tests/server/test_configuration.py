"""One tree of options from defaults, a file, the environment and flags."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from penstock import PenstockError
from penstock.cli.flags import DEFAULT_PROFILE
from penstock.cli.main import main
from penstock.cli.serve import is_open
from penstock.config.profiles import load
from penstock.config.settings import settings
from penstock.config.sources import read


def write(folder: Path, text: str) -> Path:
    path = folder / "penstock.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_api_process_timeout_that_would_kill_healthy_processes_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("0.2", "4.9"):
        assert main(["config", "--api-process-timeout", wrong]) == 2
        assert f"must be at least 5 seconds, is {wrong}" in capsys.readouterr().err
    for right in ("0", "5", "60"):
        assert main(["config", "--api-process-timeout", right]) == 0


def test_each_source_overrides_the_one_before(tmp_path: Path) -> None:
    file = write(tmp_path, "port: 1\nmax-num-seqs: 2\nserver:\n  host: here\n  api_key: [one, two]\n")
    environment = {"PENSTOCK_MAX_NUM_SEQS": "3", "PENSTOCK_BLOCK_SIZE": "32", "PENSTOCK_SERVED_MODEL_NAME": "a,b"}
    found = read({"block_size": 16}, file, environment)
    configuration = found.configuration
    assert (configuration.server.port, configuration.server.host, configuration.server.api_key) == (
        1,
        "here",
        ("one", "two"),
    )
    assert (configuration.engine.max_num_seqs, configuration.engine.block_size) == (3, 16)
    assert configuration.server.served_model_name == ("a", "b")
    assert found.sources["port"] == str(file)
    assert found.sources["max_num_seqs"] == "PENSTOCK_MAX_NUM_SEQS"
    assert found.sources["block_size"] == "--block-size"
    assert found.sources["dtype"] == "default"


@pytest.mark.parametrize(
    ("text", "environment", "words"),
    [
        ("max_num_sequences: 3", {}, r"no such option, in .*did you mean max_num_seqs\?"),
        ("port: many", {}, "port: 'many' is wrong: it must be an integer, in "),
        ("port: 70000", {}, "port: .*65535"),
        ("- port", {}, "is not a YAML mapping of options"),
        ("port: [", {}, "cannot be read"),
        ("", {"PENSTOCK_BLOCK_SIZE": "zero"}, "block_size: .*in PENSTOCK_BLOCK_SIZE"),
        ("", {"PENSTOCK_LOG_FORMAT": "xml"}, "log_format: .*xml"),
    ],
)
def test_a_wrong_value_is_told_with_its_place(
    tmp_path: Path, text: str, environment: dict[str, str], words: str
) -> None:
    with pytest.raises(PenstockError, match=words):
        read({}, write(tmp_path, text), environment)


def test_what_kubernetes_sets_for_a_service_of_our_name_is_not_a_port(caplog: pytest.LogCaptureFixture) -> None:
    assert read({}, None, {"PENSTOCK_PORT": "tcp://10.0.0.1:80"}).configuration.server.port == 8000
    assert "PENSTOCK_PORT" in caplog.text


def test_a_file_of_vllm_means_what_its_flags_mean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = """
    model: /models/qwen
    tensor-parallel-size: 2
    max-num-seqs: 7
    disable-log-requests: true
    enable-auto-tool-choice: true
    enforce_eager: false
    uvicorn-log-level: warning
    allowed-origins: ["https://a", "https://b"]
    speculative-config: {method: ngram, num_speculative_tokens: 3}
    """
    for profile in (DEFAULT_PROFILE, load("vllm")):
        found = read({}, write(tmp_path, text), {}, profile)
        engine = found.configuration.engine
        assert (engine.tensor_parallel_size, engine.max_num_seqs) == (2, 7)
        assert json.loads(engine.speculative_config)["num_speculative_tokens"] == 3
        assert found.configuration.server.allowed_origins == ("https://a", "https://b")
        assert any(name.startswith("enable_auto_tool_choice, in ") for name in found.ignored)
        assert not any("enforce_eager" in name for name in found.ignored)


def test_a_file_is_overridden_by_the_flags_of_its_system_and_refused_as_they_are(tmp_path: Path) -> None:
    file = write(tmp_path, "max-model-len: 1k\nssl-ca-certs: /a\n")
    with pytest.raises(PenstockError, match=r"ssl_ca_certs, in .*yaml: "):
        read({}, file, {}, load("vllm"))
    file = write(tmp_path, "max-model-len: 1k\n")
    assert read({}, file, {}, load("vllm")).configuration.engine.max_model_len == 1000
    found = read({}, file, {}, load("vllm"), {"max_model_len": "2k"})
    assert found.configuration.engine.max_model_len == 2000


def test_the_printed_file_is_the_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--yaml", "--port", "9", "--kv-cache-ratio", "0.5"]) == 0
    file = write(tmp_path, capsys.readouterr().out)
    assert yaml.safe_load(file.read_text())["server"]["port"] == 9
    configuration = read({}, file, {}).configuration
    assert (configuration.server.port, configuration.engine.kv_cache_ratio) == (9, 0.5)


def test_every_value_is_shown_with_its_source_and_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--json", "--api-key", "geheim", "--port", "9"]) == 0
    printed = capsys.readouterr().out
    found = json.loads(printed)
    assert found.keys() == settings().keys()
    assert found["port"] == {"value": 9, "source": "--port", "unit": "", "help": settings()["port"].help}
    assert "geheim" not in printed
    assert main(["config", "--hf-token", "geheim"]) == 0
    assert "geheim" not in capsys.readouterr().out


def test_a_mistyped_flag_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--max-model-length", "5"]) == 2
    assert "did you mean --max-model-len?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "compat", "host"),
    [
        ({}, "", "127.0.0.1"),
        ({"api_key": "secret"}, "", "0.0.0.0"),
        ({"api_key": "secret", "host": "10.0.0.1"}, "", "10.0.0.1"),
        ({}, "fastdeploy", "0.0.0.0"),
        ({"host": "127.0.0.1"}, "fastdeploy", "127.0.0.1"),
    ],
)
def test_who_has_no_key_listens_to_this_machine_alone(flags: dict[str, str], compat: str, host: str) -> None:
    found = read(flags, None, {}, load(compat))
    assert found.configuration.server.host == host
    assert is_open(found.configuration.server) == (host == "0.0.0.0" and not flags)
