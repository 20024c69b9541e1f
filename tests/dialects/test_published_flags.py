"""Flags published by other systems: each takes effect, is ignored with a reason, or is rejected by name."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import msgspec
import published_flags as published
import pytest
from serving import Served

from penstock import demo
from penstock.cli.flags import add_options, add_profile, configure
from penstock.cli.main import main
from penstock.cli.parser import Parser
from penstock.cli.spelling import expand_spellings
from penstock.config.sources import ResolvedConfiguration
from penstock.core import PenstockError

EXAMPLES = ("1", "0.5", "auto", "false", "{}", "name", "INFO", "4096")
"""Values to try: each flag that takes a value accepts at least one of them."""

SYSTEMS = {
    "": (published.VLLM_SWITCHES, published.VLLM_VALUES, published.VLLM_SHORT),
    "vllm": (published.VLLM_SWITCHES, published.VLLM_VALUES, published.VLLM_SHORT),
    "ascend-vllm": (published.VLLM_SWITCHES, published.VLLM_VALUES, published.VLLM_SHORT),
    "fastdeploy": (published.FASTDEPLOY_SWITCHES, published.FASTDEPLOY_VALUES, published.FASTDEPLOY_SHORT),
    "triton": (published.TRITON_SWITCHES, published.TRITON_VALUES, []),
    "bladellm": (published.BLADELLM_SWITCHES, published.BLADELLM_VALUES, published.BLADELLM_SHORT),
}
SWITCHES_AMONG_SHORT = ("-ep", "-dph", "-dpe", "-dpm")
HANDLED_BEFORE = ("--config", "--model-repository", "--model-store")
"""Flags left out because their value must be an existing file or folder."""


class Refused(Exception):
    """Raised when the command line is rejected."""


@pytest.fixture(scope="module")
def parsers() -> dict[str, argparse.ArgumentParser]:
    result: dict[str, argparse.ArgumentParser] = {}
    for system in SYSTEMS:
        parser = Parser(prog="penstock", allow_abbrev=False, exit_on_error=False)
        parser.add_argument("model_tag", nargs="?")
        add_options(parser, ("model", "engine", "server", "log"))
        add_profile(parser, ["serve", "--compat", system])
        result[system] = parser
    return result


def parse(parser: argparse.ArgumentParser, *arguments: str) -> ResolvedConfiguration | None:
    """Return the configuration, or None if a flag is unknown. Raises ``Refused`` with the error message."""
    try:
        args, unknown = parser.parse_known_args(expand_spellings(parser, list(arguments)))
    except (argparse.ArgumentError, PenstockError) as error:
        raise Refused(str(error)) from error
    if unknown or args.model_tag:
        return None
    try:
        return configure(args)
    except PenstockError as error:
        raise Refused(str(error)) from error


def outcomes(parser: argparse.ArgumentParser, flag: str, takes_value: bool) -> dict[str | None, str]:
    """Return the outcome per example value: ``acts``, ``ignored``, ``nothing``, ``unknown`` or an error message."""
    default = parse(parser)
    result: dict[str | None, str] = {}
    for value in EXAMPLES if takes_value else (None,):
        try:
            found = parse(parser, flag, *([] if value is None else [value]))
        except Refused as error:
            result[value] = str(error)
            continue
        if found is None or default is None:
            result[value] = "unknown"
            continue
        result[value] = "ignored" if found.ignored != default.ignored else "nothing"
        if found.sources != default.sources:
            result[value] = "acts"
    return result


def fault(parser: argparse.ArgumentParser, flag: str, takes_value: bool) -> str:
    """Return a description of how the flag is mishandled, or "" if it is handled correctly."""
    found = outcomes(parser, flag, takes_value)
    if "unknown" in found.values():
        return f"{flag} is unknown"
    messages = [outcome for outcome in found.values() if " " in outcome]
    if not messages and "nothing" in found.values() and not {*found.values()} & {"acts", "ignored"}:
        return f"{flag} is accepted silently: {found}"
    name = re.sub(r"\W", "_", flag.lstrip("-"))
    always = len(messages) == len(found) and len(flag) > 4
    if always and not any(name in re.sub(r"\W", "_", message) for message in messages):
        return f"{flag} is refused under another name: {messages}"
    return ""


NO_EFFECT = ("--headless", "--engine-worker-queue-port", "--ips")
"""Flags left out because they take effect only with several instances or nodes."""
CASES = [
    (system, flag, flag not in switches and flag not in SWITCHES_AMONG_SHORT)
    for system, (switches, values, short) in SYSTEMS.items()
    for flag in (*switches, *values, *short)
    if flag not in (*HANDLED_BEFORE, *NO_EFFECT)
]


@pytest.mark.slow
@pytest.mark.row("vllm", "--rope-scaling", "--return-tokens-as-token-ids", "--qlora-adapter-name-or-path")
@pytest.mark.row("vllm", "--enable-prompt-adapter", "--skip-tokenizer-init", "--disable-sliding-window")
@pytest.mark.row("vllm", "--scheduler-delay-factor", "--speculative-max-model-len")
@pytest.mark.row("vllm", "--disable-frontend-multiprocessing")
@pytest.mark.row(
    "bladellm", "--attention_dp_size", "--enable_llumnix", "--llumnix_config", "--tokenizer_special_tokens"
)
@pytest.mark.row("bladellm", "--pipeline_micro_batch", "--worker_socket_path", "--decoding_parallelism")
@pytest.mark.row("bladellm", "--metric_exporters", "--enable_json_warmup", "--kv_cache_quant_sub_heads")
@pytest.mark.row("bladellm", "--enable_triton_mla", "--with_visual", "--look_ahead_window_size")
@pytest.mark.row("bladellm", "--look_ahead_gram_size", "--guess_set_size", "--draft.dtype")
@pytest.mark.row("triton", "tritonserver")
@pytest.mark.parametrize("system", ["", "fastdeploy", "triton", "bladellm"])  # "" has the flags of vllm
def test_published_flag_acts_or_is_ignored_or_refused_by_name(
    parsers: dict[str, argparse.ArgumentParser], system: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("ERROR")
    problems = [problem for at, flag, takes in CASES if at == system and (problem := fault(parsers[at], flag, takes))]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("system", "flag"), [(system, flag) for system, flags in published.VALUES.items() for flag in flags]
)
def test_documented_value_acts_or_is_refused_by_name(
    parsers: dict[str, argparse.ArgumentParser], system: str, flag: str
) -> None:
    name = re.sub(r"\W", "_", flag.lstrip("-"))
    for value in published.VALUES[system][flag].split():
        try:
            assert parse(parsers[system], flag, value) is not None
        except Refused as error:
            assert "invalid choice" not in str(error) and "argument " not in str(error), error
            assert name in re.sub(r"\W", "_", str(error)) and value.lower() in str(error).lower(), error


SPEC = '{"method": "ngram", "num_speculative_tokens": 2}'
SPEC_REVERSED = '{"num_speculative_tokens": 2, "method": "ngram"}'
TRANSLATED: list[tuple[str, str, str, object]] = [
    *[
        ("ascend-vllm", f"{flag} {method}", "quantization", "none")
        for flag in ("--quantization", "-q")
        for method in ("smoothquant", "gptq", "awq", "compressed-tensors")
    ],
    ("vllm", "-q fp8", "quantization", "fp8"),
    ("vllm", "-tp 2 -pp 1 -dp 1", "tensor_parallel_size", 2),
    ("vllm", "-asc 3", "api_server_count", 3),
    ("vllm", '-sc {"method":"ngram"}', "speculative_config", '{"method":"ngram"}'),
    ("vllm", "-sc.method ngram", "speculative_config", '{"method": "ngram"}'),
    ("vllm", '-sc {"method":"ngram"} -sc.num_speculative_tokens=2', "speculative_config", SPEC),
    ("vllm", "--speculative-config.num_speculative_tokens=2 -sc.method ngram", "speculative_config", SPEC_REVERSED),
    ("vllm", "--spec-method ngram --spec-tokens 2", "speculative_config", SPEC),
    ("vllm", "--speculative_model [ngram] --num_speculative_tokens 2", "speculative_config", SPEC_REVERSED),
    ("vllm", "-cc.cudagraph_mode NONE", "enforce_eager", True),
    ("vllm", "--enable-chunked-prefill=False --max-num-batched-tokens 99999", "enable_chunked_prefill", False),
    ("vllm", "--enable_prefix_caching False", "enable_prefix_caching", False),
    ("vllm", "--enforce-eager True", "enforce_eager", True),
    ("vllm", "--revision a --tokenizer-revision a", "revision", "a"),
    ("vllm", "--revision None", "revision", ""),
    ("vllm", "--shutdown-timeout 3", "drain_timeout", 3.0),
    ("vllm", "--kv-cache-dtype int8_per_token_head", "kv_cache_dtype", "int8"),
    ("vllm", "--guided-decoding-backend xgrammar:no-fallback", "guided_decoding_backend", "xgrammar"),
    (
        "vllm",
        "--guided-decoding-backend xgrammar:disable-any-whitespace",
        "guided_decoding_disable_any_whitespace",
        True,
    ),
    ("fastdeploy", "-tp 2", "tensor_parallel_size", 2),
    ("fastdeploy", "--dynamic-load-weight", "server_dev_mode", True),
    ("fastdeploy", "--dynamic-load-weight 0", "server_dev_mode", False),
    ("fastdeploy", "--guided-decoding-backend guidance", "guided_decoding_backend", "guidance"),
    ("fastdeploy", "--tool-call-parser ernie-x1", "tool_call_parser", "ernie"),
    ("bladellm", "-tp 2", "tensor_parallel_size", 2),
    ("bladellm", "--use_lookahead true", "speculative_config", '{"method": "ngram"}'),
    ("bladellm", "--kv_cache_quant fp8_e4m3", "kv_cache_dtype", "fp8_e4m3"),
]


@pytest.mark.row("vllm", "-q", "-sc", "-asc", "-cc", "-tp", "-pp", "-dp")
@pytest.mark.row("vllm", "--speculative-config.method ngram", "--enable-chunked-prefill=False")
@pytest.mark.row("vllm", "--spec-method", "--spec-model", "--spec-tokens", "--shutdown-timeout", "--tokenizer-revision")
@pytest.mark.row("bladellm", "-tp", "-pp", "--use_sps", "--use_lookahead")
@pytest.mark.parametrize(("system", "arguments", "setting", "expected"), TRANSLATED)
def test_value_or_short_form_is_translated(
    parsers: dict[str, argparse.ArgumentParser], system: str, arguments: str, setting: str, expected: object
) -> None:
    found = parse(parsers[system], *arguments.split())
    assert found is not None
    values = {**msgspec.structs.asdict(found.configuration.engine), **msgspec.structs.asdict(found.configuration.model)}
    values |= msgspec.structs.asdict(found.configuration.server)
    assert values[setting] == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--tokenizer-revision b", "must equal --revision"),
        ("--num-speculative-tokens 3", "requires --speculative-model"),
        ("--spec-method ngram -sc {}", "cannot be combined with --speculative-config"),
        ("--spec-model a --speculative-model b", "has the same meaning as"),
        ("-sc [1] -sc.method ngram", "is not a JSON object"),
        ("--mm-encoder-only", "a server always runs the whole model"),
    ],
)
def test_contradicting_flags_are_rejected(capsys: pytest.CaptureFixture[str], arguments: str, message: str) -> None:
    assert main(["config", "--compat", "vllm", *arguments.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_ascend_start_servers_script_serves_quantized_checkpoint(tmp_path: Path) -> None:
    assert main(["shims", str(tmp_path), "ascend-vllm"]) == 0
    command = [str(tmp_path / "llm_tools/PD_separate/start_servers.sh"), "--model", str(demo.CHAT)]
    with Served("-q", "smoothquant", "--num-gpu-blocks-override", "100", command=command) as served:
        assert served.name == str(demo.CHAT)
