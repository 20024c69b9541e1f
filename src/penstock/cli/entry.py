"""Commands that users of other systems type: ``penstock serve`` with their names of things."""

from __future__ import annotations

import sys

from penstock.core import PenstockError

from . import fill_template as template
from .main import main


def blade_llm_server() -> int:
    """BladeLLM's."""
    return main(["serve", "--compat", "bladellm", *sys.argv[1:]])


def vllm_api_server() -> int:
    """``python -m vllm.entrypoints.openai.api_server``, where a shim leads here (docs/dialects/vllm.md)."""
    return main(["serve", "--compat", "ascend-vllm", *sys.argv[1:]])


def fastdeploy_api_server() -> int:
    """``python -m fastdeploy.entrypoints.openai.api_server``, likewise (docs/dialects/fastdeploy.md)."""
    return main(["serve", "--compat", "fastdeploy", *sys.argv[1:]])


def tritonserver() -> int:
    """Triton's, and ``launch_triton_server.py``."""
    return main(["serve", "--compat", "triton", *sys.argv[1:]])


def fill_template() -> int:
    """TensorRT-LLM's, for Triton's model repositories."""
    try:
        template.main(sys.argv[1:])
    except (OSError, PenstockError) as error:
        print(f"fill_template.py: {error}", file=sys.stderr)
        return 2
    return 0
