"""The web page in headless Chromium, with real servers: requests, answers, faults and layout."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from image_checkpoints import save_colours
from PIL import Image
from playwright.sync_api import Browser, Page, Route, expect
from serving import Served, Servers
from tcp_proxy import TcpProxy
from web_page import (
    ANSWER,
    CHINESE_ANSWER,
    CHINESE_QUESTION,
    LONG,
    QUESTION,
    answered,
    ask,
    evaluate,
    needs_chromium,
    needs_libraries,
    save_screenshot,
    settings,
    show,
)

from penstock.cli.chat.speed import tokens_per_second

pytestmark = needs_chromium

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}

# --- Requests and answers ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_request_shown_as_curl_and_python_gets_same_answer(servers: Servers, page: Page) -> None:
    show(page, servers.get().root)
    settings(page, system='It\'s "you".', temperature=0, top_k=5)
    page.fill("#prompt", QUESTION)
    page.click("#show-code")
    curl, python = (page.locator(name).inner_text() for name in ("#curl", "#python"))
    events = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=60).stdout.split("data: ")
    chunks = [json.loads(event) for event in events if event.startswith("{")]
    answer = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert ANSWER in answer
    run = subprocess.run([sys.executable, "-c", python], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == answer, run.stderr


@pytest.mark.slow
def test_structured_output_and_wrong_values_are_shown(servers: Servers, page: Page) -> None:
    show(page, servers.get().root)
    settings(page, schema='{"type": "object"')
    ask(page, QUESTION)
    expect(page.locator(".toast")).to_contain_text("schema: not valid JSON")
    expect(page.locator(".message")).to_have_count(0)
    expect(page.locator("#prompt")).to_have_value(QUESTION)
    page.keyboard.press("Control+Shift+o")
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 9}},
        "required": ["city"],
        "additionalProperties": False,
    }
    settings(page, schema=json.dumps(schema), max_tokens=60)
    ask(page, QUESTION)
    assert list(json.loads(answered(page))) == ["city"]
    settings(page, top_p=7)
    ask(page, QUESTION)
    expect(page.locator(".toast").last).to_contain_text("top_p")
    expect(page.locator(".toast").last).to_contain_text("Correct the value")


@pytest.mark.slow
def test_tool_call_is_shown_and_result_can_be_sent(servers: Servers, page: Page) -> None:
    show(page, servers.get().root)
    settings(page, tools=json.dumps([WEATHER]), temperature=0)
    ask(page, "What is the weather in Paris?")
    call = page.locator(".tool")
    expect(call.locator("b")).to_have_text("get_weather", timeout=30_000)
    assert json.loads(call.locator("pre").inner_text()) == {"city": "Paris"}
    call.locator("textarea").fill('{"temperature": 21}')
    call.locator("button").click()
    assert "21" in answered(page, 1)
    expect(call.locator("form")).to_be_hidden()
    expect(page.locator(".tool-result summary")).to_have_text("Result of get_weather")


@pytest.mark.slow
def test_image_can_be_attached_and_is_kept(page: Page, tmp_path: Path) -> None:
    save_colours(tmp_path)
    picture = tmp_path / "blue.png"
    Image.new("RGB", (64, 64), "blue").save(picture)
    with Served("--model", str(tmp_path), "--num-gpu-blocks-override", "100") as server:
        show(page, server.root)
        page.set_input_files("#files", picture)
        expect(page.locator("#images img")).to_have_count(1)
        ask(page, "Which colour?")
        assert "blue" in answered(page)
        expect(page.locator("#images img")).to_have_count(0)
        page.reload()
        page.locator("#history .title").click()
        expect(page.locator(".message.user img")).to_have_js_property("naturalWidth", 64)


def test_stopped_answer_can_be_continued(servers: Servers, page: Page) -> None:
    show(page, servers.get().root)
    settings(page, **LONG)
    ask(page, QUESTION)
    expect(page.locator(".message.assistant .text").last).not_to_be_empty()
    page.keyboard.press("Escape")
    expect(page.locator(".speed")).to_contain_text("stopped")
    expect(page.locator("#send")).to_be_visible()
    before = page.locator(".message.assistant .text").inner_text().strip()
    settings(page, max_tokens=20, min_tokens=20)
    page.get_by_role("button", name="Continue").click()
    expect(page.locator(".message.assistant .problem")).to_contain_text("maximum length", timeout=30_000)
    after = page.locator(".message.assistant .text").inner_text()
    assert after.startswith(before) and len(after) > len(before)
    expect(page.locator(".message.assistant")).to_have_count(1)


@pytest.mark.slow
def test_full_context_is_reported_and_not_continued(page: Page) -> None:
    with Served("--max-model-len", "64", "--num-gpu-blocks-override", "100") as server:
        show(page, server.root)
        ask(page, "Tell me a short story about a dog.")
        expect(page.locator(".message.assistant .problem")).to_contain_text("The context is full", timeout=30_000)
        expect(page.get_by_role("button", name="Continue")).to_have_count(0)


@pytest.mark.slow
def test_reasoning_is_folded(servers: Servers, page: Page) -> None:
    show(page, servers.get().root)
    settings(page, thinking="on", temperature=0)
    ask(page, "What is 12 + 34 + 56?")
    assert "102" in answered(page)
    details = page.locator(".reasoning")
    expect(details.locator("summary")).to_contain_text("Reasoned for")
    assert details.get_attribute("open") is None
    expect(details.locator(".thoughts")).to_be_hidden()
    details.locator("summary").click()
    expect(details.locator(".thoughts")).to_contain_text("46")


# --- Faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("tokens", "started", "first", "last", "expected"),
    [
        pytest.param(13, 10.0, 10.24, 10.2426, 13 / 0.2426, id="answer that arrives at once"),
        pytest.param(1, 0.0, 0.5, 0.5, 2.0, id="one token"),
        pytest.param(101, 0.0, 5.0, 7.0, 50.0, id="long answer after a long prompt"),
        pytest.param(0, 0.0, None, None, None, id="no token"),
        pytest.param(5, 3.0, 3.0, 3.0, None, id="no time"),
    ],
)
def test_speed_is_same_in_page_and_terminal(
    servers: Servers, page: Page, tokens: int, started: float, first: float | None, last: float | None, expected: float
) -> None:
    found = tokens_per_second(tokens, started, first, last)
    assert found == (None if expected is None else pytest.approx(expected))
    page.goto(servers.get().root)
    times = {"tokens": tokens, "started": started, "first": first, "last": last}
    assert evaluate(page, "chat/speed.js", "m.tokensPerSecond(given)", times) == found


def test_token_colours_show_whole_characters_and_no_special_token(servers: Servers, page: Page) -> None:
    """Characters of several tokens were lost, and the end token was shown."""
    show(page, servers.get().root)
    settings(page, logprobs=True, temperature=0)
    ask(page, CHINESE_QUESTION)
    shown = answered(page)
    assert CHINESE_ANSWER in shown
    assert "<|im_end|>" not in shown and "\ufffd" not in shown
    spans = page.locator(".tokens span")
    assert "".join(spans.all_text_contents()) == shown
    page.locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tip table").first.locator("tr")).not_to_have_count(0)
    page.get_by_role("button", name="Token probabilities").click()
    expect(page.locator(".tokens")).to_be_hidden()
    expect(page.locator(".message.assistant .prose:visible")).to_contain_text(CHINESE_ANSWER)


@pytest.mark.slow
def test_completion_reports_that_tokens_have_no_bytes(servers: Servers, page: Page) -> None:
    show(page, servers.get().root)
    page.click("#toggle-settings")
    page.locator("#settings").get_by_text("Completion", exact=True).click()
    settings(page, logprobs=True, temperature=0, max_tokens=12)
    ask(page, "The capital of Canada is")
    answered(page)
    expect(page.locator(".token-note")).to_contain_text("reports no bytes")


@pytest.mark.slow
def test_stream_without_end_marker_is_shown_as_cut(servers: Servers, page: Page) -> None:
    show(page, servers.get().root)

    def cut(route: Route) -> None:
        answer = route.fetch()
        events = answer.text().split("\n\n")
        route.fulfill(response=answer, body="\n\n".join(events[: len(events) // 2]) + "\n\n")

    page.route("**/v1/chat/completions", cut)
    settings(page, min_tokens=100, temperature=0)  # many events, of which the first half has no finish reason
    ask(page, QUESTION)
    expect(page.locator(".message.assistant .problem")).to_contain_text("The answer was cut", timeout=30_000)
    page.unroute("**/v1/chat/completions")
    settings(page, min_tokens="")
    before = page.locator(".message.assistant .text").inner_text().strip()
    page.get_by_role("button", name="Continue").click()
    expect(page.locator(".message.assistant .problem")).to_be_hidden(timeout=30_000)
    assert answered(page).startswith(before)


@pytest.mark.slow
def test_lost_connection_is_shown_as_cut_and_page_explains_missing_server(servers: Servers, page: Page) -> None:
    server = servers.get()
    with TcpProxy(httpx.URL(server.root).port or 0) as proxy:
        show(page, f"http://127.0.0.1:{proxy.port}")
        settings(page, **LONG)
        ask(page, QUESTION)
        expect(page.locator(".message.assistant .text").last).not_to_be_empty()
        proxy.reset()
        expect(page.locator(".message.assistant .problem")).to_contain_text("The answer was cut", timeout=30_000)
    ask(page, QUESTION)
    problem = page.locator(".message.assistant .problem").last
    expect(problem).to_contain_text("The server does not answer", timeout=30_000)
    expect(problem).to_contain_text("Check that the server is running")


@pytest.mark.slow
def test_wrong_api_key_is_reported_and_key_is_not_stored(page: Page) -> None:
    with Served("--api-key", "open sesame") as server:
        assert httpx.get(f"{server.root}/web/live").status_code == 401
        page.goto(server.root)
        expect(page.locator("#key-refused")).to_be_hidden()
        page.locator("#key").fill("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#key-refused")).to_contain_text("refused this key")
        page.locator("#key").fill("open sesame")
        page.keyboard.press("Enter")
        page.wait_for_selector("#model option", state="attached")
        ask(page, QUESTION)
        assert ANSWER in answered(page)
        page.click("#toggle-settings")
        page.click("#show-code")
        assert "sesame" not in page.content()
        assert "$PENSTOCK_API_KEY" in page.locator("#curl").inner_text()
        assert "sesame" not in page.evaluate("JSON.stringify([location.href, {...localStorage}, document.cookie])")


# --- Layout -----------------------------------------------------------------------------------------------------------


def test_empty_thread_shows_model_context_examples_and_address(servers: Servers, page: Page) -> None:
    server = servers.get()
    show(page, server.root)
    welcome = page.locator(".welcome")
    expect(welcome).to_contain_text("penstock-demo")
    expect(welcome).to_contain_text("2,048 tokens of context")
    expect(welcome.locator(".address code")).to_have_text(server.url)
    expect(welcome.locator(".example")).to_have_count(4)
    welcome.locator(".example").first.click()
    assert ANSWER in answered(page)
    expect(page.locator("#context")).to_contain_text("of 2,048 tokens")


def test_send_is_visible_on_a_phone_and_panels_are_closed(servers: Servers, page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    show(page, servers.get().root)
    expect(page.locator("#send")).to_be_in_viewport(ratio=1)
    for panel in ("sidebar", "settings"):
        expect(page.locator(f"#{panel}")).to_be_hidden()
        page.click(f"#toggle-{panel}")
        expect(page.locator(f"#{panel}")).to_be_in_viewport()
        page.keyboard.press("Escape")
        expect(page.locator(f"#{panel}")).to_be_hidden()
        expect(page.locator(f"#toggle-{panel}")).to_be_focused()


@pytest.mark.slow
def test_page_is_usable_with_keyboard_only(servers: Servers, page: Page) -> None:
    """Ask, edit, cancel, rename, search, settings and help without a pointer."""
    show(page, servers.get().root)
    page.keyboard.type(QUESTION)  # the input has the focus
    page.keyboard.press("Enter")
    answered(page)
    page.keyboard.press("ArrowUp")
    expect(page.locator(".editor textarea")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator(".editor")).to_have_count(0)
    page.keyboard.press("Control+k")
    expect(page.locator("#search")).to_be_focused()
    page.keyboard.type("canada")
    expect(page.locator("#history .title")).to_have_count(1)
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator(".menu button").first).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.type("Canada")
    page.keyboard.press("Enter")
    expect(page.locator("#history .title")).to_have_text("Canada")
    page.keyboard.press("Control+,")
    expect(page.locator("#settings")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#settings")).to_be_hidden()
    page.keyboard.press("?")
    expect(page.locator("#keys-dialog")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("Control+Shift+o")
    expect(page.locator(".welcome")).to_be_visible()
    expect(page.locator("#prompt")).to_be_focused()


@pytest.mark.slow
def test_theme_button_changes_colours_and_is_kept(servers: Servers, page: Page) -> None:
    page.emulate_media(color_scheme="light")
    show(page, servers.get().root)
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.click("#theme")
    assert page.evaluate(background) != light
    page.reload()
    assert page.evaluate(background) != light


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 1280, 390])
def test_page_has_no_accessibility_violations(servers: Servers, browser: Browser, scheme: str, width: int) -> None:
    """The empty thread, an answer, the list of conversations, the settings, the dialogs and the live view."""
    height = 844 if width == 390 else 900
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": height})  # type: ignore[arg-type]
    page = context.new_page()

    def check() -> None:
        page.evaluate("Promise.all(document.getAnimations().map((one) => one.finished.catch(() => {})))")
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
            "the page needs horizontal scrolling"
        )

    show(page, servers.get().root)
    check()
    settings(page, logprobs=True, temperature=0)
    check()
    page.keyboard.press("Control+,")
    ask(page, f"# Heading\n\n| a | b |\n|---|---|\n| 1 | $x^2$ |\n\n```python\nprint(1)  # one\n```\n\n{QUESTION}")
    answered(page)
    check()
    page.get_by_role("button", name="Token probabilities").click()
    if page.locator("#sidebar").is_hidden():
        page.click("#toggle-sidebar")
    page.locator(".menu-button").click()
    check()
    page.keyboard.press("Escape")
    if width == 390:
        page.keyboard.press("Escape")
    page.click("#tab-live")
    page.wait_for_selector(".tile")
    check()
    page.click("#tab-live")
    page.locator("#log").focus()
    page.keyboard.press("?")
    check()
    context.close()


TEXT = """The sum of the first $n$ numbers:

