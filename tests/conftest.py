"""What the tests share: the shipped checkpoints, each loaded once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from evaluate import Local
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from penstock import demo


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Weights of tests are not kept among the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(demo.CHAT)


@pytest.fixture(scope="session")
def chat() -> Local:
    return Local(demo.CHAT)


@pytest.fixture(scope="session")
def draft() -> Local:
    return Local(demo.DRAFT)
