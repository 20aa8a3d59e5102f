"""Templates of reports: no tool uses another tool's, as with modules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvtier.tools

TOOLS = Path(kvtier.tools.__file__).parent
TEMPLATES = sorted(TOOLS.rglob("*.j2"))


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_a_template_uses_its_own_tools_or_those_of_the_reports(template: Path) -> None:
    used = re.findall(r'"kvtier\.tools\.(\w+)/(\S+)"', template.read_text())
    for tool, name in used:
        assert tool in {"report", template.parent.name}
        assert (TOOLS / tool / name).is_file()


def test_there_are_templates() -> None:
    assert {path.name for path in TEMPLATES} >= {"page.html.j2", "serve.html.j2", "replay.html.j2"}
