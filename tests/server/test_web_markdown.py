"""Markdown, code and mathematics on the web page."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, Route, expect
from serving import Servers
from web_page import QUESTION, answered, ask, evaluate, needs_chromium, needs_libraries, show

pytestmark = [needs_chromium, needs_libraries]

TEXT = """# Title

A *word*, **two words**, `code` and [a link](https://example.com/).

| a | b |
|---|--:|
| 1 | 2 |

```python
def f(x: int) -> str:
    return f"{x}"
```

Inline $x^2 + \\frac{1}{2}$, \\(y\\), prices of $5 and $10, and a block:

$$\\int_0^1 f(x)\\,dx$$

1. one
2. two
   - nested

- [x] done
"""
SHOW = """(async () => {
  const element = document.createElement('div');
  document.querySelector('#log').replaceChildren(element);
  const view = new m.MarkdownView(element);
  await m.markdownReady();
  return %s;
})()"""
"""Expression that creates a view ``view`` of ``element``."""


def test_markdown_of_a_message_is_rendered(servers: Servers, page: Page) -> None:
    show(page, servers.get().root)
    ask(page, TEXT)
    bubble = page.locator(".bubble")
    expect(bubble.locator("h3")).to_have_text("Title")
    expect(bubble.locator("td")).to_have_text(["1", "2"])
    expect(bubble.locator("pre .hljs-keyword").first).to_have_text("def")
    expect(bubble.locator("math")).to_have_count(3)
    expect(bubble.locator("p", has_text="prices")).to_contain_text("$5 and $10")
    expect(bubble.locator("a")).to_have_attribute("rel", "noopener noreferrer nofollow")
    expect(bubble.locator("ol > li")).to_have_count(2)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    bubble.locator(".code button").click()
    assert page.evaluate("navigator.clipboard.readText()") == 'def f(x: int) -> str:\n    return f"{x}"'
    answered(page)


@pytest.mark.slow
def test_growing_text_keeps_finished_blocks_and_ends_as_whole_text(servers: Servers, page: Page) -> None:
    """Every prefix is shown; blocks before the last two are never replaced."""
    page.goto(servers.get().root)
    code = (
        SHOW
        % """await (async () => {
      let replaced = 0;
      for (let end = 1; end <= given.length; end += 1) {
        const before = [...element.children];
        view.show(given.slice(0, end), true);
        before.slice(0, -2).forEach((block, i) => { replaced += element.children[i] !== block; });
      }
      view.show(given);
      const whole = document.createElement('div');
      new m.MarkdownView(whole).show(given);
      await new Promise((resolve) => setTimeout(resolve, 0));
      return [replaced, element.textContent, whole.textContent];
    })()"""
    )
    replaced, grown, whole = evaluate(page, "render/markdown.js", code, TEXT.replace("$", ""))
    assert replaced == 0
    assert grown == whole


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("text", "closed"),
    [
        ("a **b", "a **b**"),
        ("a **b**", "a **b**"),
        ("a **", "a "),
        ("a `b", "a `b`"),
        ("a `b` c", "a `b` c"),
        ("```\na **b", "```\na **b"),
        ("**a**\n\nb **c *d", "**a**\n\nb **c *d**"),
    ],
)
def test_open_marks_at_the_end_are_closed(servers: Servers, page: Page, text: str, closed: str) -> None:
    page.goto(servers.get().root)
    assert evaluate(page, "render/open_marks.js", "m.closeOpenMarks(given)", text) == closed


def test_html_and_images_and_scripts_of_a_message_are_not_executed(servers: Servers, page: Page) -> None:
    show(page, servers.get().root)
    attacks = (
        "<img src=x onerror=\"document.title='no'\"> <script>document.title='no'</script>\n\n"
        "<div onclick=\"document.title='no'\">block</div>\n\n"
        "[link](javascript:document.title='no') ![picture](http://other.example/a.png)\n\n"
        "$\\href{javascript:alert(1)}{x}$ $\\includegraphics{http://other.example/a.png}$\n\n"
        "```html\n<b>bold</b>\n```\n"
    )
    ask(page, attacks)
    answered(page)
    bubble = page.locator(".bubble")
    expect(bubble).to_contain_text("onerror=")
    expect(bubble.locator("pre")).to_have_text("<b>bold</b>")
    assert bubble.locator("img, script, div[onclick]").count() == 0
    addresses = [link.get_attribute("href") or "" for link in bubble.locator("a").all()]
    assert not [address for address in addresses if address.startswith("javascript:")]
    assert page.title() != "no"


@pytest.mark.slow
def test_page_without_libraries_shows_plain_text_and_says_so(servers: Servers, page: Page) -> None:
    """As a build without npm sends it: the document names no libraries."""

    def remove_libraries(route: Route) -> None:
        answer = route.fetch()
        start = answer.text().index('name="penstock-libraries" content="') + len('name="penstock-libraries" content="')
        end = answer.text().index('"', start)
        route.fulfill(response=answer, body=answer.text()[:start] + "{}" + answer.text()[end:])

    root = servers.get().root
    page.route(f"{root}/", remove_libraries)
    show(page, f"{root}/")
    expect(page.locator(".welcome")).to_contain_text("made without npm")
    ask(page, f"**{QUESTION}**")
    answered(page)
    expect(page.locator(".bubble")).to_contain_text(f"**{QUESTION}**")
    page.click("#tab-live")
    expect(page.locator("#chart-tokens")).to_contain_text("made without npm")
    expect(page.locator(".tile")).not_to_have_count(0)
