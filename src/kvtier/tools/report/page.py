"""An HTML page: one file, no external resources, for a screen, a phone or a dark room.

``page.html.j2`` is its frame: style, the macro ``draw`` for pictures; others fill its blocks.
"""

from __future__ import annotations

from importlib import resources

from jinja2 import Environment, FunctionLoader, StrictUndefined


def render_page(template: str, **values: object) -> str:
    """The page as one HTML document. template: "package/file"; it extends the frame."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(_source),
    )
    return environment.get_template(template).render(values)


def _source(name: str) -> str:
    package, _, file = name.partition("/")
    return resources.files(package).joinpath(file).read_text(encoding="utf-8")
