"""What the tests share: the shipped checkpoints, each loaded once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from evaluate import Local
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from penstock import demo

APART = {"test_exactness", "test_sampler", "test_ops", "test_demo_corpus"}
"""Files whose tests share nothing that is dear."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where several processes run the tests, those of a file share its servers and models, and so a process."""
    for item in items:
        if (name := item.path.stem) not in APART:
            item.add_marker(pytest.mark.xdist_group(name))


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
