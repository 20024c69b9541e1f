"""The live view of the web page."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from playwright.sync_api import Page, expect
from serving import Served, Servers
from web_page import LIBRARIES, LONG, PICTURES, evaluate, needs_chromium, save_screenshot, show

pytestmark = needs_chromium


@contextmanager
def load(server: Served) -> Iterator[None]:
    """Four clients that stream long answers to prompts with a common prefix."""
    ended = threading.Event()
    system = " ".join(f"Rule {number}." for number in range(60))

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
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def painted(page: Page, chart: str, name: str) -> int:
    """Number of pixels of a chart that have about a colour of the style sheet."""
    colour = evaluate(page, "ui/theme.js", "m.colour(given)", name)
    red, green, blue = (int(value) for value in re.findall(r"\d+", colour)[:3])
    code = """(canvas, [red, green, blue]) => {
      const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
      let found = 0;
      for (let i = 0; i < data.length; i += 4) {
        const distance = Math.abs(data[i] - red) + Math.abs(data[i + 1] - green) + Math.abs(data[i + 2] - blue);
        found += data[i + 3] > 60 && distance < 60;
      }
      return found;
    }"""
    return int(page.locator(f"{chart} canvas").evaluate(code, [red, green, blue]))


def wait_painted(page: Page, *charts: str) -> None:
    """Wait until charts have lines or bars."""
    deadline = time.monotonic() + 30
    while empty := [chart for chart in charts if painted(page, chart, "first") < 40]:
        assert time.monotonic() < deadline, f"empty charts: {empty}"
        page.wait_for_timeout(200)


@pytest.mark.slow
def test_live_view_shows_sequences_and_blocks(servers: Servers, page: Page) -> None:
    server = servers.get("--num-gpu-blocks-override", "400")
    page.set_viewport_size({"width": 1280, "height": 1180})
    show(page, f"{server.root}/#live")
    rows = page.locator("#sequences tbody tr")
    with load(server):
        expect(rows).to_have_count(4, timeout=30_000)
        # the row lists several sequences that share its blocks
        expect(rows.first.locator("td").last).to_contain_text(",", timeout=30_000)
        expect(page.locator("#chart-tokens")).to_have_attribute("aria-label", re.compile("generated: now [1-9]"))
        expect(page.locator("#chart-tokens-summary")).to_contain_text(re.compile("generated [1-9]"))
        expect(page.locator("#chart-itl-summary")).to_contain_text("p95")
        if PICTURES.name:
            page.wait_for_timeout(40_000)  # a picture of a longer history
        if LIBRARIES.exists():
            wait_painted(page, "#chart-tokens", "#chart-queue", "#chart-itl")
        page.check("#hold")
        rows.first.locator("button").click()
        expect(rows.first.locator("button")).to_have_attribute("aria-pressed", "true")
        page.locator("#chart-steps").focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator("#step")).to_contain_text("output tokens")
        shared = page.locator("#blocks").get_attribute("aria-label") or ""
        assert "0 shared" not in shared and "shared" in shared
        page.locator("#live").evaluate("one => { one.scrollTop = 0; }")
        save_screenshot(page, "web-live.png")
    page.uncheck("#hold")
    expect(rows).to_have_count(0, timeout=30_000)


def test_time_axis_has_gaps_where_states_are_missing(servers: Servers, page: Page) -> None:
    """States are placed by their time; a pause, in which the tab was hidden, is not drawn as a line."""
    page.goto(servers.get().root)
    times = [100, 101, 102, 130, 131]
    states = [
        {
            "time": time,
            "models": [
                {
                    "name": "a",
                    "counters": {"requests": 1, "generation_tokens": 10 * time},
                    "engines": [{"stats": {"running": 1, "waiting": 0}}],
                }
            ],
        }
        for time in times
    ]
    rows = "m.points(m.historyOf({name: 'a'}), [m.rateOf('generation_tokens'), (one) => one.running])"
    code = f"(given.forEach(m.take), {rows})"
    found, rates, running = evaluate(page, "live/state.js", code, states)
    assert found == [101, 102, pytest.approx(102.001), 130, 131]
    assert rates == [10, 10, None, 10, 10]
    assert running == [1, 1, None, 1, 1]
