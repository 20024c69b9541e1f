"""What the tests share: the shipped checkpoints, each loaded once."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import httpx
import pytest
from evaluate import Local
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from penstock import demo

LONG = "exactness guided server several_models storm together async_llm llm embed server_schema docs ops".split()
"""Files that take longest are begun first, so that no process is left with one of them when the others are done."""


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # of xdist, which begins with the files of most tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    names = {f"test_{name}.py": place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: names.get(item.path.name, len(LONG)))


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Weights of tests are not kept among the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def patience() -> Iterator[None]:
    """httpx waits for 60 seconds where a test says nothing else: a busy machine takes longer than its own 5."""
    calls = (httpx.request, httpx.stream, httpx.get, httpx.options, httpx.head, httpx.post, httpx.put, httpx.delete)
    with pytest.MonkeyPatch.context() as patch:
        for call in (*calls, httpx.Client.__init__, httpx.AsyncClient.__init__):
            patch.setitem(inspect.unwrap(call).__kwdefaults__, "timeout", httpx.Timeout(60))
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
