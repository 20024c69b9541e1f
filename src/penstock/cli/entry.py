"""Commands that users of other systems type: ``penstock serve`` with their names of things."""

from __future__ import annotations

import sys

from .main import main


def blade_llm_server() -> int:
    """BladeLLM's."""
    return main(["serve", "--compat", "bladellm", *sys.argv[1:]])
