"""Types of flags for argparse, which uses a function's name in its errors."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

METRICS = ("ttft", "tpot", "itl", "e2el")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")  # latency metrics of a single request, for which --goodput takes a limit


def integer_from(minimum: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        if (value := int(text)) < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}")
        return value

    return integer


def number(text: str) -> float:
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError("must be greater than 0")
    return value


def share(text: str) -> float:
    if not 0 <= (value := float(text)) < 1:
        raise argparse.ArgumentTypeError("must be at least 0 and less than 1")
    return value


def pair_of(mark: str) -> Callable[[str], tuple[str, str]]:
    def pair(text: str) -> tuple[str, str]:
        key, separator, value = text.partition(mark)
        if not separator:
            raise argparse.ArgumentTypeError(f"{text} has no {mark}")
        return key, value

    return pair


def goodput_limit(text: str) -> tuple[str, float]:
    metric, limit = pair_of(":")(text)
    if metric not in GOODPUT_METRICS:
        raise argparse.ArgumentTypeError(f"{metric} is not one of {', '.join(GOODPUT_METRICS)}")
    return metric, number(limit)


def metrics(text: str) -> list[str]:
    if unknown := set(text.split(",")) - set(METRICS):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))} is not one of {', '.join(METRICS)}")
    return [metric for metric in METRICS if metric in text.split(",")]


def percentiles(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError("must be between 0 and 100")
    return values


def json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def writable(text: str) -> Path:
    """A file to write; its folder is checked before the benchmark runs."""
    path = Path(text)
    if text != "-" and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return path


def drawable(text: str) -> Path:
    path = writable(text)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text} is not one of .png, .svg, .pdf")
    return path
