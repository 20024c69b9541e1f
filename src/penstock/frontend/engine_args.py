"""``EngineArgs``: the arguments of ``LLM`` as an object, also read from a command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, make_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from penstock.config.profiles.vllm import DEFAULT_PROFILE
from penstock.config.settings import Setting, settings
from penstock.config.sources import convert_setting
from penstock.core import PenstockError
from penstock.core.errors import invalid
from penstock.core.spelling import did_you_mean

Parser = TypeVar("Parser", bound=argparse.ArgumentParser)
NATIVE = {name: setting for name, setting in settings().items() if setting.section in ("model", "engine")}
"""Options of models and engines by name."""
NAMES = tuple(dict.fromkeys((*NATIVE, *DEFAULT_PROFILE.flags)))
"""Penstock's options, and vLLM's that are translated, ignored or refused."""

if TYPE_CHECKING:

    class _Options:
        def __init__(self, **options: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

else:
    _Options = make_dataclass("_Options", [(name, Any, None) for name in NAMES], kw_only=True)


class EngineArgs(_Options):
    """Arguments of ``LLM``, a data class: ``LLM(**vars(args))``, ``LLM(**dataclasses.asdict(args))`` and
    ``LLM.from_engine_args(args)`` are the same. None selects the default of an option.

    Raises ``PenstockError`` (``invalid``) for an unknown name; ``LLM`` checks the values.
    """

    def __init__(self, model: str | Path = "", **options: Any) -> None:
        for name in options:
            if name not in NAMES:
                raise invalid(name, f"no such option{did_you_mean(name, NAMES)}")
        super().__init__(model=str(model), **options)

    @staticmethod
    def add_cli_args(parser: Parser) -> Parser:
        """Add a flag for each option (``--max-model-len``). Returns the parser."""
        group = parser.add_argument_group("engine arguments")
        for name in NAMES:
            flag = f"--{name.replace('_', '-')}"
            if flag in parser._option_string_actions:
                continue
            setting, alias = NATIVE.get(name), DEFAULT_PROFILE.flags.get(name)
            if alias.switch if alias else setting is not None and setting.kind is bool:
                group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None)
            else:
                convert: Callable[[str], Any] = str if alias or setting is None else partial(_converted, setting)
                group.add_argument(flag, type=convert, default="" if name == "model" else None)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Take the options from parsed arguments; other arguments are ignored."""
        return cls(**{one.name: getattr(args, one.name) for one in fields(cls) if hasattr(args, one.name)})  # type: ignore[arg-type]


class AsyncEngineArgs(EngineArgs):
    """Arguments of ``AsyncLLM``."""


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Parser that also accepts flags with underscores (``--max_model_len``)."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        given: Sequence[str] = sys.argv[1:] if args is None else args
        return super().parse_known_args([_dashed(one) for one in given], namespace)


def _dashed(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if name.startswith("--") else argument


def _converted(setting: Setting, text: str) -> Any:
    try:
        return convert_setting(setting, text, setting.flag, foreign=True)
    except PenstockError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
