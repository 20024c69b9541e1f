"""The web page in Chromium: helpers of its tests."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt install chromium)")
LIBRARIES = Path(__file__).parents[2] / "src/penstock/serve/web/libraries/files"
needs_libraries = pytest.mark.skipif(
    not LIBRARIES.exists(), reason="needs the page's libraries (python scripts/web_libraries.py, with npm)"
)
PICTURES = Path(os.environ.get("PENSTOCK_PICTURES", ""))
"""Folder for screenshots; empty: none are saved. ``PENSTOCK_PICTURES=docs`` renews those of the documentation."""
QUESTION, ANSWER = "What is the capital of Canada?", "Ottawa"
CHINESE_QUESTION, CHINESE_ANSWER = "加拿大的首都是哪里？", "渥太华"
LONG = {"max_tokens": 1500, "min_tokens": 1500}


def show(page: Page, address: str) -> None:
    """Open the page and wait until it shows the list of models."""
    page.goto(address)
    page.wait_for_selector("#model option", state="attached")


def settings(page: Page, **values: object) -> None:
    """Set fields of the settings, which are opened if they are closed."""
    if page.locator("#settings").is_hidden():
        page.click("#toggle-settings")
    if page.locator(".group").get_attribute("open") is None:
        page.click(".group summary")
    for name, value in values.items():
        field = page.locator(f"#form [name={name}]")
        if isinstance(value, bool):
            field.set_checked(value)
        elif field.evaluate("one => one.tagName") == "SELECT":
            field.select_option(str(value))
        else:
            field.fill(str(value))


def ask(page: Page, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def answered(page: Page, number: int = 0) -> str:
    """Wait for the end of an answer; return its text."""
    answer = page.locator(".message.assistant").nth(number)
    expect(answer.locator(".speed")).to_contain_text("prompt", timeout=30_000)
    expect(answer).not_to_contain_class("busy")
    return answer.locator(".text:visible, .token-text:visible").inner_text()


def evaluate(page: Page, module: str, code: str, given: Any = None) -> Any:
    """Run a function of a module of the page: ``code`` is an expression with ``m`` (module) and ``given``."""
    return page.evaluate(f"async (given) => {{ const m = await import('/web/{module}'); return {code}; }}", given)


def save_screenshot(page: Page, name: str) -> None:
    if PICTURES.name:
        page.screenshot(path=PICTURES / name)
