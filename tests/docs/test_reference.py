"""The reference pages name everything that the code defines, and nothing else."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

import kvtier
from kvtier.connectors.common.environment import PLACES
from kvtier.core.config import variable_of
from kvtier.observe.specs import DECLARED
from tests.docs.pages import ROOT

PUBLIC: list[str] = vars(kvtier)["__all__"]
"""Names that the package exports; its stub does not list them."""

REFERENCE = ROOT / "docs/reference"
NAME = re.compile(r"`(\w+)`")


def _section(page: str, title: str) -> str:
    text = (REFERENCE / page).read_text(encoding="utf-8")
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def _rows(text: str) -> dict[str, list[str]]:
    """Return the rows of a table without the first cell, by the name in that cell."""
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and (found := NAME.match(cells[0])):
            rows[found[1]] = cells[1:]
    return rows


@pytest.mark.engine
@pytest.mark.parametrize("page", ["commands.md", "metrics.md", "python.md"])
def test_pages_that_follow_from_the_code_are_up_to_date(page: str) -> None:
    from scripts.reference_pages import PAGES

    said = (REFERENCE / page).read_text(encoding="utf-8")
    assert said == PAGES[page](), "run python scripts/reference_pages.py"


def test_every_metric_that_a_page_names_is_declared_with_its_labels() -> None:
    pages = [*ROOT.glob("docs/guides/*.md"), *ROOT.glob("docs/*.md"), ROOT / "README.md"]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    named = re.findall(r"`((?:\w+:)?kvtier_\w*[^_\W])(?:\{([\w,]+)\})?`", text)
    assert len(named) > 20
    for name, labels in named:
        assert set(filter(None, labels.split(","))) <= set(DECLARED[name].labels), name


def test_every_variable_of_the_environment_is_on_its_page() -> None:
    sources = [path.read_text(encoding="utf-8") for path in ROOT.glob("src/kvtier/**/*.py")]
    found = {name for source in sources for name in re.findall(r"\bKVTIER_[A-Z_]+\b", source)}
    told = _rows((REFERENCE / "environment.md").read_text(encoding="utf-8"))
    assert set(told) == found | {variable_of(name) for name in PLACES}


@pytest.mark.engine
def test_every_parameter_of_the_api_is_on_its_page() -> None:
    from kvtier.serve.server.refused import HARMLESS, LABELS
    from kvtier.serve.server.schemas import (
        ChatMessage,
        ChatRequest,
        CompletionRequest,
        StreamOptions,
    )

    supported = _rows(_section("openai.md", "Supported"))
    own = _rows(_section("openai.md", "kvtier's own"))
    ignored = set(NAME.findall(_section("openai.md", "Ignored")))
    chat, completions = set(ChatRequest.model_fields), set(CompletionRequest.model_fields)
    assert {*supported, *own, *ignored} == chat | completions | LABELS
    assert ignored == LABELS | {"user"}
    for name, (endpoints, *_) in (supported | own).items():
        at = {"both": (True, True), "chat": (True, False), "completions": (False, True)}[endpoints]
        assert (name in chat, name in completions) == at, name
    prose = set(NAME.findall(_section("openai.md", "Supported").rpartition("|")[2]))
    assert {*ChatMessage.model_fields, *StreamOptions.model_fields} <= prose

    refused = _rows(_section("openai.md", "Refused"))
    assert set(refused) == set(HARMLESS)
    for name, (values, *_) in refused.items():
        shown = ", ".join(f"`{json.dumps(value)}`" for value in HARMLESS[name])
        assert values == (shown or "none"), name


def test_public_names_are_there_and_need_no_torch() -> None:
    code = (
        "import sys, kvtier; [getattr(kvtier, name) for name in kvtier.__all__];"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert set(PUBLIC) <= set(dir(kvtier))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = kvtier.no_such_name  # type: ignore[attr-defined]


def test_a_type_checker_sees_the_same_public_names() -> None:
    stub = (ROOT / "src/kvtier/__init__.pyi").read_text(encoding="utf-8")
    named = set(re.findall(r"import (\w+) as \1\b", stub)) | {"__version__"}
    assert named == set(PUBLIC)
