"""The site that ``make site`` built is complete, and loads nothing from another host."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

import kvtier
from tests.docs.pages import ROOT

SITE = ROOT / "build/site"
INDEX = SITE / "search/search_index.json"
LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
"""Tags whose address a browser loads by itself."""


def _is_fresh() -> bool:
    sources = [*ROOT.glob("docs/**/*.md"), ROOT / "mkdocs.yml"]
    return INDEX.exists() and INDEX.stat().st_mtime > max(
        source.stat().st_mtime for source in sources
    )


pytestmark = pytest.mark.skipif(not _is_fresh(), reason="the site is not built: make site")


class Loaded(HTMLParser):
    """Addresses that a page loads when it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in LOADING and given.get("rel") != "canonical":
            self.found.append(given.get(LOADING[tag]) or "")


def _html() -> list[Path]:
    return sorted(SITE.glob("**/*.html"))


def test_no_page_asks_another_host_for_anything() -> None:
    for path in _html():
        loaded = Loaded()
        loaded.feed(path.read_text(encoding="utf-8"))
        outside = [each for each in loaded.found if "//" in each]
        assert not outside, path
    for path in SITE.glob("**/*.css"):
        text = path.read_text(encoding="utf-8")
        assert "url(http" not in text, path
        assert "url(//" not in text, path
        assert "@import" not in text, path


def test_pages_that_lie_outside_of_docs_are_there_and_marks_are_not() -> None:
    names = {str(path.relative_to(SITE)) for path in _html()}
    assert {"index.html", "changes.html", "contributing.html", "benchmarks/index.html"} <= names
    assert "guides/troubleshooting.html" in names
    for path in _html():
        text = path.read_text(encoding="utf-8")
        assert "<!-- not run" not in text, path
        assert "<!-- prints" not in text, path
        assert f"kvtier {kvtier.__version__}. The tests" in text or path.name == "404.html", path


def test_search_knows_the_symptoms() -> None:
    found = json.loads(INDEX.read_text(encoding="utf-8"))["docs"]
    titles = {each["title"] for each in found if each["location"].startswith("guides/trouble")}
    assert {"Hits are slower than before", "Nothing is found again", "A store is down"} <= titles
