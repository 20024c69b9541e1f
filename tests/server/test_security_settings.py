"""Security settings of other systems: each is applied, refused, or ignored with a log message; none silently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import published_flags as published
import pytest
from serving import Served

from penstock import demo
from penstock.cli.main import main
from penstock.config.profiles import load
from penstock.config.profiles.vllm_variables import LIMITS
from penstock.config.sources import read
from penstock.core import PenstockError
from penstock.core.sampling import MAX_SEQUENCES
from penstock.serve.dialects.openai.schema import MAX_PROMPTS

PEM = "/a/file.pem"
CODE = "loading code is not supported"

FLAGS: list[tuple[str, str, dict[str, Any] | str]] = [
    *[  # vLLM and vLLM Ascend
        (system, flags, outcome)
        for system in ("", "vllm", "ascend-vllm")
        for flags, outcome in [
            ("--api-key hush-42", {"api_key": "***"}),
            ("--host 10.0.0.1", {"host": "10.0.0.1"}),
            ("--uds /tmp/a.sock", "Unix sockets are not supported"),
            (f"--ssl-certfile {PEM} --ssl-keyfile {PEM}", {"ssl_certfile": PEM, "ssl_keyfile": PEM}),
            (f"--ssl-ca-certs {PEM}", "client certificates are not verified"),
            ("--ssl-cert-reqs 2", "client certificates are not verified"),
            ("--ssl-cert-reqs 0", {}),
            ("--ssl-ciphers HIGH", "OpenSSL's configuration"),
            ("--enable-ssl-refresh", "restart the server"),
            ('--allowed-origins ["http://a"]', {"allowed_origins": ["http://a"]}),
            ('--allowed-methods ["GET"]', "CORS is limited by --allowed-origins only"),
            ('--allowed-methods ["*"]', {}),
            ('--allowed-headers ["x-a"]', "CORS is limited by --allowed-origins only"),
            ("--allow-credentials", "CORS with credentials is not supported"),
            ("--allowed-local-media-path /pictures", {"allowed_local_media_path": "/pictures"}),
            ("--allowed-media-domains a.example", {"allowed_media_domains": ["a.example"]}),
            ("--trust-remote-code", "ignored: code of a checkpoint is never executed"),
            ("--trust-request-chat-template", {"trust_request_chat_template": True}),
            ("--middleware a.B", CODE),
            ("--tool-parser-plugin a.py", CODE),
            ("--reasoning-parser-plugin a.py", CODE),
            ("--io-processor-plugin a", CODE),
            ("--logits-processors a:B c:D", CODE),
            ("--worker-cls a.B", CODE),
            ("--worker-extension-cls a.B", CODE),
            ("--scheduler-cls a.B", CODE),
            ('--model-class-overrides {"A":"a.B"}', CODE),
            ("--tool-server demo", "tools are called by clients"),
            ("--enable-prompt-embeds", "not embeddings"),
            ("--enable-mm-embeds", "images cannot be given as embeddings"),
            ('--kv-events-config {"endpoint":"tcp://*:5557"}', "KV cache events are not published"),
            ("--root-path /llm", {"root_path": "/llm"}),
            ("--disable-fastapi-docs", "/openapi.json"),
            ("--h11-max-incomplete-event-size 4096", {"max_header_size": 4096}),
            ("--disable-uvicorn-access-log", "ignored: each request is logged in one line, without its text"),
            ("--disable-access-log-for-endpoints /health", "ignored: each request is logged"),
            ("--enable-log-outputs", "ignored: each request is logged"),
            ("--hf-token hush-42", {"hf_token": "***"}),
        ]
    ],
    ("fastdeploy", "--api-key hush-42", {"api_key": "***"}),
    ("fastdeploy", "--host 127.0.0.1", {"host": "127.0.0.1"}),
    ("fastdeploy", "--tool-parser-plugin a.py", CODE),
    ("fastdeploy", "--logits-processors a:B", CODE),
    ("fastdeploy", "--tokenizer-base-url http://a", "a tokenizer service is not supported"),
    ("fastdeploy", "--scheduler-password hush-42", "ignored: requests are distributed by a router"),
    ("fastdeploy", "--controller-port 9000", "ignored: all routes are served on --port"),
    ("triton", "--http-address 127.0.0.1", {"host": "127.0.0.1"}),
    ("triton", "--grpc-address 127.0.0.1", "must equal --http-address"),
    ("triton", "--metrics-address 127.0.0.1", "must equal --http-address"),
    ("triton", "--http-restricted-api=inference:key=hush-42", "--api-key requires a key on all"),
    ("triton", "--grpc-restricted-protocol=inference:key=hush-42", "--api-key requires a key on all"),
    ("triton", "--http-header-forward-pattern .*", "headers are not forwarded to models"),
    ("triton", "--grpc-header-forward-pattern .*", "headers are not forwarded to models"),
    ("triton", "--grpc-use-ssl true", "set --ssl-certfile and --ssl-keyfile"),
    ("triton", "--grpc-use-ssl false", {}),
    ("triton", "--grpc-use-ssl-mutual true", "client certificates are not verified"),
    ("triton", f"--grpc-server-cert {PEM}", "set --ssl-certfile and --ssl-keyfile"),
    ("triton", f"--grpc-server-key {PEM}", "set --ssl-certfile and --ssl-keyfile"),
    ("triton", f"--grpc-root-cert {PEM}", "client certificates are not verified"),
    ("triton", "--allow-client-shm true", {"allow_shared_memory": True}),
    ("triton", "--allow-client-shm false", {"allow_shared_memory": False}),
    (
        "triton",
        "--allow-client-shm false --http-address 127.0.0.1",
        "clients on this machine can always use shared memory",
    ),
    ("triton", "--http-max-input-size 1000", {"max_body_size": 1000}),
    ("triton", "--reuse-http-port true", "servers cannot share a port"),
    ("triton", "--allow-http false", {"port": -1}),
    ("triton", "--model-control-mode explicit", {"model_control_mode": "explicit"}),
    ("triton", "--repoagent-directory /a", "repository agents are not loaded"),
    ("triton", "--backend-directory /a", "ignored: there are no backends to load"),
    ("triton", "--allow-vertex-ai true", "SageMaker and Vertex AI"),
    ("bladellm", "--host 127.0.0.1", {"host": "127.0.0.1"}),
    ("bladellm", "--enable_llumnix", "use --role router"),
]

VARIABLES: list[tuple[str, str, str, dict[str, Any] | str]] = [
    *[
        (system, name, value, outcome)
        for system in ("vllm", "ascend-vllm")
        for name, value, outcome in [
            ("VLLM_API_KEY", "hush-42", {"api_key": ("hush-42",)}),
            ("VLLM_API_KEY", "a,b", "must not contain a comma"),
            ("VLLM_SERVER_DEV_MODE", "1", {"server_dev_mode": True}),
            ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True", {"allow_runtime_lora_updating": True}),
            ("VLLM_ALLOW_INSECURE_SERIALIZATION", "1", "ignored: nothing is ever deserialized with pickle"),
            ("VLLM_PLUGINS", "a", CODE),
            ("VLLM_LORA_RESOLVER_CACHE_DIR", "/a", "load adapters with --lora-modules"),
            ("VLLM_LORA_RESOLVER_HF_REPO_LIST", "a/b", "load adapters with --lora-modules"),
            ("VLLM_MEDIA_CONNECTOR", "mine", CODE),
            ("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0", "redirects of images and videos are followed"),
            ("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "1", {}),
            ("VLLM_MAX_IMAGE_PIXELS", "1000", {"max_image_pixels": 1000}),
            ("VLLM_MAX_AUDIO_CLIP_FILESIZE_MB", "2", {"max_audio_size": 2 * 2**20}),
            ("VLLM_MAX_AUDIO_DECODE_DURATION_S", "60", {"max_audio_duration": 60.0}),
            ("VLLM_MAX_N_SEQUENCES", "1", "the limit is"),
            ("VLLM_MAX_N_SEQUENCES", "16384", {}),
            ("VLLM_MAX_COMPLETION_PROMPTS", "1", "the limit is"),
            ("VLLM_IMAGE_FETCH_TIMEOUT", "3", {"media_timeout": 3.0}),
            ("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "7", {"timeout_keep_alive": 7}),
            ("VLLM_HOST_IP", "10.0.0.1", "ignored: --host"),
            ("VLLM_NIXL_SIDE_CHANNEL_HOST", "10.0.0.1", {"kv_host": "10.0.0.1"}),
            ("VLLM_LOGGING_LEVEL", "WARNING", {"log_level": "warning"}),
            ("VLLM_CPU_KVCACHE_SPACE", "2", {"kv_cache_memory_bytes": 2 * 2**30}),
            ("VLLM_NO_USAGE_STATS", "1", "ignored: no usage statistics"),
            ("VLLM_DEBUG_LOG_API_SERVER_RESPONSE", "true", "ignored: the text of responses is never logged"),
            ("VLLM_SOME_SECRET", "x", "may be security-related"),
            ("VLLM_ALLOWED_HOSTS", "x", "may be security-related"),
            ("VLLM_TLS_VERIFY", "x", "may be security-related"),
            ("VLLM_SOMETHING_NEW", "x", "ignored: this variable of vLLM has no equivalent"),
            ("VLLM_SOMETHING_MAX_TOKENS", "4096", "ignored: this variable of vLLM has no equivalent"),
            ("VLLM_ADMIN_TOKENS", "a1b2", "may be security-related"),
            ("VLLM_ADMIN_TOKEN", "4096", "may be security-related"),
        ]
    ],
    ("", "VLLM_API_KEY", "hush-42", {"api_key": ("hush-42",)}),
    ("", "VLLM_SERVER_DEV_MODE", "1", "ignored: it is read with --compat vllm"),
    ("fastdeploy", "FD_API_KEY", "a,b,", {"api_key": ("a", "b")}),
    ("fastdeploy", "FD_PLUGINS", "a", CODE),
    ("fastdeploy", "FD_ENABLE_INTERNAL_ADAPTER", "1", "the engine is accessible by HTTP only"),
    ("fastdeploy", "FD_LOG_DIR", "/a", {"log_file": "/a/fastdeploy.log"}),
    ("fastdeploy", "FD_ADMIN_TOKEN", "x", "may be security-related"),
    ("fastdeploy", "FD_SOMETHING_NEW", "x", "ignored: this variable of FastDeploy has no equivalent"),
    ("triton", "TRTLLM_AUTH_FILE", "x", "may be security-related"),
    ("bladellm", "BLADELLM_API_KEY", "x", "may be security-related"),
]


@pytest.mark.row("vllm", "--ssl-ca-certs", "--ssl-cert-reqs", "--ssl-ciphers", "--enable-ssl-refresh", "--uds")
@pytest.mark.row("vllm", "--allow-credentials", "--allowed-methods", "--allowed-headers", "--disable-fastapi-docs")
@pytest.mark.row("vllm", "--tool-server", "--enable-prompt-embeds")
@pytest.mark.row("triton", "--allow-client-shm", "--http-max-input-size", "--grpc-restricted-protocol")
@pytest.mark.row("triton", "--http-header-forward-pattern")
@pytest.mark.parametrize(("system", "flags", "outcome"), FLAGS)
def test_security_flag_is_honoured_or_refused(
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    system: str,
    flags: str,
    outcome: dict[str, Any] | str,
) -> None:
    status = main(["config", "--json", "--compat", system, *flags.split()])
    out, err = capsys.readouterr()
    if isinstance(outcome, str):
        assert outcome.removeprefix("ignored: ") in (caplog.text if outcome.startswith("ignored: ") else err)
        assert status == (0 if outcome.startswith("ignored: ") else 2)
    else:
        assert status == 0, err
        values = {name: json.loads(out)[name]["value"] for name in outcome}
        assert values == outcome
    assert "hush-42" not in err + out + caplog.text


@pytest.mark.parametrize("method", ["bitsandbytes", "torchao", "hqq", "inc"])
def test_ignored_quantization_method_is_logged(caplog: pytest.LogCaptureFixture, method: str) -> None:
    assert main(["config", "--compat", "vllm", "--quantization", method]) == 0
    assert f"--quantization {method} is ignored: quantized checkpoints are detected" in caplog.text


@pytest.mark.row("vllm", "VLLM_API_KEY", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_MAX_IMAGE_PIXELS")
@pytest.mark.row("vllm", "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB", "VLLM_MAX_AUDIO_DECODE_DURATION_S")
@pytest.mark.row("vllm", "VLLM_IMAGE_FETCH_TIMEOUT", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "VLLM_NIXL_SIDE_CHANNEL_HOST")
@pytest.mark.row("vllm", "VLLM_LOGGING_LEVEL", "VLLM_CPU_KVCACHE_SPACE")
@pytest.mark.row("vllm", "VLLM_PLUGINS", "VLLM_MEDIA_CONNECTOR", "VLLM_LORA_RESOLVER_CACHE_DIR")
@pytest.mark.row("vllm", "VLLM_MEDIA_URL_ALLOW_REDIRECTS")
@pytest.mark.row("fastdeploy", "FD_API_KEY")
@pytest.mark.parametrize(("system", "name", "value", "outcome"), VARIABLES)
def test_security_variable_is_honoured_or_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    system: str,
    name: str,
    value: str,
    outcome: dict[str, Any] | str,
) -> None:
    monkeypatch.setenv(name, value)
    status = main(["config", "--json", "--compat", system])
    out, err = capsys.readouterr()
    if isinstance(outcome, str) and outcome.startswith("ignored: "):
        assert status == 0 and f"{name} is {outcome}" in caplog.text
    elif isinstance(outcome, str):
        assert status == 2 and outcome in err and name in err
    else:
        assert status == 0, err
        shown = {key: json.loads(out)[key]["value"] for key in outcome}
        assert shown == {key: "***" if key == "api_key" else expected for key, expected in outcome.items()}
    if name.endswith("API_KEY"):
        assert value not in err and value not in caplog.text


def test_no_published_variable_is_ignored_silently() -> None:
    for system, names in (("vllm", published.VLLM_VARIABLES), ("fastdeploy", published.FASTDEPLOY_VARIABLES)):
        default = read({}, None, {}, load(system))
        for name in names:
            outcomes = set()
            for value in ("1", "0", "true", "/a/path", "huggingface", "info", "http"):
                try:
                    settings = read({}, None, {name: value}, load(system))
                except PenstockError as error:
                    assert name in str(error), error
                    outcomes.add("refused")
                    continue
                outcomes.add("ignored" if name in settings.ignored else "nothing")
                if settings.sources != default.sources:
                    outcomes.add("acts")
            assert outcomes - {"nothing"}, f"{name} is ignored silently"


def test_limits_of_variables_equal_request_limits() -> None:
    assert LIMITS == {"VLLM_MAX_N_SEQUENCES": MAX_SEQUENCES, "VLLM_MAX_COMPLETION_PROMPTS": MAX_PROMPTS}


def test_kubernetes_service_variables_are_not_settings() -> None:
    service = {"VLLM_SERVICE_HOST": "10.0.0.1", "VLLM_SERVICE_PORT": "8000", "VLLM_SERVICE_PORT_HTTP": "8000"}
    service |= {"VLLM_PORT_8000_TCP": "tcp://10.0.0.1:8000", "VLLM_PORT_8000_TCP_ADDR": "10.0.0.1"}
    service |= {"VLLM_AUTH_SERVICE_HOST": "10.0.0.1", "VLLM_AUTH_PORT": "tcp://10.0.0.1:80"}
    assert not read({}, None, service, load("vllm")).ignored


def test_penstock_api_key_overrides_vllm_api_key() -> None:
    environment = {"VLLM_API_KEY": "theirs", "PENSTOCK_API_KEY": "ours"}
    assert read({}, None, environment, load("vllm")).configuration.server.api_key == ("ours",)
    assert read({"api_key": ["flag"]}, None, environment, load("vllm")).configuration.server.api_key == ("flag",)


@pytest.mark.parametrize(
    ("shim", "command", "variable"),
    [
        ("vllm", ["vllm", "serve", str(demo.CHAT)], "VLLM_API_KEY"),
        (
            "fastdeploy",
            ["modules/fastdeploy/entrypoints/openai/api_server.py", "--model", str(demo.CHAT)],
            "FD_API_KEY",
        ),
    ],
)
def test_server_requires_api_key_from_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shim: str, command: list[str], variable: str
) -> None:
    assert main(["shims", str(tmp_path), shim]) == 0
    monkeypatch.chdir(tmp_path)  # FastDeploy's profile writes its log to the working directory
    launcher = [str(tmp_path / command[0]), *command[1:]]
    with Served(
        "--num-gpu-blocks-override", "100", command=launcher, environment={variable: "of-the-environment"}
    ) as served:
        body = {"model": str(demo.CHAT), "prompt": "Once", "max_tokens": 1}
        refused = httpx.post(f"{served.url}/completions", json=body)
        assert refused.status_code == 401
        headers = {"Authorization": "Bearer of-the-environment"}
        assert httpx.post(f"{served.url}/completions", json=body, headers=headers, timeout=60).status_code == 200
