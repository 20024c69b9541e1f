"""Fixtures shared by all tests, execution order of the test files, and CPU affinity of the pytest-xdist workers."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # set before Triton is imported: its interpreter runs the CUDA kernels on the CPU

import gc
import inspect
import logging
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import executors
import httpx
import hypothesis
import pytest
from serving import Servers

from penstock import demo

if TYPE_CHECKING:
    from evaluate import Local
    from playwright.sync_api import Browser, Page, Request
    from transformers import PreTrainedTokenizerFast

SLOWEST_FIRST = (
    "cuda_compile installed portable storm exactness ranks tool_calls guided ops server several_models idle_models "
    "state_families attacks router cuda_engine cuda_matrix nodes transformers_quantized cuda_compressed images "
    "prefill_decode kv_offloading downloads latent_attention experts web stored_responses transformers_ranks "
    "transformers_invariance background_responses resumed_answers vllm_commands quantized_states speculative_heads "
    "hub speech server_schema vision_families gguf async_llm prefill_decode_failures data_parallel lora seed_triton "
    "weights cuda_attention quantize bladellm batches cli together reading engine_folder llm encoders speculation "
    "run_batch tracing tools quantized_checkpoints executors videos site search chat docs paddlenlp storage_limits "
    "transformers_models family_features embed thoughts scheduler rerank responses seed_vllm chat_prompts "
    "cuda_experts pd_hosts kserve ray paddlenlp_server"
).split()
"""Test files that take longest, slowest first. They start first, so that none of them is the last one running."""


hypothesis.settings.register_profile("penstock", deadline=None)  # by default, an example fails after 0.2 s
hypothesis.settings.load_profile("penstock")


EVERY_CORE = frozenset(os.sched_getaffinity(0))
"""CPU cores available to the whole test run."""


gc.disable()  # pause garbage collection until all tests are imported and collected


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # exclude the imported objects of transformers and pytest from later garbage collections
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
    """Remove the environment variable that pytest changes for each test. A fork server is reused only in an unchanged
    environment, and starting a new one takes a second because it imports PyTorch."""
    current = os.environ.pop("PYTEST_CURRENT_TEST", None)
    try:
        yield
    finally:
        if current is not None:
            os.environ["PYTEST_CURRENT_TEST"] = current


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # pytest-xdist: do not sort the files by number of tests
    _share_cores()
    executors.set_default()
    # Without cached bytecode files, every server process would compile all its modules.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # A shell ignores SIGINT in background jobs, and child processes inherit the ignored signal.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _share_cores() -> None:
    """Bind each pytest-xdist worker, and the servers it starts, to separate cores. Kernels use one thread per core:
    threads of two engines on one core would wait for each other."""
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    cores = sorted(EVERY_CORE)
    os.sched_setaffinity(0, cores[number::count] or {cores[number % len(cores)]})


@pytest.hookimpl(tryfirst=True)  # before pytest selects items by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _mark_slow_parameters(items)
    ranks = {name: rank for rank, name in enumerate(SLOWEST_FIRST)}
    items.sort(key=lambda item: ranks.get(item.path.stem.removeprefix("test_"), len(SLOWEST_FIRST)))


def _mark_slow_parameters(items: list[pytest.Item]) -> None:
    """Mark the parameter sets of ``slow_after(count)`` as ``slow``, except for the first ``count``."""
    counts: dict[str, int] = {}
    for item in items:
        if (mark := item.get_closest_marker("slow_after")) is not None:
            function = item.nodeid.partition("[")[0]
            counts[function] = counts.get(function, 0) + 1
            if counts[function] > mark.args[0]:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Set the cache folder to a temporary folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def httpx_timeout() -> Iterator[None]:
    """Set httpx's default timeout to 60 s: on a busy machine, responses can take longer than httpx's 5 s."""
    calls = (httpx.request, httpx.stream, httpx.get, httpx.options, httpx.head, httpx.post, httpx.put, httpx.delete)
    with pytest.MonkeyPatch.context() as patch:
        for call in (*calls, httpx.Client.__init__, httpx.AsyncClient.__init__):
            patch.setitem(inspect.unwrap(call).__kwdefaults__, "timeout", httpx.Timeout(60))
        yield


@pytest.fixture(autouse=True)
def log() -> Iterator[None]:
    """Restore the logging configuration after a test that runs commands in its own process."""
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
    """Let the processes that the test starts use all cores."""
    previous = os.sched_getaffinity(0)
    os.sched_setaffinity(0, EVERY_CORE)
    yield
    os.sched_setaffinity(0, previous)


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


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright
    from web_page import CHROMIUM

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """Browser page. Script errors, violations of the content security policy, and requests to more than one host, fail
    the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 860})
    opened = context.new_page()
    errors: list[str] = []
    requests: list[Request] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("console", lambda message: errors.append(message.text) if "Security Policy" in message.text else None)
    opened.on("request", lambda request: requests.append(request))
    yield opened
    assert errors == []
    assert len({urlsplit(request.url).netloc for request in requests if request.url.startswith("http")}) <= 1
    context.close()
