"""Commands that users of other systems type: ``penstock serve`` with their names of things."""

from __future__ import annotations

import sys

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
