"""What the tests share: the shipped checkpoints, each loaded once."""

from __future__ import annotations

import pytest
from evaluate import Local
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from penstock import demo


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(demo.CHAT)


@pytest.fixture(scope="session")
def weights() -> None:
    """Skips where the weights are not there: they are committed in their final form only."""
    if not (demo.DRAFT / "model.safetensors").exists():
        pytest.skip("the draft model is not trained yet: run `make train`")


@pytest.fixture(scope="session")
def chat(weights: None) -> Local:
    return Local(demo.CHAT)


@pytest.fixture(scope="session")
def draft(weights: None) -> Local:
    return Local(demo.DRAFT)
