"""The web page in headless Chromium, with real servers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from image_checkpoints import save_colours
from PIL import Image
from playwright.sync_api import Browser, Page, Request, expect, sync_playwright
from serving import Served, Servers

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt install chromium)")
PICTURES = Path(os.environ.get("PENSTOCK_PICTURES", ""))
"""Folder for screenshots; empty: none are saved. ``PENSTOCK_PICTURES=docs`` renews those of the documentation."""
QUESTION, ANSWER = "What is the capital of Canada?", "Ottawa"
LONG = {"max_tokens": 1500, "min_tokens": 1500}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """Browser page. Script errors, and requests to more than one host, fail the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 860})
    opened = context.new_page()
    errors: list[str] = []
    requests: list[Request] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("request", lambda request: requests.append(request))
    yield opened
    assert errors == []
    assert len({httpx.URL(request.url).netloc for request in requests if request.url.startswith("http")}) <= 1
    context.close()


def show(page: Page, address: str) -> None:
    """Open the page and wait until it shows the list of models."""
    page.goto(address)
    page.wait_for_selector("#model option", state="attached")


def ask(page: Page, text: str) -> None:
    page.fill("#prompt", text)
    page.keyboard.press("Enter")


def answered(page: Page, number: int = 0) -> str:
    """Wait for the end of an answer; return its text."""
    answer = page.locator(".message.assistant").nth(number)
    expect(answer.locator(".speed")).to_contain_text("prompt", timeout=30_000)
    return answer.locator(".text").last.inner_text()


def save_screenshot(page: Page, name: str) -> None:
    if PICTURES.name:
        page.screenshot(path=PICTURES / name)


def test_chat_shows_answer_logprobs_and_edit(servers: Servers, page: Page) -> None:
    show(page, servers.get().root)
    page.check("[name=logprobs]")
    page.fill("[name=temperature]", "0")
    ask(page, QUESTION)
    assert ANSWER in answered(page)
    page.locator(".tokens").focus()
    for _ in range(6):
        page.keyboard.press("ArrowRight")
    expect(page.locator("#tip tr")).to_have_count(5)
    token = page.locator(".tokens .at").text_content()
    expect(page.locator("#tip td b")).to_have_text(json.dumps(token))
    save_screenshot(page, "web-playground.png")
    ask(page, "What is the capital of France?")
    assert "Paris" in answered(page, 1)
    page.locator(".message.user button").first.click()  # editing a message removes it and all later messages
    expect(page.locator(".message")).to_have_count(0)
    expect(page.locator("#prompt")).to_have_value(QUESTION)


def test_request_shown_as_curl_and_python_gets_same_answer(servers: Servers, page: Page) -> None:
    show(page, servers.get().root)
    page.fill("[name=system]", 'It\'s "you".')
    page.fill("[name=temperature]", "0")
    page.fill("[name=top_k]", "5")
    page.fill("#prompt", QUESTION)
    page.click("#show-code")
    curl, python = (page.locator(name).inner_text() for name in ("#curl", "#python"))
    events = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=60).stdout.split("data: ")
    chunks = [json.loads(event) for event in events if event.startswith("{")]
    answer = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert ANSWER in answer
    run = subprocess.run([sys.executable, "-c", python], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == answer, run.stderr


def test_structured_output_and_wrong_values_are_shown(servers: Servers, page: Page) -> None:
    show(page, servers.get().root)
    page.fill("[name=schema]", '{"type": "object"')
    ask(page, QUESTION)
    expect(page.locator("#notice")).to_contain_text("schema: not valid JSON")
    page.click("#clear")
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 9}},
        "required": ["city"],
        "additionalProperties": False,
    }
    page.fill("[name=schema]", json.dumps(schema))
    page.fill("[name=max_tokens]", "60")
    ask(page, QUESTION)
    assert list(json.loads(answered(page))) == ["city"]
    page.fill("[name=top_p]", "7")
    ask(page, QUESTION)
    expect(page.locator("#notice")).to_contain_text("top_p")


def test_tool_call_is_shown_and_result_can_be_sent(servers: Servers, page: Page) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    show(page, servers.get().root)
    page.fill("[name=tools]", json.dumps([tool]))
    page.fill("[name=temperature]", "0")
    ask(page, "What is the weather in Paris?")
    call = page.locator(".tool")
    expect(call.locator("b")).to_have_text("get_weather", timeout=30_000)
    assert json.loads(call.locator("pre").inner_text()) == {"city": "Paris"}
    call.locator("textarea").fill('{"temperature": 21}')
    call.locator("button").click()
    assert "21" in answered(page, 1)


def test_image_can_be_attached(page: Page, tmp_path: Path) -> None:
    save_colours(tmp_path)
    picture = tmp_path / "blue.png"
    Image.new("RGB", (64, 64), "blue").save(picture)
    with Served("--model", str(tmp_path), "--num-gpu-blocks-override", "100") as server:
        show(page, server.root)
        page.set_input_files("#files", picture)
        expect(page.locator("#images img")).to_have_count(1)
        ask(page, "Which colour?")
        assert "blue" in answered(page)
        expect(page.locator(".message.user img")).to_have_count(1)


