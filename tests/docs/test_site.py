"""The documentation site built by ``make docs``: complete, without warnings, and without requests to other hosts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from repository import ROOT

from penstock.config.settings import settings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("zensical") is None, reason="needs pip install --group docs"),
]
SITE = ROOT / "build/site"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LOADED = {"script", "img", "iframe", "source", "video", "audio", "embed", "object", "link", "form"}
"""Elements whose URLs a browser loads without a click."""


class Page(HTMLParser):
    """Parser that collects the URLs, anchors and labels of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.linked: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.labels: set[str] = set()
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("href", "src", "srcset", "data", "action", "poster") and value:
                (self.loaded if tag in LOADED else self.linked).append(value)
            if name in ("id", "name") and value:
                self.anchors.add(value)
            if name in ("dir", "title", "placeholder", "aria-label", "alt") and value:
                self.labels.add(value)


@pytest.fixture(scope="module")
def site() -> dict[Path, Page]:
    """Pages of the built site by path."""
    built = subprocess.run([sys.executable, "scripts/docs", "build"], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    assert built.stderr.strip() == "No issues found"
    return {path: Page(path) for path in SITE.rglob("*.html")}


def test_navigation_lists_every_page_once() -> None:
    """New pages must be added to ``nav`` of zensical.toml."""

    def pages(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [page for inner in (entry.values() if isinstance(entry, dict) else entry) for page in pages(inner)]

    listed = pages(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"])
    written = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    added = {"index.md", "zh/index.md", "reference/options.md", "reference/routes.md", "reference/python.md"}
    assert len(listed) == len(set(listed))
    assert set(listed) == written | added


def test_links_have_existing_targets(site: dict[Path, Page]) -> None:
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


def test_pages_load_nothing_from_other_hosts(site: dict[Path, Page]) -> None:
    for path, page in site.items():
        assert not [address for address in page.loaded if urlsplit(address).netloc], path
        assert 'class="mermaid"' not in page.text, f"{path}: the Mermaid library would be loaded from another host"
        assert not re.search(r"url\(\s*['\"]?(https?:)?//|@import", page.text), path
    for sheet in SITE.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?(https?:)?//|@import", sheet.read_text(encoding="utf-8")), sheet


def test_generated_pages_have_options_routes_and_classes(site: dict[Path, Page]) -> None:
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
    assert "&gt;&gt;&gt; " in python or 'class="gp"' in python, "examples are not code blocks"


@contextmanager
def hosted(folder: Path) -> Iterator[str]:
    """URL at which a folder is served within the context."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def address(site: dict[Path, Page]) -> Iterator[str]:
    with hosted(SITE) as found:
        yield found


def test_pages_link_to_their_translation(site: dict[Path, Page]) -> None:
    """Chinese pages also have the attribute ``lang="zh"``."""
    for path, page in site.items():
        name = path.relative_to(SITE).as_posix()
        if name == "404.html":
            continue
        chinese = name.startswith("zh/")
        assert f'<html lang="{"zh" if chinese else "en"}"' in page.text
        other = SITE / (name.removeprefix("zh/") if chinese else f"zh/{name}")
        (link,) = re.findall(r'<a class="md-header__button" href="([^"]+)" hreflang', page.text)
        target = (path.parent / link / "index.html").resolve()
        assert target == (other if other.exists() else SITE / "zh/index.html"), name


def test_pages_show_texts_of_theme_instead_of_their_keys(site: dict[Path, Page]) -> None:
    """The theme has no Chinese for some of its texts."""
    spec = find_spec("zensical")
    assert spec is not None and spec.origin is not None
    english = Path(spec.origin).parent / "templates/partials/languages/en.html"
    keys = set(re.findall(r'^  "([\w.]+)":', english.read_text(encoding="utf-8"), re.MULTILINE))
    assert {"direction", "search.config.lang", "top"} <= keys
    for path, page in site.items():
        texts = re.findall(r">\s*(\w+(?:\.\w+)+)\s*</(?:a|span|div|label|button|p)>", page.text)
        (config,) = re.findall(r'<script id="__config" type="application/json">(.*?)</script>', page.text, re.DOTALL)
        assert not keys & {*page.labels, *texts, *json.loads(config)["translations"].values()}, path
        assert '<body dir="ltr"' in page.text, path


def test_version_selector_lists_versions(site: dict[Path, Page], tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "scripts/docs"))
    try:
        from versions import add_version
    finally:
        sys.path.pop(0)
    for version in ("0.9", "0.10", "0.9"):  # the last call replaces an existing version
        add_version(SITE, tmp_path, version)
    listed = json.loads((tmp_path / "versions.json").read_text())
    assert [(each["version"], each["aliases"]) for each in listed] == [("0.10", ["latest"]), ("0.9", [])]
    with pytest.raises(SystemExit, match="not a version"):
        add_version(SITE, tmp_path, "../elsewhere")
    if CHROMIUM is None:
        return
    from playwright.sync_api import sync_playwright

    with hosted(tmp_path) as root, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(root)
        page.wait_for_url(f"{root}latest/")
        page.goto(f"{root}0.9/cookbook/qwen3/")
        page.get_by_text("older version").wait_for()
        page.locator(".md-version__current").hover(force=True)  # opens the list, which covers this element
        page.locator(".md-version__link", has_text="0.10").click()
        page.wait_for_url(f"{root}0.10/")
        page.goto(f"{root}0.10/cookbook/qwen3/")
        page.locator(".md-header a[hreflang=zh]").click()
        page.wait_for_url(f"{root}0.10/zh/cookbook/qwen3/")
        assert not page.get_by_text("旧版本").is_visible()
        browser.close()


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt install chromium)")
def test_search_finds_pages_in_both_languages(site: dict[Path, Page], address: str) -> None:
    """The search sends no requests to other hosts, and causes no script errors."""
    from playwright.sync_api import sync_playwright

    urls: list[str] = []
    errors: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("request", lambda request: urls.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        for query, folder in (("preemption", SITE), ("迁移", SITE / "zh")):
            page.goto(f"{address}features/")
            page.click(".md-search__button")
            page.locator("dialog input").fill(query)
            result = page.locator("a[role=option]").first
            result.wait_for()
            found = SITE / urlsplit(result.get_attribute("href") or "").path.strip("/") / "index.html"
            assert found.is_relative_to(folder)
            assert query in site[found].text
        browser.close()
    assert errors == []
    assert urls
    assert not [url for url in urls if not url.startswith((address, "data:", "blob:"))]
