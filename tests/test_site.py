"""The site of the documents, as ``make docs`` builds it: whole, without a warning, and of one host."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from penstock.config.settings import settings

pytestmark = pytest.mark.skipif(find_spec("zensical") is None, reason="needs pip install --group docs")
ROOT = Path(__file__).parents[1]
SITE = ROOT / "build/site"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LOADED = {"script", "img", "iframe", "source", "video", "audio", "embed", "object", "link", "form"}
"""Elements whose addresses a browser asks without a click."""


class Page(HTMLParser):
    """Addresses and anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.linked: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("href", "src", "srcset", "data", "action", "poster") and value:
                (self.loaded if tag in LOADED else self.linked).append(value)
            if name in ("id", "name") and value:
                self.anchors.add(value)


@pytest.fixture(scope="module")
def site() -> dict[Path, Page]:
    """Its pages by their paths."""
    built = subprocess.run([sys.executable, "scripts/docs", "build"], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    assert built.stderr.strip() == "No issues found"
    return {path: Page(path) for path in SITE.rglob("*.html")}


def test_every_page_is_in_the_navigation() -> None:
    """A new one belongs into ``nav`` of zensical.toml, and none is there twice."""

    def pages(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [page for inner in (entry.values() if isinstance(entry, dict) else entry) for page in pages(inner)]

    listed = pages(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"])
    written = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    added = {"index.md", "zh/index.md", "reference/options.md", "reference/routes.md", "reference/python.md"}
    assert len(listed) == len(set(listed))
    assert set(listed) == written | added


def test_links_lead_somewhere(site: dict[Path, Page]) -> None:
    for path, page in site.items():
        for address in [*page.linked, *page.loaded]:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file(), (path, address)
            if parts.fragment and target in site:
                assert unquote(parts.fragment) in site[target].anchors, (path, address)


def test_pages_ask_no_other_host(site: dict[Path, Page]) -> None:
    for path, page in site.items():
        assert not [address for address in page.loaded if urlsplit(address).netloc], path
        assert 'class="mermaid"' not in page.text, f"{path}: what draws it comes from another host"
        assert not re.search(r"url\(\s*['\"]?(https?:)?//|@import", page.text), path
    for sheet in SITE.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?(https?:)?//|@import", sheet.read_text(encoding="utf-8")), sheet


def test_generated_pages_are_complete(site: dict[Path, Page]) -> None:
    options, routes, python = (
        site[SITE / f"reference/{name}/index.html"].text for name in ("options", "routes", "python")
    )
    for setting in settings().values():
        assert f"<code>{setting.flag}</code>" in options
    for path in ("/v1/chat/completions", "/v1/batches", "/v2/models/{name}/infer", "/api/chat", "/penstock/instances"):
        assert f"<code>{path}</code>" in routes
    anchors = site[SITE / "reference/python/index.html"].anchors
    assert {"penstock.LLM.generate", "penstock.AsyncLLM.generate", "penstock.SamplingParams.top_p"} <= anchors
    assert "penstock.frontend.outputs.CompletionOutput.logprobs" in anchors
    assert "&gt;&gt;&gt; " in python or 'class="gp"' in python, "examples are code"


@pytest.fixture(scope="module")
def address(site: dict[Path, Page]) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt install chromium)")
def test_search_in_a_browser(site: dict[Path, Page], address: str) -> None:
    """What is found in both languages, with no request to another host and no script that fails."""
    from playwright.sync_api import sync_playwright

    asked: list[str] = []
    wrong: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        for word, folder in (("preemption", SITE), ("迁移", SITE / "zh")):
            page.goto(f"{address}features/")
            page.click(".md-search__button")
            page.locator("dialog input").fill(word)
            result = page.locator("a[role=option]").first
            result.wait_for()
            found = SITE / urlsplit(result.get_attribute("href") or "").path.strip("/") / "index.html"
            assert found.is_relative_to(folder)
            assert word in site[found].text
        browser.close()
    assert wrong == []
    assert asked
    assert not [url for url in asked if not url.startswith((address, "data:", "blob:"))]
