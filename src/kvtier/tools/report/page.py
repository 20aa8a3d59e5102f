"""HTML pages of reports: one file without external resources, for wide, narrow and dark screens.

``page.html.j2`` is the base template with its style, and ``draw.html.j2`` the macro for figures.
The template of a report extends the base template and fills its blocks.
"""

from __future__ import annotations

from importlib import resources

from jinja2 import Environment, FunctionLoader, StrictUndefined


def render_page(template: str, **values: object) -> str:
    """Return the page as one HTML document. template: "package/file"."""
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
