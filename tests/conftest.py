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
def chat() -> Local:
    return Local(demo.CHAT)


@pytest.fixture(scope="session")
def draft() -> Local:
    return Local(demo.DRAFT)