$$\\sum_{k=1}^{n} k = \\frac{n(n + 1)}{2}$$

```python
def triangle(n: int) -> int:
    return n * (n + 1) // 2  # exact
```

| n | sum |
|--:|--:|
| 10 | 55 |
| 100 | 5,050 |

What is 10 times 11?"""


@pytest.mark.slow
def test_tokens_of_a_chat_show_alternatives(servers: Servers, page: Page) -> None:
    """Also makes the pictures of the documentation."""
    page.set_viewport_size({"width": 1440, "height": 900})
    show(page, servers.get().root)
    for question in (
        "What is 348 + 127?",
        "Sort these numbers: 31, 7, 94, 58",
        CHINESE_QUESTION,
        "Spell the word rain.",
    ):
        page.keyboard.press("Control+Shift+o")
        ask(page, question)
        answered(page)
    page.keyboard.press("Control+Shift+o")
    settings(page, logprobs=True, temperature=0.8, seed=1)
    page.keyboard.press("Control+,")
    ask(page, QUESTION)
    assert ANSWER in answered(page)
    ask(page, "Tell me a short story about a dog.")
    answered(page, 1)
    page.locator(".tokens").last.focus()
    for _ in range(13):
        page.keyboard.press("ArrowRight")
    expect(page.locator("#tip tr")).not_to_have_count(0)
    token = page.locator(".tokens .at").text_content()
    expect(page.locator("#tip td b").first).to_have_text(json.dumps(token))
    save_screenshot(page, "web-playground.png")
    page.emulate_media(color_scheme="dark")
    page.keyboard.press("Control+Shift+o")
    settings(page, logprobs=False, temperature=0)
    page.keyboard.press("Control+,")
    ask(page, TEXT)
    answered(page)
    page.locator("#prompt").focus()
    save_screenshot(page, "web-dark.png")
    page.set_viewport_size({"width": 390, "height": 844})
    page.keyboard.press("Control+Shift+o")
    expect(page.locator(".example")).to_have_count(4)
    save_screenshot(page, "web-phone.png")


# --- HTTP API ---------------------------------------------------------------------------------------------------------


@needs_libraries
@pytest.mark.slow
def test_api_page_lists_operations_and_sends_requests_with_key(page: Page) -> None:
    with Served("--api-key", "open sesame") as server:
        page.goto(f"{server.root}/docs")
        page.locator("#key").fill("open sesame")
        page.keyboard.press("Enter")
        operation = page.locator(".opblock", has_text="/v1/models").first
        operation.locator(".opblock-summary-control").click(timeout=30_000)
        operation.get_by_role("button", name="Try it out").click()
        operation.get_by_role("button", name="Execute").click()
        expect(operation.locator(".live-responses-table")).to_contain_text("penstock-demo")


@needs_libraries
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_api_page_has_no_accessibility_violations(servers: Servers, browser: Browser, scheme: str, width: int) -> None:
    """The list of operations, an open operation, and the answer to its request."""
    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 844})  # type: ignore[arg-type]
    page.goto(f"{servers.get().root}/docs")
    operation = page.locator(".opblock", has_text="/v1/models").first
    operation.locator(".opblock-summary-control").click(timeout=30_000)
    operation.get_by_role("button", name="Try it out").click()
    operation.get_by_role("button", name="Execute").click()
    operation.locator(".live-responses-table").wait_for()
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    page.close()


# --- Files ------------------------------------------------------------------------------------------------------------


def test_page_size_is_limited_and_libraries_are_loaded_on_demand(servers: Servers, browser: Browser) -> None:
    page = browser.new_page()
    sizes: dict[str, int] = {}
    page.on("requestfinished", lambda request: sizes.update({request.url: request.sizes()["responseBodySize"]}))
    show(page, servers.get().root)
    assert 10_000 < sum(sizes.values()) <= 100_000
    assert not [address for address in sizes if "/libraries/" in address or "/live/" in address]
    page.close()


def test_files_are_compressed_and_cached(servers: Servers) -> None:
    root = servers.get().root
    page = httpx.get(root, headers={"accept-encoding": "gzip"})
    assert page.headers["content-encoding"] == "gzip" and page.headers["cache-control"] == "no-cache"
    assert httpx.get(root, headers={"accept-encoding": "identity"}).text == page.text
    assert httpx.get(root, headers={"if-none-match": page.headers["etag"]}).status_code == 304
    for address in re.findall(r"/web/libraries/[^&]+", page.text):
        library = httpx.get(root + address)
        assert library.headers["content-encoding"] == "gzip"
        assert "immutable" in library.headers["cache-control"]


@pytest.mark.slow
def test_no_web_serves_no_page() -> None:
    with Served("--no-web") as server:
        assert httpx.get(server.root).status_code in (404, 405)  # 405 if another dialect has a POST route at /
        assert httpx.get(f"{server.root}/web/live").status_code == 404


@pytest.mark.slow
def test_page_has_utf8_characters_in_ascii_locale() -> None:
    """The page's files are read as UTF-8 even if the locale's encoding is ASCII."""
    with Served(environment={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}) as server:
        assert '"properties": {…}' in httpx.get(server.root).text


@pytest.mark.slow
def test_page_works_under_root_path(page: Page) -> None:
    with Served("--root-path", "/llm") as server:
        show(page, f"{server.root}/llm/")
        ask(page, f"**{QUESTION}**")
        answered(page)
        expect(page.locator(".bubble strong")).to_have_text(QUESTION)
        page.click("#tab-live")
        expect(page.locator(".tile")).not_to_have_count(0)
        assert page.evaluate("location.pathname") == "/llm/"
