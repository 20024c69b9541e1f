"""Conversations of the web page: history, branches, search, export and deletion."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from serving import Servers
from web_page import ANSWER, LONG, QUESTION, answered, ask, needs_chromium, settings, show

pytestmark = needs_chromium


def test_conversation_is_listed_and_shown_again_after_reload(servers: Servers, page: Page) -> None:
    show(page, servers.get().root)
    ask(page, QUESTION)
    assert ANSWER in answered(page)
    page.reload()
    expect(page.locator(".welcome")).to_be_visible()
    page.locator("#history .title", has_text=QUESTION).click()
    assert ANSWER in answered(page)
    expect(page.locator("#history .title")).to_have_attribute("aria-current", "true")


def test_edit_and_new_answer_start_branches(servers: Servers, page: Page) -> None:
    show(page, servers.get().root)
    settings(page, temperature=0)
    ask(page, QUESTION)
    answered(page)
    user = page.locator(".message.user")
    user.hover()
    user.get_by_role("button", name="Edit").click()
    user.locator("textarea").fill("changed")
    user.get_by_role("button", name="Cancel").click()
    expect(user.locator(".bubble")).to_have_text(QUESTION)
    user.get_by_role("button", name="Edit").click()
    user.locator("textarea").fill("What is the capital of France?")
    user.get_by_role("button", name="Send").click()
    expect(user.locator(".branches")).to_have_text("2 / 2")
    assert "Paris" in answered(page)
    user.get_by_role("button", name="Previous branch").click()
    expect(user.locator(".bubble")).to_have_text(QUESTION)
    assert ANSWER in answered(page)
    page.locator(".message.assistant").get_by_role("button", name="Regenerate").click()
    expect(page.locator(".message.assistant .branches")).to_have_text("2 / 2", timeout=30_000)
    page.reload()
    page.locator("#history .title").click()
    expect(page.locator(".message.assistant .branches")).to_have_text("2 / 2")
    expect(page.locator(".message.user .branches")).to_have_text("1 / 2")


@pytest.mark.slow
def test_several_answers_are_branches(servers: Servers, page: Page) -> None:
    show(page, servers.get().root)
    settings(page, n=3)
    ask(page, QUESTION)
    expect(page.locator(".message.assistant .branches")).to_have_text("1 / 3", timeout=30_000)


@pytest.mark.slow
def test_answer_continues_while_another_conversation_is_shown(servers: Servers, page: Page) -> None:
    show(page, servers.get().root)
    settings(page, **LONG)
    ask(page, QUESTION)
    expect(page.locator(".message.assistant .text").last).not_to_be_empty()
    page.click("#new-chat")
    expect(page.locator("#history .dot")).to_have_count(1)
    expect(page.locator("#history .dot")).to_have_count(0, timeout=30_000)
    page.locator("#history .title").click()
    expect(page.locator(".speed")).to_contain_text("1,500 tokens")


@pytest.mark.slow
def test_answer_of_a_closed_page_is_kept_as_cut(servers: Servers, page: Page) -> None:
    show(page, servers.get().root)
    settings(page, **LONG)
    ask(page, QUESTION)
    expect(page.locator(".message.assistant .text").last).not_to_be_empty()
    page.reload()
    page.locator("#history .title").click()
    expect(page.locator(".message.assistant .problem")).to_contain_text("The answer was cut")


@pytest.mark.slow
def test_conversations_are_searched_renamed_exported_and_deleted(servers: Servers, page: Page, tmp_path: Path) -> None:
    show(page, servers.get().root)
    for question in (QUESTION, "What is 348 + 127?"):
        page.keyboard.press("Control+Shift+o")
        ask(page, question)
        answered(page)
    titles = page.locator("#history .title")
    expect(titles).to_have_count(2)
    page.fill("#search", ANSWER.upper())  # in an answer, not in a title
    expect(titles).to_have_text([QUESTION])

    def choose(label: str) -> None:
        page.locator("#history .menu-button").first.click()
        page.get_by_role("button", name=label, exact=True).click()

    choose("Rename")
    page.fill("#rename", "Canada")
    page.keyboard.press("Enter")
    expect(titles).to_have_text(["Canada"])
    for label, suffix in (("Export as JSON", "json"), ("Export as Markdown", "md")):
        with page.expect_download() as download:
            choose(label)
        assert download.value.suggested_filename == f"Canada.{suffix}"
        download.value.save_as(tmp_path / suffix)
    exported = json.loads((tmp_path / "json").read_text())
    assert [message["role"] for message in exported["messages"]] == ["user", "assistant"]
    assert f"## User\n\n{QUESTION}\n\n## Assistant\n\n" in (tmp_path / "md").read_text()
    choose("Delete")
    expect(titles).to_have_count(0)
    page.get_by_role("button", name="Undo").click()
    expect(titles).to_have_text(["Canada"])
    choose("Delete")
    expect(titles).to_have_count(0)
    page.fill("#search", "")
    expect(titles).to_have_count(1)


@pytest.mark.slow
def test_page_works_without_storage(servers: Servers, page: Page) -> None:
    for name in ("indexedDB", "localStorage", "sessionStorage"):
        page.add_init_script(f"Object.defineProperty(window, '{name}', {{get() {{ throw new Error('refused'); }}}})")
    show(page, servers.get().root)
    expect(page.locator("#history-note")).to_contain_text("refuses storage")
    ask(page, QUESTION)
    assert ANSWER in answered(page)
    page.click("#theme")
    settings(page, temperature=0)
    expect(page.locator("#history .title")).to_have_text(QUESTION)
