"""Additions to Zensical's theme: a language switch for pages, and a note in older versions.

The generator expects one site per language; here, a page in docs/zh/ translates the page with the same path in docs/.
"""

from __future__ import annotations

import json

from pages import BUILT, ROOT, write_file

THEME = ROOT / "build/theme"
CHINESE = "zh/"
"""URL prefix of Chinese pages."""
LANGUAGE = """\
{% set address = page.url if page else "" %}
{% import "partials/languages/" ~ ("zh" if address is startingwith "zh/" else "en") ~ ".html" as lang %}
{% import "partials/languages/en.html" as fallback %}
{% macro t(key) %}{{ lang.t(key) or fallback.t(key) or key }}{% endmacro %}
"""
"""Texts of the theme by the page's language. As in the theme's own template, English is used for what a language lacks:
Chinese lacks "direction" and a few texts."""
SWITCH = """\
{%% set translated = %s %%}
{%% set address = page.url if page else "" %%}
{%% if address is startingwith "zh/" %%}
  {%% set link, code, name = address[3:], "en", "English" %%}
{%% else %%}
  {%% set link, code, name = ("zh/" ~ address if address in translated else "zh/"), "zh", "中文" %%}
{%% endif %%}
<a class="md-header__button" href="{{ (link or ".") | url }}" hreflang="{{ code }}" lang="{{ code }}">{{ name }}</a>
"""
MAIN = """\
{% extends "base.html" %}
{% block outdated %}
  {% if page and page.url is startingwith "zh/" %}
    这是旧版本的文档；最新版本可在页眉中选择。
  {% else %}
    This is the documentation of an older version. Select the latest one in the header.
  {% endif %}
{% endblock %}
"""


def write_theme() -> None:
    """Write the templates; call it after all pages are written."""
    chinese = sorted(path.relative_to(BUILT / CHINESE).as_posix() for path in (BUILT / CHINESE).rglob("*.md"))
    if missing := [name for name in chinese if not (BUILT / name).exists()]:
        raise SystemExit(f"docs/zh/{missing[0]} has no corresponding page in docs, which the language switch links to")
    addresses = [name.removesuffix(".md").removesuffix("index").rstrip("/") for name in chinese]
    translated = [f"{address}/" if address else "" for address in addresses]
    for name, text in (
        ("partials/language.html", LANGUAGE),
        ("partials/alternate.html", SWITCH % json.dumps(translated)),
        ("main.html", MAIN),
        # empty: the theme's inline script fails if the site has no absolute URL, and the theme's bundle does the same
        ("partials/javascripts/outdated.html", ""),
    ):
        write_file(THEME / name, text)
