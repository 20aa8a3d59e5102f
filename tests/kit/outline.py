"""Outline of an HTML page, and a check that it is well formed."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "br", "link", "img"}


class Outline(HTMLParser):
    """Checks that elements are closed in order, and collects ids, links and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href"):
                self.links.append(value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def outline(html: str) -> Outline:
    parser = Outline()
    parser.feed(html)
    parser.close()
    assert not parser.open
    return parser
