"""Configuration from defaults, a file, environment variables and flags."""

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


def test_api_process_timeout_below_5_seconds_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("0.2", "4.9"):
        assert main(["config", "--api-process-timeout", value]) == 2
        assert f"must be at least 5 seconds, is {value}" in capsys.readouterr().err
    for value in ("0", "5", "60"):
        assert main(["config", "--api-process-timeout", value]) == 0


def test_flags_override_environment_file_and_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, "port: 1\nmax-num-seqs: 2\nserver:\n  host: here\n  api_key: [one, two]\n")
    environment = {"PENSTOCK_MAX_NUM_SEQS": "3", "PENSTOCK_BLOCK_SIZE": "32", "PENSTOCK_SERVED_MODEL_NAME": "a,b"}
    result = read({"block_size": 16}, file, environment)
    configuration = result.configuration
    assert (configuration.server.port, configuration.server.host, configuration.server.api_key) == (
        1,
        "here",
        ("one", "two"),
    )
    assert (configuration.engine.max_num_seqs, configuration.engine.block_size) == (3, 16)
    assert configuration.server.served_model_name == ("a", "b")
    assert result.sources["port"] == str(file)
    assert result.sources["max_num_seqs"] == "PENSTOCK_MAX_NUM_SEQS"
    assert result.sources["block_size"] == "--block-size"
    assert result.sources["dtype"] == "default"


@pytest.mark.parametrize(
    ("text", "environment", "message"),
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
def test_wrong_value_is_reported_with_its_source(
    tmp_path: Path, text: str, environment: dict[str, str], message: str
) -> None:
    with pytest.raises(PenstockError, match=message):
        read({}, write(tmp_path, text), environment)


def test_kubernetes_port_variable_is_not_used_as_port(caplog: pytest.LogCaptureFixture) -> None:
    assert read({}, None, {"PENSTOCK_PORT": "tcp://10.0.0.1:80"}).configuration.server.port == 8000
    assert "PENSTOCK_PORT" in caplog.text


def test_vllm_config_file_is_read_like_its_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
        result = read({}, write(tmp_path, text), {}, profile)
        engine = result.configuration.engine
        assert (engine.tensor_parallel_size, engine.max_num_seqs) == (2, 7)
        assert json.loads(engine.speculative_config)["num_speculative_tokens"] == 3
        assert result.configuration.server.allowed_origins == ("https://a", "https://b")
        assert any(name.startswith("enable_auto_tool_choice, in ") for name in result.ignored)
        assert not any("enforce_eager" in name for name in result.ignored)


def test_vllm_file_is_overridden_by_flags_and_refused_like_flags(tmp_path: Path) -> None:
    file = write(tmp_path, "max-model-len: 1k\nssl-ca-certs: /a\n")
    with pytest.raises(PenstockError, match=r"ssl_ca_certs, in .*yaml: "):
        read({}, file, {}, load("vllm"))
    file = write(tmp_path, "max-model-len: 1k\n")
    assert read({}, file, {}, load("vllm")).configuration.engine.max_model_len == 1000
    result = read({}, file, {}, load("vllm"), {"max_model_len": "2k"})
    assert result.configuration.engine.max_model_len == 2000


def test_printed_yaml_reads_back_as_same_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--yaml", "--port", "9", "--kv-cache-ratio", "0.5"]) == 0
    file = write(tmp_path, capsys.readouterr().out)
    assert yaml.safe_load(file.read_text())["server"]["port"] == 9
    configuration = read({}, file, {}).configuration
    assert (configuration.server.port, configuration.engine.kv_cache_ratio) == (9, 0.5)


def test_config_shows_values_with_sources_and_no_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--json", "--api-key", "geheim", "--port", "9"]) == 0
    printed = capsys.readouterr().out
    options = json.loads(printed)
    assert options.keys() == settings().keys()
    assert options["port"] == {"value": 9, "source": "--port", "unit": "", "help": settings()["port"].help}
    assert "geheim" not in printed
    assert main(["config", "--hf-token", "geheim"]) == 0
    assert "geheim" not in capsys.readouterr().out


def test_mistyped_flag_suggests_nearest(capsys: pytest.CaptureFixture[str]) -> None:
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
def test_server_without_api_key_listens_on_loopback(flags: dict[str, str], compat: str, host: str) -> None:
    result = read(flags, None, {}, load(compat))
    assert result.configuration.server.host == host
    assert is_open(result.configuration.server) == (host == "0.0.0.0" and not flags)
