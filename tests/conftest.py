"""What the tests share: the shipped checkpoints, each loaded once."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton: the CUDA kernels are interpreted on the CPU

import gc
import inspect
import logging
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import executors
import httpx
import pytest
from serving import Servers

from penstock import demo

if TYPE_CHECKING:
    from evaluate import Local
    from transformers import PreTrainedTokenizerFast

LONG = (
    "cuda_compile installed portable storm exactness ranks guided ops server several_models attacks router "
    "cuda_engine cuda_matrix nodes images prefill_decode kv_offloading downloads latent_attention experts web "
    "stored_responses speculative_heads hub speech server_schema vision_families gguf async_llm "
    "prefill_decode_failures data_parallel lora seed_triton weights cuda_attention quantize bladellm batches cli "
    "together reading engine_folder llm encoders speculation run_batch tracing tools quantized_checkpoints "
    "executors videos site search chat docs paddlenlp storage_limits transformers_models family_features embed "
    "thoughts scheduler rerank responses seed_vllm chat_prompts cuda_experts pd_hosts kserve ray paddlenlp_server"
).split()
"""Files that take longest are begun first, so that no process is left with one of them when the others are done."""


EVERY_CORE = frozenset(os.sched_getaffinity(0))
"""Cores that the whole run may use."""


gc.disable()  # until all is imported and collected


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # so that collections need not visit what transformers and pytest have made
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_fixture_setup() -> Generator[None, object, object]:
    with _environment_unchanged():
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    with _environment_unchanged():
        return (yield)


@contextmanager
def _environment_unchanged() -> Iterator[None]:
    """Without the variable that pytest sets anew for each test: a fork server serves an environment, and importing
    PyTorch for each test takes a second."""
    current = os.environ.pop("PYTEST_CURRENT_TEST", None)
    try:
        yield
    finally:
        if current is not None:
            os.environ["PYTEST_CURRENT_TEST"] = current


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # of xdist, which begins with the files of most tests
    _share_cores()
    executors.set_default()
    # A server compiles its modules anew each time it starts where Python may not keep what it has compiled.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # A shell ignores Ctrl-C for what it runs in the background; child processes would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _share_cores() -> None:
    """Give each process of pytest-xdist cores of its own, which the servers it starts inherit: kernels take as many
    threads as there are cores, and threads of two engines on one core wait for each other."""
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    cores = sorted(EVERY_CORE)
    os.sched_setaffinity(0, cores[number::count] or {cores[number % len(cores)]})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    names = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: names.get(item.path.stem.removeprefix("test_"), len(LONG)))


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


@pytest.fixture(autouse=True)
def log() -> Iterator[None]:
    """The log of commands that run within a test's process ends with the test."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    shared = Servers()
    yield shared
    shared.close()


@pytest.fixture
def every_core() -> Iterator[None]:
    """For tests of what happens on several cores: processes that are started here may use all of them."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, EVERY_CORE)
    yield
    os.sched_setaffinity(0, own)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo.CHAT)


@pytest.fixture(scope="session")
def chat() -> Local:
    from evaluate import Local

    return Local(demo.CHAT)


@pytest.fixture(scope="session")
def draft() -> Local:
    from evaluate import Local

    return Local(demo.DRAFT)