def test_escape_stops_generation(servers: Servers, page: Page) -> None:
    server = servers.get()
    show(page, server.root)
    for name, value in LONG.items():
        page.fill(f"[name={name}]", str(value))
    ask(page, QUESTION)
    expect(page.locator(".message.assistant .text").last).not_to_be_empty()
    page.keyboard.press("Escape")
    expect(page.locator(".speed")).to_contain_text("ended by user")
    expect(page.locator("#send")).to_be_enabled()


def test_message_with_html_is_shown_as_text(servers: Servers, page: Page) -> None:
    show(page, servers.get().root)
    text = "<img src=x onerror=\"document.title='no'\"> ```\n<b>bold</b>\n```"
    ask(page, text)
    assert answered(page)
    expect(page.locator(".message.user pre")).to_have_text("<b>bold</b>\n")
    assert page.locator("#log img").count() == 0
    assert page.title() == "Penstock"


def test_api_key_is_requested_and_not_stored(page: Page) -> None:
    with Served("--api-key", "open sesame") as server:
        assert httpx.get(f"{server.root}/web/live").status_code == 401
        page.goto(server.root)
        for key in ("wrong", "open sesame"):
            page.locator("#key").fill(key)
            page.keyboard.press("Enter")
        page.wait_for_selector("#model option", state="attached")
        ask(page, QUESTION)
        assert ANSWER in answered(page)
        page.click("#show-code")
        assert "sesame" not in page.content()
        assert "$PENSTOCK_API_KEY" in page.locator("#curl").inner_text()
        assert "sesame" not in page.evaluate("JSON.stringify([location.href, {...localStorage}, document.cookie])")


def test_live_view_shows_sequences_and_blocks(servers: Servers, page: Page) -> None:
    server = servers.get("--num-gpu-blocks-override", "400")
    page.set_viewport_size({"width": 1280, "height": 1000})
    show(page, f"{server.root}/#live")
    system = " ".join(f"Rule {number}." for number in range(60))
    ended = threading.Event()

    def stream_answers(number: int) -> None:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": f"{number}?"}]
        body = {"messages": messages, "stream": True, **LONG, "temperature": 1}
        while not ended.is_set():
            with httpx.stream("POST", f"{server.url}/chat/completions", json=body, timeout=60) as answer:
                for _ in answer.iter_lines():
                    if ended.is_set():
                        break

    threads = [threading.Thread(target=stream_answers, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        rows = page.locator("#sequences tbody tr")
        expect(rows).to_have_count(4, timeout=30_000)
        expect(rows.first.locator("td").last).to_contain_text(
            ",", timeout=30_000
        )  # the row lists several sequences that share its blocks
        expect(page.locator("#chart-tokens")).to_have_attribute("aria-label", re.compile("generated: now [1-9]"))
        page.check("#hold")
        rows.first.locator("button").click()
        expect(rows.first.locator("button")).to_have_attribute("aria-pressed", "true")
        page.locator("#chart-steps").focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator("#step")).to_contain_text("output tokens")
        shared = page.locator("#blocks").get_attribute("aria-label") or ""
        assert "0 shared" not in shared and "shared" in shared
        save_screenshot(page, "web-live.png")
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    page.uncheck("#hold")
    expect(rows).to_have_count(0, timeout=30_000)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_page_has_no_accessibility_violations(servers: Servers, browser: Browser, scheme: str, width: int) -> None:
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800})  # type: ignore[arg-type]
    page = context.new_page()
    show(page, servers.get().root)
    ask(page, QUESTION)
    answered(page)
    for view in ("playground", "live"):
        page.click(f"#tab-{view}")
        page.wait_for_selector(".tile" if view == "live" else "#prompt")
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
            "the page must not need horizontal scrolling"
        )
    save_screenshot(page, f"web-{scheme}-{width}.png") if width == 390 else None
    context.close()


def test_page_size_is_limited(servers: Servers, browser: Browser) -> None:
    page = browser.new_page()
    sizes: list[int] = []
    page.on("requestfinished", lambda request: sizes.append(request.sizes()["responseBodySize"]))
    show(page, servers.get().root)
    assert 10_000 < sum(sizes) <= 200_000
    page.close()


def test_no_web_serves_no_page() -> None:
    with Served("--no-web") as server:
        assert httpx.get(server.root).status_code in (404, 405)  # 405 if another dialect has a POST route at /
        assert httpx.get(f"{server.root}/web/live").status_code == 404


def test_page_has_utf8_characters_in_ascii_locale() -> None:
    """The page's files are read as UTF-8 even if the locale's encoding is ASCII."""
    with Served(environment={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}) as server:
        assert '"properties": {…}' in httpx.get(server.root).text


def test_live_view_is_shown_under_root_path(page: Page) -> None:
    with Served("--root-path", "/llm") as server:
        show(page, f"{server.root}/llm/")
        page.click("#tab-live")
        expect(page.locator(".tile")).not_to_have_count(0)
        assert page.evaluate("location.pathname") == "/llm/"
