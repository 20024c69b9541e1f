"""Flags and environment variables that other systems publish: each acts, is ignored with a reason, or is refused by
name."""

from __future__ import annotations

import argparse
import re

import published_flags as published
import pytest

from penstock.cli.flags import add_options, add_profile, configure
from penstock.cli.parser import Parser
from penstock.cli.spelling import expand_spellings
from penstock.config.sources import ResolvedConfiguration
from penstock.core import PenstockError

EXAMPLES = ("1", "0.5", "auto", "false", "{}", "name", "INFO", "4096")
"""Values to try: one of these is what a flag takes."""

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
"""Flags that name files, which have to exist."""


class Refused(Exception):
    """What the command line answers."""


@pytest.fixture(scope="module")
def parsers() -> dict[str, argparse.ArgumentParser]:
    result: dict[str, argparse.ArgumentParser] = {}
    for system in SYSTEMS:
        parser = Parser(prog="penstock", allow_abbrev=False, conflict_handler="resolve", exit_on_error=False)
        parser.add_argument("model_tag", nargs="?")
        add_options(parser, ("model", "engine", "server", "log"))
        add_profile(parser, ["serve", "--compat", system])
        result[system] = parser
    return result


def parse(parser: argparse.ArgumentParser, *arguments: str) -> ResolvedConfiguration | None:
    """The configuration, None where the flag is unknown. Raises ``Refused`` with the sentence."""
    try:
        args, unknown = parser.parse_known_args(expand_spellings(parser, list(arguments)))
    except argparse.ArgumentError as error:
        raise Refused(str(error)) from error
    if unknown or args.model_tag:
        return None
    try:
        return configure(args)
    except PenstockError as error:
        raise Refused(str(error)) from error


def outcomes(parser: argparse.ArgumentParser, flag: str, takes_value: bool) -> dict[str | None, str]:
    """What each example value does: ``acts``, ``ignored``, ``nothing``, or the sentence that refuses it."""
    usual = parse(parser)
    result: dict[str | None, str] = {}
    for value in EXAMPLES if takes_value else (None,):
        try:
            found = parse(parser, flag, *([] if value is None else [value]))
        except Refused as error:
            result[value] = str(error)
            continue
        if found is None or usual is None:
            result[value] = "unknown"
            continue
        result[value] = "ignored" if found.ignored != usual.ignored else "nothing"
        if found.sources != usual.sources:
            result[value] = "acts"
    return result


def fault(parser: argparse.ArgumentParser, flag: str, takes_value: bool) -> str:
    """What is wrong with how a flag is answered; empty for nothing."""
    found = outcomes(parser, flag, takes_value)
    if "unknown" in found.values():
        return f"{flag} is unknown"
    sentences = [outcome for outcome in found.values() if " " in outcome]
    if not sentences and "nothing" in found.values() and not {*found.values()} & {"acts", "ignored"}:
        return f"{flag} is accepted silently: {found}"
    name = re.sub(r"\W", "_", flag.lstrip("-"))
    always = len(sentences) == len(found) and len(flag) > 4
    if always and not any(name in re.sub(r"\W", "_", sentence) for sentence in sentences):
        return f"{flag} is refused under another name: {sentences}"
    return ""


NO_EFFECT = ("--headless", "--engine-worker-queue-port", "--ips")
"""Accepted without a word: nodes other than the first are headless; the others act on several instances or nodes."""
CASES = [
    (system, flag, flag not in switches and flag not in SWITCHES_AMONG_SHORT)
    for system, (switches, values, short) in SYSTEMS.items()
    for flag in (*switches, *values, *short)
    if flag not in (*HANDLED_BEFORE, *NO_EFFECT)
]


@pytest.mark.parametrize("system", ["", "fastdeploy", "triton", "bladellm"])  # vllm's are those of ""
def test_published_flag_acts_or_is_ignored_or_refused_by_name(
    parsers: dict[str, argparse.ArgumentParser], system: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("ERROR")
    problems = [problem for at, flag, takes in CASES if at == system and (problem := fault(parsers[at], flag, takes))]
    assert not problems, "\n".join(problems)
